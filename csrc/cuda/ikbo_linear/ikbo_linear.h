/* What the files of the family share. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_H
#define RECFUSE_CUDA_IKBO_LINEAR_H

#include "cuda/driver/device.h"

/* The word of calls with this weight [m, k] of the last level. */
rf__cuda_error_word rf__ikbo_linear_error_word(const rf__cuda_device *device, const void *weight, int64_t m);

#endif
