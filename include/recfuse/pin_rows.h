/* Rows of a table that stay in a GPU's L2. */
#ifndef RECFUSE_API_PIN_ROWS_H
#define RECFUSE_API_PIN_ROWS_H

#include "recfuse/cuda.h"

RF_BEGIN_DECLARATIONS

/* Rows of a table to pin in L2 or to unpin. */
typedef struct rf_pin_rows_params {
    const void *weight; /* [rows, row_bytes] on the device, row_pitch bytes apart, any alignment */
    int64_t rows, row_bytes, row_pitch;
    const void *hot_rows; /* [n_hot_rows] of index_type, on the device */
    int64_t n_hot_rows;
    rf_int_type index_type;
} rf_pin_rows_params;

/* Loads the rows into L2 with the policy evict-last (`keep`), or with the normal policy (not `keep`), by a
 * kernel on the stream. A hint: L2 may still evict them. A row outside the table is reported as in
 * rf_embedding_bag_cuda. Waits for the compilation of the kernel, once, and never for the device.
 * RF_ERR_VALUE, RF_ERR_TYPE, RF_ERR_INDEX (of an earlier call), RF_ERR_CUDA. */
RF_API rf_status rf_pin_rows_cuda(const rf_pin_rows_params *params, bool keep, const rf_cuda_stream *stream);
/* Takes the marks of all lines of the device's L2 away. RF_ERR_NO_DEVICE, RF_ERR_CUDA. */
RF_API rf_status rf_unpin_all_cuda(int32_t device);

RF_END_DECLARATIONS

#endif
