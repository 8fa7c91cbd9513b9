/* The bias of a row, which kernels add to sums in float32. */
#ifndef RECFUSE_IKBO_LINEAR_BIAS_CUH
#define RECFUSE_IKBO_LINEAR_BIAS_CUH

#include "gpu/device/element.cuh"

/* Returns element `row` of a bias [m], or 0 if it is NULL. */
template <int DTYPE> RF_INLINE float rf_bias_of(const rf_u16 *bias, int row, int m) {
    if (bias == nullptr || row >= m) return 0.0f;
    rf_bytes<2> bits;
    bits.word[0] = bias[row];
    return rf_element<DTYPE>::get(bits, 0);
}

#endif
