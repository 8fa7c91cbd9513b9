/* The copying warps of ikbo_linear_fused.cu: one for each warpgroup's strips, one for weights and parents'
 * sums. */
#ifndef RECFUSE_IKBO_LINEAR_FUSED_COPY_CUH
#define RECFUSE_IKBO_LINEAR_FUSED_COPY_CUH

#include "families/ikbo_linear/ikbo_linear_fused.cuh"
#include "families/ikbo_linear/parent.cuh"

enum { SLOTS_AHEAD = 4 }; /* slots whose boxes are prefetched into L2 */

/* The columns from `x` on of `item` of a level; `any` false: no strip. */
struct boxes_t {
    const rf_fused_level *level;
    int x, item;
    bool any;
};

/* One thread copies the boxes of a strip, or only arrives if there is no strip. Meanwhile it prefetches into
 * L2 the boxes SLOTS_AHEAD slots later, of this strip or of the strip that `follows`: from L2 they arrive in
 * time. */
RF_INLINE void copy_strip(const boxes_t &strip, const boxes_t &follows, int slots, const shared_t &at,
                          ring_t &ring, int group, int rank) {
    for (int k = 0; k < slots; k++, ring.next()) {
        const rf_u32 full = at.full + ring.slot * 8;
        const int half = rank * (RF_FUSED_K / RF_RANKS), prefetched = k + SLOTS_AHEAD;
        rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
        if (!strip.any) {
            rf_barrier_arrive(full);
            continue;
        }
        const rf_u32 to = at.slots + ring.slot * SLOT_BYTES + group * X_BYTES + rank * (X_BYTES / RF_RANKS);
        rf_barrier_expect(full, X_BYTES);
        if (RF_RANKS == 1)
            rf_copy_box(to, &strip.level->x, strip.x, k * RF_FUSED_K + half, strip.item, full, RF_L2_NORMAL);
        else
            rf_copy_box_to_both(to, &strip.level->x, strip.x, k * RF_FUSED_K + half, strip.item, full,
                                RF_L2_NORMAL);
        if (prefetched < slots)
            rf_prefetch_box(&strip.level->x, strip.x, prefetched * RF_FUSED_K + half, strip.item);
        else if (follows.any)
            rf_prefetch_box(&follows.level->x, follows.x, (prefetched - slots) * RF_FUSED_K + half,
                            follows.item);
    }
}

/* Returns the boxes of a strip of a level; there is no strip from `end` on. */
RF_INLINE boxes_t boxes_of(const rf_fused_level &level, int strip, int end) {
    const int column = strip / level.count;
    return {&level, column * RF_FUSED_COLUMNS, strip - column * level.count, strip < end};
}

/* One thread copies the boxes of one warpgroup's strips. */
RF_INLINE void copy_strips(const rf_fused_args &args, const shared_t &at, int group, int rank) {
    ring_t ring = {0, 1};
    for (int l = FIRST; l < levels_of(args); l++) {
        const rf_fused_level &level = args.levels[l];
        const int2 range = range_of(at, l);
        boxes_t strip = boxes_of(level, range.x + group, range.y);
        for (int first = range.x; first < range.y; first += GROUPS) {
            const boxes_t next = boxes_of(level, first + GROUPS + group, range.y);
            if (RF_JOINED) {
                const rf_fused_level &up = args.levels[l - 1];
                const rf_i64 parent = strip.any ? (rf_i64)level.parent[strip.item] : 0;
                /* past the last user copies write zeros */
                const boxes_t user = {&up, strip.x,
                                      (rf_u64)parent < (rf_u64)up.count ? (int)parent : up.count, strip.any};
                copy_strip(strip, user, level.slots, at, ring, group, rank);
                copy_strip(user, next, up.slots, at, ring, group, rank);
            } else {
                copy_strip(strip, next, level.slots, at, ring, group, rank);
            }
            strip = next;
        }
    }
}

/* Returns strip `number` of a level, without flags. The parent of an invalid index is the bias-only item. */
RF_INLINE strip_t strip_at(const rf_fused_args &args, int l, int number, int end, bool reports) {
    const rf_fused_level &level = args.levels[l];
    strip_t s = {-1, 0, -1, 0};
    if (number >= end) return s;
    s.column = number / level.count;
    s.item = number - s.column * level.count;
    if (l == 0) {
        s.parent = level.count * args.strips + s.column;
        return s;
    }
    const rf_i64 parent = level.parent[s.item];
    const rf_i32 parents = args.levels[l - 1].count;
    const bool good = (rf_u64)parent < (rf_u64)parents;
    s.parent = (good ? (rf_i32)parent : parents) * args.strips + s.column; /* not used if levels are joined */
    if (!good && reports && s.column == 0 && args.report)
        rf_report_parent(args.errors, args.chain ? l - 1 : -1, s.item, parent, parents, level.count);
    return s;
}

