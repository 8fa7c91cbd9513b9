/* The work of a block of small.cu, and its copies into shared memory: the ring, strips and weights. Requires the macros
 * of small.cu. */
#ifndef RECFUSE_IKBO_SMALL_COPY_CUH
#define RECFUSE_IKBO_SMALL_COPY_CUH

#include "gpu/device/hopper.cuh"
#include "families/ikbo_linear/ikbo_linear_args.h"

enum {
    WARPGROUP = 128,
    FIRST = RF_JOINED, /* first level with tasks of its own */
    SUMS = RF_ROWS / 2, /* sums per thread */
    HALVES = RF_ROWS > 112 ? 2 : 1, /* products for RF_ROWS rows */
    HALF = RF_ROWS / HALVES,
    X_BYTES = RF_FUSED_X_BYTES,
    WEIGHT_BYTES = RF_FUSED_WEIGHT_BYTES(RF_ROWS),
    SLOT_BYTES = RF_SMALL_SLOT_BYTES(RF_ROWS, RF_GROUPS),
    STAGE_BYTES = RF_ROWS * RF_FUSED_COLUMNS * 2,
    SUMS_BYTES = RF_FUSED_SUMS_BYTES(RF_ROWS),
};

/* The work of a block: `strips` strips of a level from number `first` on. */
struct task_t {
    int level, first, strips, rank;
};

/* Addresses in shared memory. */
struct shared_t {
    rf_u32 slots, stages;
    rf_u32 full, empty; /* [RF_SLOTS] barriers each */
    task_t *task;
};

RF_INLINE shared_t shared_of(rf_u8 *memory) {
    shared_t at;
    const rf_u32 start = rf_shared(memory);
    at.slots = (start + 1023) & ~1023u; /* the swizzle depends on addresses */
    at.stages = at.slots + RF_SLOTS * SLOT_BYTES;
    at.full = at.stages + RF_GROUPS * STAGE_BYTES;
    at.empty = at.full + RF_SLOTS * 8;
    at.task = (task_t *)(memory + (at.empty + RF_SLOTS * 8 - start));
    return at;
}

RF_INLINE int claim_number(const rf_fused_args &args) {
    if (!args.tickets) return (int)blockIdx.x;
    rf_wait_for_previous_kernel();
    return (int)atomicAdd(args.levels[0].done + RF_SMALL_TICKET, 1u);
}

RF_INLINE task_t task_of(const rf_fused_args &args, int number) {
    task_t task = {FIRST, 0, 0, 0};
    for (;; task.level++) {
        const int strips = args.levels[task.level].count * args.strips,
                  tasks = (strips + RF_GROUPS - 1) / RF_GROUPS * args.ranks;
        if (number < tasks || task.level == args.n_levels - 1) {
            task.first = number / args.ranks * RF_GROUPS;
            task.rank = number % args.ranks;
            task.strips = min((int)RF_GROUPS, strips - task.first);
            return task;
        }
        number -= tasks;
    }
}

/* A position in the ring. */
struct ring_t {
    int slot;
    rf_u32 parity;
    RF_INLINE void next() {
        if (++slot == RF_SLOTS) slot = 0, parity ^= 1;
    }
    RF_INLINE int before() const { return slot > 0 ? slot - 1 : RF_SLOTS - 1; }
};

/* One thread copies the boxes of a level's `item`, columns from `x` on. */
RF_INLINE void copy_boxes(const rf_fused_level &level, const shared_t &at, ring_t &ring, int x, int item,
                          int group) {
    for (int k = 0; k < level.slots; k++, ring.next()) {
        const rf_u32 full = at.full + ring.slot * 8;
        rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
        rf_barrier_expect(full, X_BYTES);
        rf_copy_box(at.slots + ring.slot * SLOT_BYTES + WEIGHT_BYTES + group * X_BYTES, &level.x, x,
                    k * RF_FUSED_K, item, full, RF_L2_NORMAL);
    }
}

/* One thread copies a strip. */
RF_INLINE void copy_strip(const rf_fused_args &args, const shared_t &at, int l, int strip, int group) {
    const rf_fused_level &level = args.levels[l];
    const int column = strip / level.count, item = strip - column * level.count;
    ring_t ring = {0, 1};
    const rf_i64 parent = RF_JOINED ? (rf_i64)level.parent[item] : 0; /* in flight meanwhile */
    copy_boxes(level, at, ring, column * RF_FUSED_COLUMNS, item, group);
    if (RF_JOINED) { /* past the last user copies write zeros */
        const rf_fused_level &up = args.levels[l - 1];
        const int user = (rf_u64)parent < (rf_u64)up.count ? (int)parent : up.count;
        copy_boxes(up, at, ring, column * RF_FUSED_COLUMNS, user, group);
    }
}

/* One thread copies a level's weights, packed or in place. */
RF_INLINE void copy_rows(const rf_fused_level &level, const shared_t &at, ring_t &ring, int ranks, int rank) {
    for (int k = 0; k < level.slots; k++, ring.next()) {
        const rf_u32 full = at.full + ring.slot * 8, to = at.slots + ring.slot * SLOT_BYTES;
        rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
        rf_barrier_expect(full, WEIGHT_BYTES);
        if (RF_DIRECT)
            rf_copy_box(to, &level.rows, k * RF_FUSED_K, rank * RF_ROWS, 0, full, RF_L2_LAST);
        else
            rf_copy(to, level.weight + (rf_i64)(k * ranks + rank) * WEIGHT_BYTES, WEIGHT_BYTES, full,
                    RF_L2_LAST);
    }
}

RF_INLINE void copy_weights(const rf_fused_args &args, const shared_t &at, int l, int rank) {
    ring_t ring = {0, 1};
    if (!RF_DIRECT) {
        rf_wait_for_previous_kernel();
        rf_async_fence_global();
    }
    copy_rows(args.levels[l], at, ring, args.ranks, rank);
    if (RF_JOINED) copy_rows(args.levels[l - 1], at, ring, args.ranks, rank);
}

#endif
