/* Moves the prefetch cursor of a thread on, lookup by lookup or by several. Included by pool_kernels.h and
 * pool.c. */
#ifndef RECFUSE_CPU_LOOK_AHEAD_H
#define RECFUSE_CPU_LOOK_AHEAD_H

#include "families/fused_embedding_bag/cpu/pool.h"

#define RF__INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define RF__UNROLL _Pragma("unroll")
#define RF__UNROLL_4 _Pragma("unroll 4")
#else
#define RF__UNROLL _Pragma("GCC unroll 8")
#define RF__UNROLL_4 _Pragma("GCC unroll 4")
#endif

/* The prefetch cursor, in registers while bags are pooled. Off: the columns of a row after its first
 * chunk. */
typedef struct rf__look {
    const char *weight;
    int64_t pitch, row_bytes, lines, position, end;
    rf__ahead *ahead; /* NULL: off */
} rf__look;

static RF__INLINE rf__look rf__look_open(rf__ahead *ahead) {
    if (ahead == NULL) return (rf__look){0};
    return (rf__look){ahead->weight, ahead->pitch, ahead->row_bytes, ahead->lines, ahead->position,
                      ahead->end,    ahead};
}

static RF__INLINE void rf__look_close(const rf__look *look, rf__ahead *ahead) {
    if (ahead != NULL) ahead->position = look->position;
}

/* Prefetches the next row. `lines` is a constant if no loop is needed. */
static RF__INLINE void rf__look_ahead(rf__look *look, const void *indices, const rf_int_type index_type,
                                      const int lines) {
    if (__builtin_expect(look->position < look->end, 1)) {
        int64_t row = rf__load_int(indices, index_type, look->position++);
        const char *at = (const char *)((uintptr_t)look->weight + (uintptr_t)row * (uintptr_t)look->pitch);
        if (__builtin_expect(look->lines == lines, 1)) {
            RF__UNROLL
            for (int line = 0; line < lines; line++) rf__ask_for_line((uintptr_t)at + 64 * (uintptr_t)line);
        } else {
            rf__ask_for(at, look->row_bytes);
        }
    } else if (look->ahead != NULL) {
        rf__ahead *ahead = look->ahead;
        ahead->position = look->position;
        *look = rf__ahead_next(ahead) ? rf__look_open(ahead)
                                      : (rf__look){.position = look->position, .end = look->end};
    }
}

enum {
    LOOKED_TOGETHER = 16
}; /* lookups; with more, a core has no slots for their misses and drops prefetches */

/* Moves the cursor by `lookups` and prefetches their rows: for kernels whose loop over rows has no registers left
 * for the cursor. `ahead` may be NULL: off. `lines` as above. */
static RF__INLINE void rf__look_on(rf__ahead *ahead, const void *indices, const rf_int_type index_type,
                                   int64_t lookups, const int lines) {
    if (ahead == NULL) return;
    const int64_t first = ahead->position, end = first + lookups;
    if (__builtin_expect(end > ahead->end, 0)) {
        rf__look_far(ahead, lookups);
        return;
    }
    ahead->position = end;
    const uintptr_t weight = (uintptr_t)ahead->weight, pitch = (uintptr_t)ahead->pitch;
    if (__builtin_expect(!ahead->swept && ahead->lines == lines, 1)) {
        RF__UNROLL_4
        for (int64_t i = first; i < end; i++) {
            const uintptr_t at = weight + (uintptr_t)rf__load_int(indices, index_type, i) * pitch;
            RF__UNROLL
            for (int line = 0; line < lines; line++) rf__ask_for_line(at + 64 * (uintptr_t)line);
        }
    } else if (!ahead->swept) {
        const uintptr_t bytes = (uintptr_t)ahead->row_bytes;
        for (int64_t i = first; i < end;
             i++) { /* as many prefetches for each row: branches that are foreseen */
            const uintptr_t at = weight + (uintptr_t)rf__load_int(indices, index_type, i) * pitch;
            for (uintptr_t byte = 0; byte < bytes; byte += 64) rf__ask_for_line(at + byte);
            rf__ask_for_line(at + bytes - 1);
        }
    }
    if (ahead->parameters != NULL) {
        const uintptr_t parameters = (uintptr_t)ahead->parameters;
        const uintptr_t parameters_pitch = (uintptr_t)ahead->parameters_pitch;
        for (int64_t i = first; i < end; i++)
            rf__ask_for_line(parameters + (uintptr_t)rf__load_int(indices, index_type, i) * parameters_pitch);
    }
}

/* Prefetches the next lines of the next span. `ahead` may be NULL. */
static RF__INLINE void rf__sweep_on(rf__ahead *ahead) {
    for (int one = 0; ahead != NULL && one < 2; one++) {
        rf__sweep *sweep = &ahead->sweeps[one];
        const int64_t lines = sweep->lines < sweep->rate ? sweep->lines : sweep->rate;
        for (int64_t i = 0; i < lines; i++) rf__ask_for_line(sweep->at + 64 * (uintptr_t)i);
        sweep->at += 64 * (uintptr_t)lines;
        sweep->lines -= lines;
    }
}

#endif
