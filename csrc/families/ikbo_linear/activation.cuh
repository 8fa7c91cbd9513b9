/* Activations of a sum: rf_activate<RF_ACTIVATION_...>(x). */
#ifndef RECFUSE_IKBO_LINEAR_ACTIVATION_CUH
#define RECFUSE_IKBO_LINEAR_ACTIVATION_CUH

#include "gpu/device/common.cuh"
#include "recfuse/ikbo_codes.h"

template <int ACTIVATION> RF_INLINE float rf_activate(float x) {
    if (ACTIVATION == RF_ACTIVATION_RELU) return x < 0.0f ? 0.0f : x; /* keeps a NaN */
    if (ACTIVATION == RF_ACTIVATION_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
    if (ACTIVATION == RF_ACTIVATION_SILU) return x / (1.0f + expf(-x));
    return x;
}
template <int ACTIVATION> RF_INLINE double rf_activate(double x) {
    if (ACTIVATION == RF_ACTIVATION_RELU) return x < 0.0 ? 0.0 : x;
    if (ACTIVATION == RF_ACTIVATION_GELU) return 0.5 * x * (1.0 + erf(x * 0.70710678118654752440));
    if (ACTIVATION == RF_ACTIVATION_SILU) return x / (1.0 + exp(-x));
    return x;
}

#endif
