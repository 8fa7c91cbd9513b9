/* Shared by the warps of ikbo_linear_fused.cu: shared memory, the ring, the strips of a turn and of a
 * cluster. */
#ifndef RECFUSE_IKBO_LINEAR_FUSED_CUH
#define RECFUSE_IKBO_LINEAR_FUSED_CUH

#include "gpu/device/hopper.cuh"
#include "families/ikbo_linear/ikbo_linear_args.h"

#ifndef RF_JOINED
#define RF_JOINED 0
#endif
#ifndef RF_DIRECT
#define RF_DIRECT 0
#endif

enum {
    GROUPS = RF_FUSED_GROUPS,
    WARPGROUP = 128,
    HALF = RF_ROWS / 2, /* rows of one product */
    PARTS = RF_ROWS / RF_FUSED_PART,
    PART_SUMS = RF_FUSED_PART / 2,
    SUMS = RF_ROWS / 2, /* sums per thread */
    /* Slot of a turn from which on the sums of its parent are copied: those of the previous turn have been
     * read by then. */
    LATE = 8,
    X_BYTES = RF_FUSED_X_BYTES,
    WEIGHT_BYTES = RF_FUSED_WEIGHT_BYTES(RF_ROWS),
    SLOT_BYTES = RF_FUSED_SLOT_BYTES(RF_ROWS),
    SUMS_BYTES = RF_FUSED_SUMS_BYTES(RF_ROWS),
    STAGE_BYTES = RF_FUSED_STAGE_BYTES,
    FIRST = RF_JOINED, /* first level with strips of its own */
};
static_assert(RF_JOINED || !RF_DIRECT, "weights of joined levels alone are read as they lie");
static_assert(RF_ROWS % RF_FUSED_PART == 0 && RF_ROWS >= 64 && RF_ROWS <= RF_FUSED_MOST_ROWS, "registers");

/* Flags of a strip in a turn, for its warpgroup: HERE: its parent's sums are in shared memory; CHANGED: they
 * differ from those of the previous turn; PARITY: of its barrier. */
enum { HERE = 1, CHANGED = 2, PARITY = 4 };
struct strip_t {
    rf_i32 item, column; /* item -1: no strip */
    rf_i32 parent; /* number of the sums: (item of the previous level) * strips + column */
    rf_i32 flags;
};

/* Addresses in shared memory. */
struct shared_t {
    rf_u32 slots, sums, stages;
    rf_u32 full, empty; /* [RF_SLOTS] barriers each */
    rf_u32 sums_full, sums_empty; /* barriers */
    rf_u32 strips_empty; /* [RF_FUSED_ENTRIES] barriers */
    rf_u32 strips; /* strip_t [RF_FUSED_ENTRIES, GROUPS] */
    rf_u32 ranges; /* [RF_FUSED_MOST_LEVELS, 2] */
};

RF_INLINE shared_t shared_of(const void *memory) {
    shared_t at;
    at.slots = (rf_shared(memory) + 1023) & ~1023u; /* the swizzle depends on addresses */
    at.sums = at.slots + RF_SLOTS * SLOT_BYTES;
    at.stages = at.sums + (RF_JOINED ? 0 : SUMS_BYTES);
    at.strips = at.stages + GROUPS * RF_FUSED_STAGES * STAGE_BYTES;
    at.ranges = at.strips + RF_FUSED_ENTRIES * GROUPS * (rf_u32)sizeof(strip_t);
    at.full = at.ranges + RF_FUSED_MOST_LEVELS * 8;
    at.empty = at.full + RF_SLOTS * 8;
    at.sums_full = at.empty + RF_SLOTS * 8;
    at.sums_empty = at.sums_full + 8;
    at.strips_empty = at.sums_empty + 8;
    return at;
}

