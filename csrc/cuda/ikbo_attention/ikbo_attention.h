/* What the files of the family share. */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_H
#define RECFUSE_CUDA_IKBO_ATTENTION_H

#include "cuda/driver/device.h"
#include "ikbo_attention/keys.h"

/* The word of calls with these heads, kv_heads and dim: keys have another address in each call, layers the same shape. */
rf__cuda_error_word rf__ikbo_attention_error_word(const rf__cuda_device *device,
                                                  const rf_ikbo_attention_params *params);

/* Raises what earlier calls of that shape have left. */
rf_status rf__ikbo_attention_check_earlier(const rf_ikbo_attention_params *params,
                                           const rf_cuda_stream *stream);

/* Where the keys of a call are, for kernels; `pitch`: positions from user to user. */
rf_attention_users rf__attention_users_of(const rf_ikbo_attention_params *params, int64_t pitch);

#endif
