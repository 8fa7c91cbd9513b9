/* Raising what kernels have found (device/error_word.h); rf_cuda_check is here too. */
#ifndef RECFUSE_CUDA_DRIVER_CHECK_H
#define RECFUSE_CUDA_DRIVER_CHECK_H

#include "cuda/driver/device.h"

/* Raises what a kernel has recorded in `word`, once: RF_ERR_INDEX or RF_ERR_VALUE with its message. RF_OK when there is
 * nothing, or when `stream` is capturing. Costs one read of host memory when there is nothing. Never waits. */
rf_status rf__cuda_check_word(const rf__cuda_device *device, rf__cuda_error_word word, void *stream);

#endif
