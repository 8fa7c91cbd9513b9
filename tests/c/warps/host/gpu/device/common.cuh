/* gpu/device/common.cuh for kernels whose block of threads runs on the host (warps.h): the same names,
 * without the GPU's instructions. */
#ifndef RECFUSE_COMMON_CUH
#define RECFUSE_COMMON_CUH

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
using std::isinf;

#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __noinline__
#define RF_INLINE inline
#define RF_FULL_WARP 0xffffffffu

/* Of a single thread, before headers that are compiled for both sides. */
static inline unsigned __float_as_uint(float number) {
    unsigned bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
static inline double __hiloint2double(int high, int low) {
    const int words[2] = {low, high};
    double number;
    memcpy(&number, words, sizeof number);
    return number;
}
static inline int double_word(double number, int word) {
    int words[2];
    memcpy(words, &number, sizeof words);
    return words[word];
}
static inline int __double2loint(double number) { return double_word(number, 0); }
static inline int __double2hiint(double number) { return double_word(number, 1); }
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#include "gpu/device/codes.h"
#include "gpu/device/error_word.h"
#include "gpu/device/types.h"

struct host_index {
    unsigned x, y, z;
};
static thread_local host_index blockIdx, threadIdx;

/* An address that is not aligned ends the process, as on a device. */
template <class T> inline void aligned_or_abort(const T *address) {
    if ((uintptr_t)address % alignof(T) == 0) return;
    fprintf(stderr, "an access of %zu bytes at %p\n", alignof(T), (const void *)address);
    abort();
}

template <int BYTES> struct __align__(BYTES) rf_bytes {
    rf_u32 word[BYTES / 4];
};
template <> struct __align__(2) rf_bytes<2> {
    rf_u16 word[1];
};
template <> struct rf_bytes<1> {
    rf_u8 word[1];
};

template <class T> inline T rf_load(const T *from) {
    aligned_or_abort(from);
    return *from;
}

template <class T> inline T rf_load_if(int there, const T *from) { return there >= 0 ? rf_load(from) : T{}; }

template <class T> inline void rf_keep(T &) {}
template <class T> inline void rf_forget(T &) {}
inline rf_u8 *rf_address(const rf_u8 *first, rf_u64 number, rf_u32 pitch) {
    return (rf_u8 *)first + number * pitch;
}
/* Only readable memory may be prefetched: reads it. */
inline void rf_prefetch(const void *at) { (void)*(const volatile rf_u8 *)at; }
template <class T> inline T rf_load_first(const T *from) { return rf_load(from); }

/* Rounds to nearest, ties to even, in units of 2^shift of the float's bits. */
static inline rf_u32 rounded_bits(rf_u32 bits, int shift) {
    return (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
}
inline float rf_float16_number(rf_u16 bits) {
    const rf_u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | rest << 13);
    const float size = exponent ? ldexpf((float)(1024 + rest), (int)exponent - 25) : ldexpf((float)rest, -24);
    return sign ? -size : size;
}
inline rf_u16 rf_float16_of(float value) {
    const rf_u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7e00u;
    if (rest >= 0x477ff000u) return sign | 0x7c00u;
    if (rest < 0x38800000u) return sign | (rf_u32)nearbyintf(fabsf(value) * 16777216.0f);
    return sign | rounded_bits(rest - 0x38000000u, 13);
}
inline rf_u16 rf_bfloat16_of(float number) {
    return (rf_u16)rounded_bits(__float_as_uint(number), 16); /* no NaN here */
}

/* The last action of the previous kernel; default: nothing. */
inline thread_local void (*rf_previous_kernel)() = nullptr;
inline void rf_wait_for_previous_kernel() {
    if (rf_previous_kernel != nullptr) rf_previous_kernel();
}

inline float rf_near_root(float of) { return sqrtf(of); }
inline float rf_near_quotient(float value, float divisor) { return value / divisor; }

struct rf_offender {
    rf_argument argument;
    rf_i64 position, bag, value, limit, lookups;
};

/* Of a single thread: keeps the first report. */
template <rf_operator OPERATOR>
void rf_report(const rf_error_word &errors, const rf_offender &found, int feature = -1) {
    if ((*errors.claimed)++ != errors.record->raised) return;
    *errors.record = {RF_ERROR_READY,
                      found.argument,
                      OPERATOR,
                      feature,
                      found.position,
                      found.bag,
                      found.value,
                      found.limit,
                      found.lookups,
                      errors.record->raised,
                      0};
}

#endif
