/* rf_ikbo_linear_cuda. */
#include "cuda/ikbo_linear/ikbo_linear.h"

bool rf_ikbo_linear_takes(const rf_ikbo_linear_params *params, int32_t device) {
    (void)params, (void)device;
    return false;
}

rf_status rf_ikbo_linear_cuda(const rf_ikbo_linear_params *params, const rf_cuda_stream *stream) {
    (void)params, (void)stream;
    return rf__fail(RF_ERR_UNSUPPORTED,
                    "the one-launch kernel (path \"fused\") does not take this call; use path \"auto\" or "
                    "\"broadcast\"");
}
