/* The steps of an embedding column on a value, and the hash. Included as "families/embedding_columns/device/column_values.h" by host
 * C and by kernels. Both compute the same bits, so float32 is rounded after each operation.
 * RF_COLUMN_STEP_LIST in recfuse/embedding_columns.h defines the steps. */
#ifndef RECFUSE_CUDA_DEVICE_COLUMN_VALUES_H
#define RECFUSE_CUDA_DEVICE_COLUMN_VALUES_H

#include "gpu/device/types.h"
#include "recfuse/embedding_columns_codes.h"

#ifdef __CUDACC__
#define RF_COLUMN __device__ __forceinline__
RF_COLUMN float rf_column_affine(float value, float a, float b) { return __fadd_rn(__fmul_rn(value, a), b); }
/* The high half of the product; y < 2^32. */
RF_COLUMN rf_u64 rf_column_high(rf_u64 x, rf_u64 y) { return __umul64hi(x, y); }
#else
#include <math.h>
#define RF_COLUMN static inline __attribute__((always_inline))
/* Compiled with -ffp-contract=off. */
RF_COLUMN float rf_column_affine(float value, float a, float b) { return value * a + b; }
RF_COLUMN rf_u64 rf_column_high(rf_u64 x, rf_u64 y) {
    return ((x >> 32) * y + ((x & 0xffffffffu) * y >> 32)) >> 32;
}
#endif

RF_COLUMN float rf_column_log1p(float value) { return (float)log1p((double)value); }

/* Keeps a NaN, because comparisons with it are false. If the bounds cross, returns the upper bound, as
 * torch.clamp. */
RF_COLUMN float rf_column_clip(float value, float low_bound, float high_bound) {
    if (value < low_bound) value = low_bound;
    return value > high_bound ? high_bound : value;
}

RF_COLUMN rf_i64 rf_column_clip_integer(rf_i64 value, rf_i64 low_bound, rf_i64 high_bound) {
    if (value < low_bound) value = low_bound;
    return value > high_bound ? high_bound : value;
}

RF_COLUMN rf_i64 rf_column_cast(float value) {
    const rf_i64 low_bound = -0x7fffffffffffffffll - 1;
    if (value >= 9223372036854775808.0f) return 0x7fffffffffffffffll;
    return value >= -9223372036854775808.0f ? (rf_i64)value : low_bound; /* false for a NaN too */
}

RF_COLUMN rf_i64 rf_column_modulo(rf_i64 value, rf_i64 divisor) {
    const rf_i64 remainder = value % divisor;
    return remainder < 0 ? remainder + divisor : remainder;
}

/* XXH64 of a whole number of 8-byte words below 32 bytes (the specification of xxHash, section "XXH64
 * algorithm description"). */
#define RF_XXH64_1 0x9e3779b185ebca87ull
#define RF_XXH64_2 0xc2b2ae3d27d4eb4full
#define RF_XXH64_3 0x165667b19e3779f9ull
#define RF_XXH64_4 0x85ebca77c2b2ae63ull
#define RF_XXH64_5 0x27d4eb2f165667c5ull

RF_COLUMN rf_u64 rf_xxh64_rotate(rf_u64 bits, int by) { return bits << by | bits >> (64 - by); }

/* Takes in one word of the rest; the last step for all lengths. */
RF_COLUMN rf_u64 rf_xxh64_word(rf_u64 hash, rf_u64 word) {
    hash ^= rf_xxh64_rotate(word * RF_XXH64_2, 31) * RF_XXH64_1;
    return rf_xxh64_rotate(hash, 27) * RF_XXH64_1 + RF_XXH64_4;
}

RF_COLUMN rf_u64 rf_xxh64_avalanche(rf_u64 hash) {
    hash = (hash ^ hash >> 33) * RF_XXH64_2;
    hash = (hash ^ hash >> 29) * RF_XXH64_3;
    return hash ^ hash >> 32;
}

RF_COLUMN rf_u64 rf_column_hash(rf_i64 value, rf_u64 seed) {
    return rf_xxh64_avalanche(rf_xxh64_word(seed + RF_XXH64_5 + 8, (rf_u64)value));
}

RF_COLUMN rf_u64 rf_column_hash_pair(rf_i64 left, rf_i64 right, rf_u64 seed) {
    return rf_xxh64_avalanche(
        rf_xxh64_word(rf_xxh64_word(seed + RF_XXH64_5 + 16, (rf_u64)left), (rf_u64)right));
}

/* Returns the number of the ascending boundaries [count] that are less than the value; `right`: not greater.
 * All for a NaN. */
RF_COLUMN rf_i64 rf_column_bucket(float value, const float *boundaries, rf_i64 count, int right) {
    rf_i64 first = 0, last = count;
    while (first < last) {
        const rf_i64 middle = first + (last - first) / 2;
        const float boundary = boundaries[middle];
        if (right ? !(boundary > value) : !(boundary >= value))
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

/* Returns the boundary, of equidistant boundaries with `inverse` = 1 / distance, whose comparison is in
 * doubt: all previous ones are less than the value, all later ones greater. rf_embedding_columns_program
 * ensures that. A NaN gives the last one. */
RF_COLUMN rf_i32 rf_column_nearest(float value, float first, rf_i64 count, float inverse) {
    const float last = (float)(count - 1);
    float near = (value - first) * inverse;
    near = near < last ? near : last;
    near = near > 0.0f ? near : 0.0f;
    return (rf_i32)(near + 0.5f);
}

/* As rf_column_bucket, for equidistant boundaries; count >= 2. */
RF_COLUMN rf_i64 rf_column_bucket_even(float value, const float *boundaries, rf_i64 count, float inverse,
                                       int right) {
    const rf_i32 nearest = rf_column_nearest(value, boundaries[0], count, inverse);
    const float boundary = boundaries[nearest];
    return nearest + (right ? !(boundary > value) : !(boundary >= value));
}

/* Returns the position of a word: `words` [count] are ascending, places [count] are theirs. -1: not a
 * word. */
RF_COLUMN rf_i64 rf_column_word(rf_i64 value, const rf_i64 *words, const rf_i64 *positions, rf_i64 count) {
    rf_i64 first = 0, last = count;
    while (first < last) {
        const rf_i64 middle = first + (last - first) / 2;
        if (words[middle] < value)
            first = middle + 1;
        else
            last = middle;
    }
    return first < count && words[first] == value ? positions[first] : -1;
}

#endif
