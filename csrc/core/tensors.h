/* Functions of csrc/torch for csrc/python, which does not use libtorch, on an at::Tensor. Not in the library
 * without torch. */
#ifndef RECFUSE_TENSORS_H
#define RECFUSE_TENSORS_H

#include "core/status.h"

/* RF_ERR_VALUE if the storage is too small for the elements of a strided tensor, on any device. RF_OK for
 * other layouts. */
RF__SHARED rf_status rf__tensor_storage_check(const char *argument, void *tensor);

/* Integers of a tensor [n] or [rows, n] on the CPU, which it owns. */
typedef struct rf__integers {
    void *data; /* may be NULL without elements */
    rf_int_type type;
    int64_t dim;
    int64_t sizes[2], strides[2]; /* [dim], in elements */
} rf__integers;

/* Reads an at::Tensor of int32 or int64 with `dim` dimensions, 1 or 2. False: it is another tensor, is on
 * another device, or its storage is too small for it. */
RF__SHARED bool rf__tensor_integers(void *tensor, int64_t dim, rf__integers *integers);

#endif
