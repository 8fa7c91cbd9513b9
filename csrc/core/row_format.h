/* The layout of rows in memory. Only this file computes the bytes of elements and rows;
 * tests/tools/test_lint.py checks that. */
#ifndef RECFUSE_ROW_FORMAT_H
#define RECFUSE_ROW_FORMAT_H

#include "recfuse.h"

#include "gpu/device/codes.h"

/* Returns the bytes of `count` adjacent elements. A packed dtype rounds up here. */
static inline int64_t rf__elements_bytes(rf_dtype dtype, int64_t count) {
    return (count * rf_element_bits((int)dtype) + 7) / 8;
}

/* Returns the number of elements in `bytes`. */
static inline int64_t rf__elements_in(rf_dtype dtype, int64_t bytes) {
    return bytes * 8 / rf_element_bits((int)dtype);
}

/* Returns true if one aligned instruction can move `count` adjacent elements at an address. */
static inline bool rf__elements_aligned(uint64_t address, rf_dtype dtype, int64_t count) {
    return address % (uint64_t)rf__elements_bytes(dtype, count) == 0;
}

/* Returns true if the bytes of `rows` rows, `stride` elements apart, fit into int64. Requires rows and stride
 * >= 0. */
static inline bool rf__rows_fit(rf_dtype dtype, int64_t rows, int64_t stride) {
    int64_t elements, bytes;
    return !__builtin_mul_overflow(rows, stride, &elements) &&
           !__builtin_mul_overflow(elements, rf__elements_bytes(dtype, 1), &bytes);
}

/* Returns the largest power of two, at most `most`, that divides all addresses and sizes whose bits are in
 * `bits`. */
static inline int32_t rf__alignment_of(uint64_t bits, int32_t most) {
    bits |= (uint64_t)most;
    return (int32_t)(bits & -bits);
}

/* The rows of a table, output or gradient. The codes of a quantised table have two parameters a row, its scale and
 * its bias, side by side. They are in an array of their own or between the codes: their first address and
 * their pitch tell both. */
typedef struct rf__row_format {
    rf_dtype dtype; /* of its elements */
    int64_t dim; /* elements of a row */
    int64_t bytes; /* of the elements of a row */
    int64_t pitch; /* bytes from a row to the next; parameters in the row are part of it */
    rf_dtype parameters_dtype; /* RF_FLOAT16 or RF_FLOAT32; only of quantised rows, as the next */
    int64_t parameters_pitch; /* bytes from the parameters of a row to those of the next */
} rf__row_format;

/* Returns the bytes of a row's scale and bias. */
static inline int64_t rf__parameters_bytes(rf_dtype parameters_dtype) {
    return rf__elements_bytes(parameters_dtype, 2);
}

/* Returns the bytes of a row and of its scale and bias. */
static inline int64_t rf__row_read_bytes(const rf__row_format *row) {
    return row->bytes + (rf_is_quantized((int)row->dtype) ? rf__parameters_bytes(row->parameters_dtype) : 0);
}

/* Returns the format of rows with a stride of `stride` elements. */
static inline rf__row_format rf__row_format_of(rf_dtype dtype, int64_t dim, int64_t stride) {
    return (rf__row_format){.dtype = dtype,
                            .dim = dim,
                            .bytes = rf__elements_bytes(dtype, dim),
                            .pitch = rf__elements_bytes(dtype, stride)};
}

/* Returns the format of contiguous rows. */
static inline rf__row_format rf__contiguous_row(rf_dtype dtype, int64_t dim) {
    return rf__row_format_of(dtype, dim, dim);
}

/* Returns the bytes from the beginning of row 0 to element `column` of a row. */
static inline int64_t rf__row_offset(const rf__row_format *format, int64_t row, int64_t column) {
    return row * format->pitch + rf__elements_bytes(format->dtype, column);
}

/* Returns the address of element `element` in memory that is filled with elements. */
static inline const char *rf__element_at(const void *data, rf_dtype dtype, int64_t element) {
    return (const char *)data + rf__elements_bytes(dtype, element);
}

#endif
