/* What csrc/torch tells csrc/python, which knows no libtorch, of an at::Tensor. Not in the library without torch. */
#ifndef RECFUSE_TENSORS_H
#define RECFUSE_TENSORS_H

#include "base/status.h"

/* Bytes of a tensor's storage, and the element of it that the tensor begins at. False: it has no storage. */
RF__SHARED bool rf__tensor_storage(void *tensor, int64_t *bytes, int64_t *first);

/* RF_ERR_VALUE where the storage is too small for the elements of a strided tensor of any device. RF_OK for tensors of other
 * layouts. */
RF__SHARED rf_status rf__tensor_storage_check(const char *argument, void *tensor);

#endif
