/* The kernels of one instruction set. Each pool_ISA.c defines RF__TABLE (the name of its table of kernels)
 * and RF__WIDEST (floats in its widest vector) and includes this. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/half.h"
#include "families/fused_embedding_bag/cpu/look_ahead.h"
#include "families/fused_embedding_bag/cpu/pool.h"
#include "gpu/device/rounding.h"

/* Kernels with constant arguments are inlined into a function each. RF_ONE_KERNEL: all of a width call one
 * function, as sanitizers compile hundreds of copies of a kernel in minutes and find the same in one. */
#if defined(RF_ONE_KERNEL)
#define RF__FOR_CONSTANTS __attribute__((noinline))
#else
#define RF__FOR_CONSTANTS RF__INLINE
#endif

/* Where the rows of a quantised table lie. */
typedef struct rf__place {
    const char *weight, *parameters; /* of row 0; the weight at the chunk's first column */
    int64_t pitch, parameters_pitch, columns;
    uint64_t limit;
    const void *indices;
    rf_dtype parameters_dtype;
} rf__place;

/* The scale and the bias of a quantised row, and two zeros. */
typedef float rf__row_parameters __attribute__((vector_size(16)));

static RF__INLINE rf__row_parameters rf__row_parameters_at(const char *from, rf_dtype dtype) {
    if (dtype == RF_FLOAT32) {
        float both[2];
        memcpy(both, from, sizeof both);
        return (rf__row_parameters){both[0], both[1]};
    }
#if defined(__F16C__)
    int bits;
    memcpy(&bits, from, sizeof bits);
    return (rf__row_parameters)_mm_cvtph_ps(_mm_cvtsi32_si128(bits));
#else
    uint16_t halves[2];
    memcpy(halves, from, sizeof halves);
    return (rf__row_parameters){rf__f16_to_f32(halves[0]), rf__f16_to_f32(halves[1])};
#endif
}

#if RF__WIDEST >= 4
#define RF__W 4
#include "core/vector.h"
#include "families/fused_embedding_bag/cpu/quantized_codes.h"
#include "families/fused_embedding_bag/cpu/quantized_width.h"
#include "families/fused_embedding_bag/cpu/pool_width.h"
#endif
#if RF__WIDEST >= 8
#define RF__W 8
#include "core/vector.h"
#include "families/fused_embedding_bag/cpu/quantized_codes.h"
#include "families/fused_embedding_bag/cpu/quantized_width.h"
#include "families/fused_embedding_bag/cpu/pool_width.h"
#endif
#if RF__WIDEST >= 16
#define RF__W 16
#include "core/vector.h"
#include "families/fused_embedding_bag/cpu/quantized_codes.h"
#include "families/fused_embedding_bag/cpu/quantized_width.h"
#include "families/fused_embedding_bag/cpu/pool_width.h"
#endif

/* One function for each constant argument of pool_chunk, so that each is compiled by itself. */
typedef bool (*rf__chunk)(const rf__pool_call *call, const rf__table *table, int64_t first, int64_t last,
                          int64_t column, int64_t columns, rf__ahead *ahead);
#define RF__CHUNK(width, vectors, part, suffix, dtype, index_type, op)                                       \
    static bool chunk##width##_##vectors##_##part##suffix(const rf__pool_call *call, const rf__table *table, \
                                                          int64_t first, int64_t last, int64_t column,       \
                                                          int64_t columns, rf__ahead *ahead) {               \
        return pool_chunk##width(call, table, first, last, column, columns, ahead, vectors, part, dtype,     \
                                 index_type, op);                                                            \
    }
#define RF__CHUNKS_WIDEST_(width, suffix, dtype, index_type, op) \
    RF__CHUNK(width, 8, 0, suffix, dtype, index_type, op)        \
    RF__CHUNK(width, 4, 0, suffix, dtype, index_type, op)        \
    RF__CHUNK(width, 2, 0, suffix, dtype, index_type, op)        \
    RF__CHUNK(width, 1, 0, suffix, dtype, index_type, op)        \
    RF__CHUNK(width, 1, 1, suffix, dtype, index_type, op)
#define RF__CHUNKS_WIDEST(width, suffix, dtype, index_type, op) \
    RF__CHUNKS_WIDEST_(width, suffix, dtype, index_type, op)
#define RF__CHUNKS_NARROW(width, suffix, dtype, index_type, op) \
    RF__CHUNK(width, 1, 0, suffix, dtype, index_type, op)       \
    RF__CHUNK(width, 1, 1, suffix, dtype, index_type, op)

/* Selects the chunks of a row of `dim` columns: `fit` returns the function for the remaining columns and
 * their number. A row that fits a narrow vector uses that. */
#define RF__FIT(width, vectors, part, suffix, condition, taken) \
    if (condition) {                                            \
        *columns = taken;                                       \
        return chunk##width##_##vectors##_##part##suffix;       \
    }
#define RF__FIT_WIDEST_(width, suffix)                         \
    RF__FIT(width, 8, 0, suffix, left >= 8 * width, 8 * width) \
    RF__FIT(width, 4, 0, suffix, left >= 4 * width, 4 * width) \
    RF__FIT(width, 2, 0, suffix, left >= 2 * width, 2 * width) \
    RF__FIT(width, 1, 0, suffix, left >= width, width)
