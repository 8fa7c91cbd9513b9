/* What the two paths on a GPU share on the host: the error word of a layer's calls, and where keys are. */
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

rf_attention_users rf__attention_users_of(const rf_ikbo_attention_params *params, int64_t pitch) {
    return (rf_attention_users){
        .lengths = {params->kv_lengths, params->kv_lengths_type == RF_INT64},
        .offsets = {params->kv_offsets, params->kv_offsets_type == RF_INT64},
        .count = params->n_users,
        .positions = params->positions,
        .pitch = pitch,
    };
}
