/* Stochastic rounding: a float32 becomes one of its two neighbours in float16 or bfloat16, at random, so that
 * the mean over many roundings is the value itself (Gupta et al., "Deep learning with limited numerical
 * precision", ICML 2015). Included as "gpu/device/rounding.h" by host C and by kernels: the same bits on
 * both.
 *
 * The random bits are a hash of seed and step, row and column, not the state of a generator. So they depend
 * neither on the order nor on the number of threads, and a repeated step rounds in the same way.
 */
#ifndef RECFUSE_CUDA_DEVICE_ROUNDING_H
#define RECFUSE_CUDA_DEVICE_ROUNDING_H

#include "gpu/device/types.h"

#ifdef __CUDACC__
#define RF_ROUNDING __device__ __forceinline__
RF_ROUNDING rf_u32 rf_rounding_word(float value) { return __float_as_uint(value); }
#else
#include <string.h>
#define RF_ROUNDING static inline __attribute__((always_inline))
RF_ROUNDING rf_u32 rf_rounding_word(float value) {
    rf_u32 word;
    memcpy(&word, &value, sizeof word);
    return word;
}
#endif

/* SplitMix64's mixing (Steele, Lea, Flood, OOPSLA 2014), as in core/tools/random.h. */
RF_ROUNDING rf_u64 rf_rounding_mix(rf_u64 bits) {
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

/* The source of the bits of a step and of a row. `step`: RF_UPDATE_STEP. */
RF_ROUNDING rf_u64 rf_rounding_step(rf_u64 seed, float step) {
    return rf_rounding_mix(seed + (rf_rounding_word(step) + 1ull) * 0x9e3779b97f4a7c15u);
}
RF_ROUNDING rf_u64 rf_rounding_row(rf_u64 of_step, rf_i64 row) {
    return rf_rounding_mix(of_step + ((rf_u64)row + 1) * 0x9e3779b97f4a7c15u);
}

/* 32 random bits for one column of a row; in words of 32 bits, which vector units multiply fast. */
RF_ROUNDING rf_u32 rf_rounding_bits(rf_u64 row, rf_u32 column) {
    rf_u32 bits = (rf_u32)row + column * 0x9e3779b9u;
    bits = (bits ^ (bits >> 16)) * 0xbf58476du + (rf_u32)(row >> 32);
    bits = (bits ^ (bits >> 15)) * 0x94d049bbu;
    return bits ^ (bits >> 16);
}

/* Values beyond the largest finite value become infinite with a probability in proportion to their distance
 * from it. Keeps NaN. */
RF_ROUNDING rf_u16 rf_round_bf16(float value, rf_u32 random) {
    const rf_u32 word = rf_rounding_word(value);
    if ((word & 0x7f800000u) == 0x7f800000u)
        return (rf_u16)(word >> 16 | ((word & 0x7fffffu) != 0 ? 0x40u : 0u));
    return (rf_u16)((word + (random & 0xffffu)) >> 16);
}

RF_ROUNDING rf_u16 rf_round_f16(float value, rf_u32 random) {
    const rf_u32 word = rf_rounding_word(value), sign = word >> 16 & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (rf_u16)(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return (rf_u16)(sign | 0x7c00u); /* 2^16 and more */
    if (magnitude < 0x38800000u) { /* below 2^-14, where the spacing is 2^-24 */
        const float units = (value < 0 ? -value : value) * 16777216.0f;
        const rf_u32 lower = (rf_u32)units;
        const rf_u32 fraction = (rf_u32)((units - (float)lower) * 16777216.0f);
        return (rf_u16)(sign | (lower + ((random & 0xffffffu) < fraction ? 1u : 0u)));
    }
    return (rf_u16)(sign | (magnitude - 0x38000000u + (random & 0x1fffu)) >> 13);
}

#endif