#define RF__FIT_WIDEST(width, suffix) RF__FIT_WIDEST_(width, suffix)
#define RF__FIT_NARROW(width, suffix)                  \
    RF__FIT(width, 1, 0, suffix, left == width, width) \
    RF__FIT(width, 1, 1, suffix, left < width, left)
#define RF__PART_WIDEST_(width, suffix) return *columns = left, chunk##width##_1_1##suffix;
#define RF__PART_WIDEST(width, suffix) RF__PART_WIDEST_(width, suffix)

#if RF__WIDEST == 16
#define RF__NARROWER(do_width, ...) do_width(4, __VA_ARGS__) do_width(8, __VA_ARGS__)
#elif RF__WIDEST == 8
#define RF__NARROWER(do_width, ...) do_width(4, __VA_ARGS__)
#else
#define RF__NARROWER(do_width, ...)
#endif

enum { BAGS_TOGETHER = 4 }; /* bags whose chunks are pooled together: their rows stay in L2 between chunks */

#define RF__KERNEL(suffix, dtype, index_type, op)                                                            \
    RF__NARROWER(RF__CHUNKS_NARROW, suffix, dtype, index_type, op)                                           \
    RF__CHUNKS_WIDEST(RF__WIDEST, suffix, dtype, index_type, op)                                             \
    static rf__chunk fit##suffix(int64_t left, int64_t *columns) {                                           \
        RF__NARROWER(RF__FIT_NARROW, suffix)                                                                 \
        RF__FIT_WIDEST(RF__WIDEST, suffix)                                                                   \
        RF__PART_WIDEST(RF__WIDEST, suffix)                                                                  \
    }                                                                                                        \
    static bool pool##suffix(const rf__pool_call *call, const rf__table *table, int64_t first, int64_t last, \
                             rf__ahead *ahead) {                                                             \
        return rf__pool_rows(call, table, first, last, ahead, fit##suffix);                                  \
    }

/* `table->row.dim` is 1 or more. */
static bool rf__pool_rows(const rf__pool_call *call, const rf__table *table, int64_t first, int64_t last,
                          rf__ahead *ahead, rf__chunk (*fit)(int64_t left, int64_t *columns)) {
    int64_t columns = 0;
    rf__chunk chunk = fit(table->row.dim, &columns);
    if (columns == table->row.dim) return chunk(call, table, first, last, 0, columns, ahead);
    for (int64_t bag = first; bag < last; bag += BAGS_TOGETHER) {
        int64_t end = last - bag < BAGS_TOGETHER ? last : bag + BAGS_TOGETHER;
        for (int64_t column = 0; column < table->row.dim; column += columns) {
            chunk = fit(table->row.dim - column, &columns);
            if (!chunk(call, table, bag, end, column, columns, column == 0 ? ahead : NULL)) return false;
        }
    }
    return true;
}

#define RF__KERNELS(dtype_name, dtype, int_name, index_type)                         \
    RF__KERNEL(_sum_##dtype_name##_##int_name, dtype, index_type, RF__SUM)           \
    RF__KERNEL(_weighted_##dtype_name##_##int_name, dtype, index_type, RF__WEIGHTED) \
    RF__KERNEL(_max_##dtype_name##_##int_name, dtype, index_type, RF__MAX)

RF__KERNELS(f32, RF_FLOAT32, i32, RF_INT32)
RF__KERNELS(f32, RF_FLOAT32, i64, RF_INT64)
RF__KERNELS(f16, RF_FLOAT16, i32, RF_INT32)
RF__KERNELS(f16, RF_FLOAT16, i64, RF_INT64)
RF__KERNELS(bf16, RF_BFLOAT16, i32, RF_INT32)
RF__KERNELS(bf16, RF_BFLOAT16, i64, RF_INT64)
RF__KERNELS(int8, RF_INT8_ROWS, i32, RF_INT32)
RF__KERNELS(int8, RF_INT8_ROWS, i64, RF_INT64)
RF__KERNELS(int4, RF_INT4_ROWS, i32, RF_INT32)
RF__KERNELS(int4, RF_INT4_ROWS, i64, RF_INT64)

#include "families/fused_embedding_bag/cpu/gradient_kernels.h"
#include "families/fused_embedding_bag/cpu/update_kernels.h"

#define RF__ENTRY(name) {pool_sum_##name, pool_weighted_##name, pool_max_##name}
const rf__pool_kernels RF__TABLE = {.pool = {[RF_FLOAT32] = {RF__ENTRY(f32_i32), RF__ENTRY(f32_i64)},
                                             [RF_FLOAT16] = {RF__ENTRY(f16_i32), RF__ENTRY(f16_i64)},
                                             [RF_BFLOAT16] = {RF__ENTRY(bf16_i32), RF__ENTRY(bf16_i64)},
                                             [RF_INT8_ROWS] = {RF__ENTRY(int8_i32), RF__ENTRY(int8_i64)},
                                             [RF_INT4_ROWS] = {RF__ENTRY(int4_i32), RF__ENTRY(int4_i64)}},
                                    .sum_row = {sum_row_f32, sum_row_f16, sum_row_bf16},
                                    .sum_rows = {sum_rows_f32, sum_rows_f16, sum_rows_bf16},
                                    .mixed_row = mixed_row,
                                    .update_row = RF__UPDATES,
                                    .winners = bag_winners,
                                    .dot_row = dot_row,
                                    .load = load_block,
                                    .load_codes = load_codes,
                                    .store = store_block};
