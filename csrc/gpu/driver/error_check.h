/* Raising the errors that kernels and threads have left; rf_cuda_check is here too. */
#ifndef RECFUSE_CUDA_DRIVER_ERROR_CHECK_H
#define RECFUSE_CUDA_DRIVER_ERROR_CHECK_H

#include "gpu/driver/device.h"

/* Raises the error of a word, or its note, once. Returns RF_OK without any, and if `stream` is captured.
 * Costs one read of host memory without an error. Never waits. */
rf_status rf__cuda_check_word(const rf__cuda_device *device, rf__cuda_error_word word, void *stream);

#endif
