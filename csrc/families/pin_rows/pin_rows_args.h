/* The arguments of the kernel in pin_rows.cu. */
#ifndef RECFUSE_CUDA_PIN_ROWS_ARGS_H
#define RECFUSE_CUDA_PIN_ROWS_ARGS_H

#include "gpu/device/error_word.h"

enum { RF_PIN_LINE_BYTES = 128 }; /* that a thread prefetches */

typedef struct rf_pin_rows_args {
    const rf_u8 *weight; /* [rows, row_bytes], row_pitch bytes apart */
    const RF_INDEX *hot_rows; /* [n_hot_rows] */
    rf_i64 rows, row_bytes, row_pitch, n_hot_rows;
    rf_i64 lines; /* that a row may touch */
    rf_error_word errors;
} rf_pin_rows_args;
RF_SIZE_IS(rf_pin_rows_args, 72);

#endif
