/* float16 and bfloat16 in plain integers: for the instruction sets that have no conversion. */
#ifndef RECFUSE_CPU_HALF_H
#define RECFUSE_CPU_HALF_H

#include <stdint.h>
#include <string.h>

static inline float rf__bits_to_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t rf__f32_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float rf__f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return rf__bits_to_f32(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x400u)
        return rf__bits_to_f32(rf__f32_to_bits((float)magnitude * 0x1p-24f) | sign); /* subnormal */
    return rf__bits_to_f32(sign | ((magnitude << 13) + (112u << 23)));
}

/* Rounds to nearest even. */
static inline uint16_t rf__f32_to_f16(float value) {
    uint32_t bits = rf__f32_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* subnormal: the addition rounds at the right bit */
        return (uint16_t)(sign | (rf__f32_to_bits(rf__bits_to_f32(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

/* Rounds to nearest even; keeps NaN. */
static inline uint16_t rf__f32_to_bf16(float value) {
    uint32_t bits = rf__f32_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#endif
