/* See lookups.h. */
#include "tools/lookups.h"

#include <stddef.h>
#include <string.h>

enum { LOG_SLOTS = 11, SLOTS = 1 << LOG_SLOTS, SAMPLE = SLOTS / 4 };
static const double MOST_REPEATED = 0.3;

static inline int64_t load(const void *array, rf_int_type type, int64_t at) {
    return type == RF_INT64 ? ((const int64_t *)array)[at] : ((const int32_t *)array)[at];
}

/* Without a branch or a comparison a number: either difference is negative where an index is outside. */
static bool indices_good(const rf__lookups *lookups) {
    const int64_t last = lookups->rows - 1;
    int64_t signs = 0;
    if (lookups->type == RF_INT64) {
        const int64_t *indices = lookups->indices;
        /* An index may be any number: where the difference wraps, the index is negative. */
        for (int64_t i = 0; i < lookups->count; i++)
            signs |= indices[i] | (int64_t)((uint64_t)last - (uint64_t)indices[i]);
    } else {
        const int32_t *indices = lookups->indices;
        for (int64_t i = 0; i < lookups->count; i++) signs |= indices[i] | (last - indices[i]);
    }
    return signs >= 0;
}

static bool offsets_good(const rf__lookups *lookups) {
    int64_t before = 0;
    for (int64_t bag = 0; bag < lookups->bags; bag++) {
        const int64_t begin = load(lookups->offsets, lookups->type, bag);
        if (begin < before || (bag == 0 && begin != 0)) return false;
        before = begin;
    }
    if (lookups->has_end) return load(lookups->offsets, lookups->type, lookups->bags) == lookups->count;
    return before <= lookups->count;
}

bool rf__lookups_good(const rf__lookups *lookups) { return indices_good(lookups) && offsets_good(lookups); }

bool rf__lookups_distinct(const rf__lookups *lookups) {
    int64_t rows[SLOTS], repeats = 0;
    const int64_t sample = lookups->count < SAMPLE ? lookups->count : SAMPLE;
    memset(rows, -1, sizeof rows); /* no row: none is negative */
    for (int64_t i = 0; i < sample; i++) {
        const int64_t row = load(lookups->indices, lookups->type, i);
        /* Multiplicative hashing (Knuth, TAOCP volume 3, section 6.4). */
        uint64_t slot = (uint64_t)row * UINT64_C(0x9e3779b97f4a7c15) >> (64 - LOG_SLOTS);
        while (rows[slot] >= 0 && rows[slot] != row) slot = (slot + 1) % SLOTS;
        repeats += rows[slot] == row;
        rows[slot] = row;
    }
    /* Of n lookups of one distribution the share of repeats grows with n, as long as it is small. */
    return (double)repeats * (double)lookups->count <= MOST_REPEATED * (double)sample * (double)sample;
}
