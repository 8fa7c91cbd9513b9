/* The error word of a layer's calls. */
#include "cuda/ikbo_attention/ikbo_attention.h"

rf__cuda_error_word rf__ikbo_attention_error_word(const rf__cuda_device *device,
                                                  const rf_ikbo_attention_params *params) {
    const uint64_t shape = ((uint64_t)params->heads << 42) ^ ((uint64_t)params->kv_heads << 21) ^
                           (uint64_t)params->dim ^ (UINT64_C(1) << 63);
    return rf__cuda_error_word_of(&device->errors, NULL, shape);
}

rf_status rf__ikbo_attention_check_earlier(const rf_ikbo_attention_params *params,
                                           const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    return rf__cuda_check_word(device, rf__ikbo_attention_error_word(device, params), stream->stream);
}