/* Copies the sums of a parent for the strips of a turn. */
RF_INLINE void copy_sums(const rf_fused_level &up, const shared_t &at, int parent, int rank) {
    const rf_u8 *sums = (const rf_u8 *)sums_of(up.sums, parent, rank);
    rf_barrier_expect(at.sums_full, SUMS_BYTES);
#pragma unroll
    for (int i = 0; i < 4; i++)
        rf_copy(at.sums + i * (SUMS_BYTES / 4), sums + i * (SUMS_BYTES / 4), SUMS_BYTES / 4, at.sums_full,
                RF_L2_LAST);
}

/* Writes the descriptions of a turn's strips, held by lanes 0 ... GROUPS - 1, for the warpgroups. Lane 0
 * publishes them by its next arrival at the barrier of a slot. */
RF_INLINE void strips_write(const shared_t &at, int turn, const strip_t &strip, int lane) {
    const rf_u32 lap = turn / RF_FUSED_ENTRIES;
    if (lane == 0) rf_barrier_wait(at.strips_empty + turn % RF_FUSED_ENTRIES * 8, (lap & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const strip_t s = {
            __shfl_sync(RF_FULL_WARP, strip.item, i), __shfl_sync(RF_FULL_WARP, strip.column, i),
            __shfl_sync(RF_FULL_WARP, strip.parent, i), __shfl_sync(RF_FULL_WARP, strip.flags, i)};
        if (lane == 0) strip_write(at, turn, i, s);
    }
}

/* Copies a slot of weights, packed or in place; if two levels are joined, those of the previous level
 * follow. */
RF_INLINE void copy_rows(const rf_fused_args &args, int l, rf_u32 to, int k, int rank, rf_u32 full) {
    const rf_fused_level &level = args.levels[l];
    if (!RF_DIRECT)
        rf_copy(to, level.weight + (rf_i64)(k * RF_RANKS + rank) * WEIGHT_BYTES, WEIGHT_BYTES, full,
                RF_L2_LAST);
    else if (RF_JOINED && k >= level.slots)
        rf_copy_box(to, &args.levels[l - 1].rows, (k - level.slots) * RF_FUSED_K, rank * RF_ROWS, 0, full,
                    RF_L2_LAST);
    else
        rf_copy_box(to, &level.rows, k * RF_FUSED_K, rank * RF_ROWS, 0, full, RF_L2_LAST);
}

/* One warp copies the weights and the sums of parents, and describes the strips to the warpgroups: lane i has
 * strip i. */
RF_INLINE void copy_weights(const rf_fused_args &args, const shared_t &at, int lane, int rank) {
    ring_t ring = {0, 1};
    int held = -1, turn = 0;
    if (RF_JOINED && !RF_DIRECT) { /* the kernel starts concurrently with pack.cu */
        rf_wait_for_previous_kernel();
        rf_async_fence_global();
    }
    rf_u32 parity = 1;
    for (int l = FIRST; l < levels_of(args); l++) {
        const rf_fused_level &up = args.levels[l > 0 ? l - 1 : 0];
        const int2 range = range_of(at, l);
        bool ready = l == FIRST, begins = true; /* ready: the sums of parents are complete */
        strip_t next = strip_at(args, l, lane < GROUPS ? range.x + lane : range.y, range.y, rank == 0);
        for (int first = range.x; first < range.y; first += GROUPS, turn++) {
            const int parent = __shfl_sync(RF_FULL_WARP, next.parent, 0);
            const bool change = parent != held || begins;
            next.flags = (next.parent == parent ? HERE : 0) | (change && held >= 0 ? CHANGED : 0) |
                         (change == (parity == 0) ? PARITY : 0);
            strips_write(at, turn, next, lane);
            held = parent;
            begins = false;
            /* Early, because it waits for memory. */
            next = strip_at(args, l, lane < GROUPS ? first + GROUPS + lane : range.y, range.y, rank == 0);
            bool due = change && !RF_JOINED;
            for (int k = 0; k < slots_of(args, l); k++, ring.next()) {
                if (lane > 0) continue;
                if (due && k >= min((int)LATE, slots_of(args, l) - 1) &&
                    (ready || k == slots_of(args, l) - 1 || (k % 4 == 0 && sums_done(args, up)))) {
                    if (!ready) {
                        sums_wait(args, up);
                        rf_async_fence_global();
                        ready = true;
                    }
                    rf_barrier_wait(at.sums_empty, parity);
                    copy_sums(up, at, parent, rank);
                    due = false;
                }
                rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
                rf_barrier_expect(at.full + ring.slot * 8, WEIGHT_BYTES);
                copy_rows(args, l, at.slots + ring.slot * SLOT_BYTES + GROUPS * X_BYTES, k, rank,
                          at.full + ring.slot * 8);
            }
            if (change) parity ^= 1;
            __syncwarp();
        }
    }
}

#endif