RF_INLINE strip_t strip_read(const shared_t &at, int turn, int group) {
    strip_t s;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(s.item), "=r"(s.column), "=r"(s.parent), "=r"(s.flags)
                 : "r"(at.strips + (turn % RF_FUSED_ENTRIES * GROUPS + group) * (rf_u32)sizeof(strip_t))
                 : "memory");
    return s;
}
RF_INLINE void strip_write(const shared_t &at, int turn, int group, const strip_t &s) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(
                     at.strips + (turn % RF_FUSED_ENTRIES * GROUPS + group) * (rf_u32)sizeof(strip_t)),
                 "r"(s.item), "r"(s.column), "r"(s.parent), "r"(s.flags)
                 : "memory");
}
RF_INLINE void range_write(const shared_t &at, int level, int from, int to) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at.ranges + level * 8), "r"(from), "r"(to)
                 : "memory");
}
/* Returns the strips [x, y) of a level for this cluster. */
RF_INLINE int2 range_of(const shared_t &at, int level) {
    int2 range;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(range.x), "=r"(range.y)
                 : "r"(at.ranges + level * 8)
                 : "memory");
    return range;
}

/* A position in the ring. */
struct ring_t {
    int slot;
    rf_u32 parity;
    RF_INLINE void next() {
        if (++slot == RF_SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
    RF_INLINE int before() const { return slot > 0 ? slot - 1 : RF_SLOTS - 1; }
};

/* Joined levels are always two. */
RF_INLINE int levels_of(const rf_fused_args &args) { return RF_JOINED ? 2 : args.n_levels; }

/* Cuts the strips of every level into a range per cluster. Ranges of the last level compensate for the
 * imbalance of the others, unless a cluster already has more than its share. If candidates are so few that
 * clusters without a user handle them in one turn, these get all of them, and wait for the users' sums while
 * the others compute them. */
RF_INLINE void cut(const rf_fused_args &args, const shared_t &at, int cluster, int clusters) {
    const int last = levels_of(args) - 1;
    rf_i64 total_cost = 0, most_cost = 0, before = 0, after = 0;
    for (int l = FIRST; l <= last; l++) {
        const rf_i64 n = (rf_i64)args.levels[l].count * args.strips, cost = args.levels[l].cost;
        const rf_i64 from = n * cluster / clusters, to = n * (cluster + 1) / clusters;
        total_cost += n * cost;
        if (l == last) break;
        most_cost += (n + clusters - 1) / clusters * cost;
        before += from * cost;
        after += to * cost;
        range_write(at, l, (int)from, (int)to);
    }
    const rf_i64 n = (rf_i64)args.levels[last].count * args.strips, cost = args.levels[last].cost;
    rf_i64 from = n * cluster / clusters, to = n * (cluster + 1) / clusters;
    const rf_i64 users = (rf_i64)args.levels[0].count * args.strips, idle = clusters - users;
    if (!RF_JOINED && last == 1 && idle >= users && n <= GROUPS * idle) {
        const rf_i64 idle_number =
            cluster - users * cluster / clusters; /* number among the clusters without a user */
        from = n * idle_number / idle;
        to = after > before ? from : n * (idle_number + 1) / idle;
    } else if (most_cost <= total_cost / clusters) {
        from = (total_cost * cluster / clusters - before + cost / 2) / cost;
        to = (total_cost * (cluster + 1) / clusters - after + cost / 2) / cost;
    }
    if (cluster == clusters - 1) to = n;
    range_write(at, last, (int)min(from, n), (int)min(to, n));
}

/* Returns the slots of k of a strip of a level. */
RF_INLINE int slots_of(const rf_fused_args &args, int level) {
    return args.levels[level].slots + (RF_JOINED ? args.levels[level - 1].slots : 0);
}

/* Waits until the sums of all items of a level are complete. */
RF_INLINE void sums_wait(const rf_fused_args &args, const rf_fused_level &level) {
    rf_count_wait(level.done, (rf_u32)level.count * args.strips * RF_RANKS);
}

/* Returns true if they are complete. */
RF_INLINE bool sums_done(const rf_fused_args &args, const rf_fused_level &level) {
    return rf_count(level.done) >= (rf_u32)level.count * args.strips * RF_RANKS;
}

/* Returns the address of a strip's sums of a level for block `rank`; number: item * strips + column. */
RF_INLINE float *sums_of(float *sums, rf_i64 number, int rank) {
    return sums + (number * RF_RANKS + rank) * (SUMS_BYTES / (rf_i64)sizeof *sums);
}

RF_INLINE int turns_of(int2 range) { return (range.y - range.x + GROUPS - 1) / GROUPS; }

#endif
