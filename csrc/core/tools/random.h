/* Random numbers that are the same on every platform.
 *
 * SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): a counter
 * that is stepped by a constant and mixed. A stream is a 64-bit state, and hashing a seed with a purpose and
 * a number gives any number of independent streams. All draws use only integers, + - * /, sqrt, floor and
 * ldexp, which IEEE 754 and C make exact; libm's exp and log differ between systems and are not used. Compile
 * without contraction of a * b + c (ISO mode, -std=c11, does).
 */
#ifndef RECFUSE_RANDOM_H
#define RECFUSE_RANDOM_H

#include "recfuse.h"

typedef struct rf__random {
    uint64_t state;
} rf__random;

/* The purpose of a stream: the streams of a seed must differ. */
typedef enum rf__random_purpose {
    RF__FOR_LENGTHS,
    RF__FOR_WEIGHTS,
    RF__FOR_INDICES,
    RF__FOR_SIZES,
    RF__FOR_TIMES,
    RF__FOR_PERMUTATION,
    RF__FOR_UNIFORM
} rf__random_purpose;

static inline uint64_t rf__random_mix(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

/* The stream of a seed for one purpose and number. */
static inline rf__random rf__random_stream(uint64_t seed, rf__random_purpose purpose, uint64_t number) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    uint64_t key = rf__random_mix(seed + golden);
    key = rf__random_mix(key + ((uint64_t)purpose + 1) * golden);
    return (rf__random){rf__random_mix(key + (number + 1) * golden)};
}

/* 64 uniform bits. */
static inline uint64_t rf__random_next(rf__random *random) {
    random->state += 0x9e3779b97f4a7c15u;
    return rf__random_mix(random->state);
}

/* Uniform in [0, 1), a multiple of 2^-53. */
static inline double rf__random_uniform(rf__random *random) {
    return (double)(rf__random_next(random) >> 11) * 0x1p-53;
}

/* Uniform in [0, bound), 0 < bound < 2^32: the upper 32 bits scaled (uneven by at most bound / 2^32). */
static inline int64_t rf__random_below(rf__random *random, int64_t bound) {
    return (int64_t)(((rf__random_next(random) >> 32) * (uint64_t)bound) >> 32);
}

/* Normal with mean 0 and deviation 1 (Marsaglia's polar method). */
double rf__random_normal(rf__random *random);

/* Fills order [count] with a random permutation of 0 ... count - 1, count < 2^32. */
void rf__random_permutation(rf__random *random, int64_t *order, int64_t count);

/* exp and log by +, -, *, / only, within 2 ulp; value > 0 for the logarithm. exp returns 0 below -700 and its
 * value at 700 above that. */
double rf__exp(double value);
double rf__log(double value);

/* A table to draw from `count` weights in constant time (Walker's alias method, in Vose's order). */
typedef struct rf__alias {
    int64_t count;
    uint32_t *threshold; /* [count]: a slot's own item is drawn when 32 random bits are below this */
    uint32_t *alternative; /* [count]: the alternative item */
} rf__alias;

/* Builds the table of weights [count], each >= 0 and finite, their sum > 0; 0 < count < 2^32. `alias` is
 * zeros before the first call; free it with rf__alias_free. RF_ERR_MEMORY. */
rf_status rf__alias_build(rf__alias *alias, const double *weights, int64_t count);
void rf__alias_free(rf__alias *alias);

static inline uint32_t rf__alias_draw(const rf__alias *alias, rf__random *random) {
    const uint64_t bits = rf__random_next(random);
    const uint32_t slot = (uint32_t)(((bits >> 32) * (uint64_t)alias->count) >> 32);
    return (uint32_t)bits < alias->threshold[slot] ? slot : alias->alternative[slot];
}

#endif
