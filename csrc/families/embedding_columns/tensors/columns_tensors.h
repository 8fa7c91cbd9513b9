/* Reads an at::Tensor into row `at` of a list of inputs, without a copy. RF_ERR_VALUE or RF_ERR_TYPE names
 * the argument of the operator ("dense", "values", ...) that the tensor is of. Not in the library without
 * torch. */
#ifndef RECFUSE_COLUMNS_TENSORS_H
#define RECFUSE_COLUMNS_TENSORS_H

#include "families/embedding_columns/tensors/columns_inputs.h"

/* Reads [batch] or [batch, width] of float32, int32 or int64, of any strides. */
RF__SHARED rf_status rf__columns_dense_read(rf__columns_inputs *inputs, int64_t at, void *tensor);
/* Reads values [lookups] of those types, offsets [features * batch + 1] of int32 or int64, and weights
 * [lookups] of float32, which may be NULL or of no elements; all contiguous. */
RF__SHARED rf_status rf__columns_jagged_read(rf__columns_inputs *inputs, int64_t at, void *values,
                                             void *offsets, void *weights);

#endif
