/* Rows of floats to rows of codes, and back. */
#ifndef RECFUSE_API_QUANTIZE_ROWS_H
#define RECFUSE_API_QUANTIZE_ROWS_H

#include "recfuse/types.h"

RF_BEGIN_DECLARATIONS

/* Rows of codes, as in rf_buffer. The caller owns all memory. */
typedef struct rf_quantized_rows {
    int64_t rows, dim;
    rf_dtype dtype; /* RF_INT8_ROWS or RF_INT4_ROWS; dim is whole bytes */
    void *codes; /* [rows][dim] of dtype; row r at codes + r * pitch */
    void *
        parameters; /* [rows][2] of parameters_dtype: scale and bias of row r at parameters + r * parameters_pitch */
    rf_dtype parameters_dtype; /* RF_FLOAT16, or RF_FLOAT32 */
    int64_t pitch, parameters_pitch; /* bytes; rows must not overlap */
} rf_quantized_rows;

/* Rows of floats. */
typedef struct rf_float_rows {
    void *weight; /* [rows, dim], not written by rf_quantize_rows_cpu */
    rf_dtype dtype; /* RF_FLOAT32, RF_FLOAT16 or RF_BFLOAT16 */
    int64_t stride; /* elements from a row to the next */
} rf_float_rows;

/* Quantises each row of `from` to `to`, whose parameters are halves. The bias is the least value, rounded down to a half; the
 * scale is the least half for which the largest code reaches the largest value. So |x - (scale * code + bias)| is at
 * most scale / 2 for every value x. *largest_error: the largest distance of all rows; may be NULL. Needs no memory except the
 * result. RF_ERR_VALUE names the first value that is not finite or beyond the range of halves; the result is then
 * incomplete. */
RF_API rf_status rf_quantize_rows_cpu(const rf_float_rows *from, const rf_quantized_rows *to,
                                      double *largest_error, const rf_executor *executor);

/* Writes scale * code + bias of each code of `from` to `to`. */
RF_API rf_status rf_dequantize_rows_cpu(const rf_quantized_rows *from, const rf_float_rows *to,
                                        const rf_executor *executor);

RF_END_DECLARATIONS

#endif
