/* rf_ikbo_attention_cuda: attention in one launch. */
#include "base/validate.h"

bool rf_ikbo_attention_takes(const rf_ikbo_attention_params *params, int32_t device) {
    (void)params, (void)device;
    return false;
}

rf_status rf_ikbo_attention_cuda(const rf_ikbo_attention_params *params, const rf_cuda_stream *stream) {
    RF_CHECK(rf__check_ikbo_attention(params));
    return rf__fail(RF_ERR_UNSUPPORTED,
                    "recfuse.ikbo_attention: path \"fused\" has no kernel for GPU %d; use \"auto\" or "
                    "\"packed\"",
                    (int)stream->device);
}
