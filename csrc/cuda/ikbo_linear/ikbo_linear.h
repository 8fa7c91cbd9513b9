/* What the files of the family share. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_H
#define RECFUSE_CUDA_IKBO_LINEAR_H

#include "cuda/driver/device.h"

/* The word of calls with this weight [m, k] of the last level. */
rf__cuda_error_word rf__ikbo_linear_error_word(const rf__cuda_device *device, const void *weight, int64_t m);

/* Raises what earlier calls with this weight have left. */
rf_status rf__ikbo_linear_check(const void *weight, int64_t m, const rf_cuda_stream *stream);

/* rf_ikbo_add_cuda without that: of a call that adds several times, and must not raise what it finds itself. */
rf_status rf__ikbo_add_launch(const rf_ikbo_add_params *params, const rf_cuda_stream *stream);

#endif
