/* A linear layer over users and their candidates in one launch.
 *
 *     sums of an item = W_level . x[item] + sums of its parent;   out[candidate] = activation(its sums)
 *
 * A level after the other, users first. A warpgroup multiplies a strip: 64 columns of an item's [k, n], transposed, so that
 * columns are the rows of the tensor cores' A, which ldmatrix takes from shared memory to registers, and RF_ROWS rows of the
 * weight are B, read from shared memory as pack.cu has laid them. Three warpgroups take three strips through the same
 * weights; the two blocks of a cluster take two halves of the rows through the same strips (RF_RANKS 2), each copying half of
 * each strip's box to both. A warp for each strip and one for weights fill a ring of RF_SLOTS slots of 32 of k.
 *
 * Strips are in the order [column, item], and a cluster has a range of them, so that items of one user and column follow
 * each other: their parent's sums, 57 KB, stay in shared memory until another one's are needed, and are added on the way
 * out. A strip whose parent is not that of its turn's first strip starts from its parent's sums in global memory instead.
 * Sums of all levels but the last go to global memory; `done` counts them, and whoever reads them waits for all of their
 * level: so all blocks must run at once (a cooperative launch).
 *
 * A block: RF_FUSED_GROUPS warpgroups that multiply (160 registers a thread), one that copies (32).
 * A thread: of RF_ROWS / 2 sums, number 4 i + e belongs to row 8 i + 2 (lane % 4) + e % 2, column 16 warp + lane / 4 + e / 2 * 8.
 * Shared memory: RF_FUSED_SHARED_BYTES. Launch: grid [clusters * RF_RANKS], block [RF_FUSED_THREADS], cooperative.
 * Source: IKBO (in-kernel broadcast optimization), section 2: decomposition, broadcast fusion, multi-stage fusion.
 */

#ifndef RF_DTYPE
#define RF_DTYPE 1
#endif
#ifndef RF_ACTIVATION
#define RF_ACTIVATION 0
#endif
#ifndef RF_ROWS
#define RF_ROWS 224
#define RF_RANKS 2
#define RF_SLOTS 5
#endif

#include "device/hopper.cuh"
#include "device/wgmma.cuh"
#include "ikbo_linear/activation.cuh"
#include "ikbo_linear/args.h"

enum {
    GROUPS = RF_FUSED_GROUPS,
    WARPGROUP = 128,
    HALF = RF_ROWS / 2,  /* rows of one product */
    SUMS = RF_ROWS / 2,  /* of a thread */
    LATE =
        8, /* slot of a turn in which its parent's sums are fetched: those of the turn before are read by then */
    X_BYTES = RF_FUSED_X_BYTES,
    WEIGHT_BYTES = RF_FUSED_WEIGHT_BYTES(RF_ROWS),
    SLOT_BYTES = RF_FUSED_SLOT_BYTES(RF_ROWS),
    SUMS_BYTES = RF_FUSED_SUMS_BYTES(RF_ROWS),
    STAGE_BYTES = RF_FUSED_STAGE_BYTES,
};
static_assert(RF_ROWS % RF_FUSED_PART == 0 && RF_ROWS >= 64 && RF_ROWS <= RF_FUSED_MOST_ROWS, "registers");

/* Of a strip in a turn, for the warpgroup that has it: where its parent's sums are. */
enum {
    HERE = 1,
    CHANGED = 2,
    PARITY = 4
}; /* in shared memory; others than in the turn before; of their barrier */
struct strip_t {
    rf_i32 item, column; /* item -1: there is none */
    rf_i32 parent; /* number of the sums: (item of the level before) * strips + column */
    rf_i32 flags;
};

/* Addresses in shared memory. */
struct shared_t {
    rf_u32 slots, sums, stages;
    rf_u32 full, empty; /* [RF_SLOTS] barriers each */
    rf_u32 sums_full, sums_empty; /* barriers */
    rf_u32 strips; /* strip_t [RF_FUSED_ENTRIES, GROUPS] */
    rf_u32 ranges; /* [RF_FUSED_MOST_LEVELS, 2] */
};

RF_INLINE shared_t shared_of(const void *memory) {
    shared_t at;
    at.slots = (rf_shared(memory) + 1023) & ~1023u; /* the swizzle goes by addresses */
    at.sums = at.slots + RF_SLOTS * SLOT_BYTES;
    at.stages = at.sums + SUMS_BYTES;
    at.strips = at.stages + GROUPS * RF_FUSED_STAGES * STAGE_BYTES;
    at.ranges = at.strips + RF_FUSED_ENTRIES * GROUPS * (rf_u32)sizeof(strip_t);
    at.full = at.ranges + RF_FUSED_MOST_LEVELS * 8;
    at.empty = at.full + RF_SLOTS * 8;
    at.sums_full = at.empty + RF_SLOTS * 8;
    at.sums_empty = at.sums_full + 8;
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
/* The strips of a level that this cluster has, [x, y). */
RF_INLINE int2 range_of(const shared_t &at, int level) {
    int2 range;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(range.x), "=r"(range.y)
                 : "r"(at.ranges + level * 8)
                 : "memory");
    return range;
}

/* A place in the ring. */
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

/* Cuts the work of every level into ranges of equal cost: the last level's make up for what the others leave uneven. */
RF_INLINE void cut(const rf_fused_args &args, const shared_t &at, int cluster, int clusters) {
    rf_i64 all = 0, before = 0, after = 0;
    for (int l = 0; l < args.n_levels; l++)
        all += (rf_i64)args.levels[l].count * args.strips * args.levels[l].cost;
    for (int l = 0; l < args.n_levels; l++) {
        const rf_i64 n = (rf_i64)args.levels[l].count * args.strips, cost = args.levels[l].cost;
        rf_i64 from = n * cluster / clusters, to = n * (cluster + 1) / clusters;
        if (l == args.n_levels - 1) {
            from = min(max((all * cluster / clusters - before + cost / 2) / cost, 0ll), n);
            to = min(max((all * (cluster + 1) / clusters - after + cost / 2) / cost, from), n);
            if (cluster == clusters - 1) to = n;
        }
        before += from * cost;
        after += to * cost;
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at.ranges + l * 8), "r"((int)from), "r"((int)to)
                     : "memory");
    }
}

RF_INLINE int turns_of(int2 range) { return (range.y - range.x + GROUPS - 1) / GROUPS; }

/* One thread: the boxes of one warpgroup's strips. */
RF_INLINE void copy_strips(const rf_fused_args &args, const shared_t &at, int group, int rank) {
    ring_t ring = {0, 1};
    for (int l = 0; l < args.n_levels; l++) {
        const rf_fused_level &level = args.levels[l];
        const int2 range = range_of(at, l);
        for (int first = range.x; first < range.y; first += GROUPS) {
            const int strip = first + group, column = strip / level.count,
                      item = strip - column * level.count;
            const bool any = strip < range.y;
            for (int k = 0; k < level.slots; k++, ring.next()) {
                const rf_u32 full = at.full + ring.slot * 8;
                rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
                if (!any) {
                    rf_barrier_arrive(full);
                    continue;
                }
                const rf_u32 to =
                    at.slots + ring.slot * SLOT_BYTES + group * X_BYTES + rank * (X_BYTES / RF_RANKS);
                const int x = column * RF_FUSED_COLUMNS, y = k * RF_FUSED_K + rank * (RF_FUSED_K / RF_RANKS);
                rf_barrier_expect(full, X_BYTES);
                if (RF_RANKS == 1)
                    rf_copy_box(to, &level.x, x, y, item, full, RF_L2_NORMAL);
                else
                    rf_copy_box_to_both(to, &level.x, x, y, item, full, RF_L2_NORMAL);
            }
        }
    }
}

/* The strip at `number` of a level, without flags; a bad parent is that item of nobody's. */
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
    s.parent = (good ? (rf_i32)parent : parents) * args.strips + s.column;
    if (!good && reports && s.column == 0 && args.report) {
        if (args.chain) {
            rf_report<RF_OPERATOR_ikbo_linear_chain>(
                args.errors, {RF_ARGUMENT_maps, s.item, -1, parent, parents, level.count}, l - 1);
        } else {
            rf_report<RF_OPERATOR_ikbo_linear>(
                args.errors, {RF_ARGUMENT_cand_to_user, s.item, -1, parent, parents, level.count});
        }
    }
    return s;
}

/* The sums of a parent, for a turn's strips. */
RF_INLINE void copy_sums(const rf_fused_level &up, const shared_t &at, int parent, int rank) {
    const rf_u8 *sums = (const rf_u8 *)up.sums + ((rf_i64)parent * RF_RANKS + rank) * SUMS_BYTES;
    rf_barrier_expect(at.sums_full, SUMS_BYTES);
#pragma unroll
    for (int i = 0; i < 4; i++)
        rf_copy(at.sums + i * (SUMS_BYTES / 4), sums + i * (SUMS_BYTES / 4), SUMS_BYTES / 4, at.sums_full,
                RF_L2_LAST);
}

/* One warp: the weights, the sums of parents, and what the warpgroups need to know of their strips: lane i of strip i. */
RF_INLINE void copy_weights(const rf_fused_args &args, const shared_t &at, int lane, int rank) {
    ring_t ring = {0, 1};
    int held = -1, turn = 0;
    rf_u32 parity = 1;
    for (int l = 0; l < args.n_levels; l++) {
        const rf_fused_level &level = args.levels[l], &up = args.levels[l > 0 ? l - 1 : 0];
        const int2 range = range_of(at, l);
        bool ready = l == 0, begins = true; /* ready: the sums of parents can be read */
        strip_t next = strip_at(args, l, lane < GROUPS ? range.x + lane : range.y, range.y, rank == 0);
        for (int first = range.x; first < range.y; first += GROUPS, turn++) {
            const int parent = __shfl_sync(RF_FULL_WARP, next.parent, 0);
            const bool change = parent != held || begins;
            next.flags = (next.parent == parent ? HERE : 0) | (change && held >= 0 ? CHANGED : 0) |
                         (change == (parity == 0) ? PARITY : 0);
            if (lane < GROUPS) strip_write(at, turn, lane, next);
            __syncwarp();
            held = parent;
            begins = false;
            /* Ahead, since it waits for memory. */
            next = strip_at(args, l, lane < GROUPS ? first + GROUPS + lane : range.y, range.y, rank == 0);
            for (int k = 0; k < level.slots; k++, ring.next()) {
                if (lane > 0) continue;
                if (change && k == min((int)LATE, level.slots - 1)) {
                    if (!ready) {
                        rf_count_wait(up.done, (rf_u32)up.count * args.strips * RF_RANKS);
                        rf_async_fence_global();
                    }
                    rf_barrier_wait(at.sums_empty, parity);
                    copy_sums(up, at, parent, rank);
                }
                rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
                rf_barrier_expect(at.full + ring.slot * 8, WEIGHT_BYTES);
                rf_copy(at.slots + ring.slot * SLOT_BYTES + GROUPS * X_BYTES,
                        level.weight + (rf_i64)(k * RF_RANKS + rank) * WEIGHT_BYTES, WEIGHT_BYTES,
                        at.full + ring.slot * 8, RF_L2_LAST);
            }
            if (change) {
                parity ^= 1;
                ready = true;
            }
            __syncwarp();
        }
    }
}

/* A warpgroup has read a slot: by warp 0, whose lane `rank` tells block `rank`. */
RF_INLINE void slot_free(const shared_t &at, int slot, int thread) {
    if (RF_RANKS == 1 && thread == 0) rf_barrier_arrive(at.empty + slot * 8);
    if (RF_RANKS == 2 && thread < 2) rf_barrier_arrive_at(at.empty + slot * 8, thread);
}

/* Sum number i of both halves. */
#define SUM(i) sums[(i) / (SUMS / 2)][(i) % (SUMS / 2)]

/* sums += strip . weights over the slots of k. */
RF_INLINE void multiply(float (&sums)[2][SUMS / 2], const shared_t &at, ring_t &ring, int slots, rf_u32 from,
                        int thread) {
    rf_u32 a[2][2][4]; /* of two slots in turns: a product may still read what one load ago came */
    int last = -1;
    for (int k = 0; k < slots; k += 2) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
            const rf_u32 slot = at.slots + ring.slot * SLOT_BYTES;
            const rf_u64 b = rf_wgmma_rows_of_64_bytes(slot + GROUPS * X_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[q][i][0]), "=r"(a[q][i][1]), "=r"(a[q][i][2]), "=r"(a[q][i][3])
                             : "r"(slot + from + i * (X_BYTES / 2))
                             : "memory");
            rf_wgmma_begin();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                rf_wgmma<RF_DTYPE>(sums[0], a[q][i], b + i * 2);
                rf_wgmma<RF_DTYPE>(sums[1], a[q][i], b + i * 2 + (HALF * RF_FUSED_K * 2 >> 4));
            }
            rf_wgmma_commit();
            rf_wgmma_wait<1>();
            if (last >= 0) slot_free(at, last, thread);
            last = ring.slot;
            ring.next();
        }
    }
    rf_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(SUM(i))::"memory"); /* not read before */
    slot_free(at, last, thread);
}

RF_INLINE rf_u32 pack_two(float low, float high) {
    rf_bytes<4> two;
    rf_element<RF_DTYPE>::set(two, 0, rf_activate<RF_ACTIVATION>(low));
    rf_element<RF_DTYPE>::set(two, 1, rf_activate<RF_ACTIVATION>(high));
    return two.word[0];
}

/* The sums leave for `out`, 32 rows at a time, by way of the stages. */
RF_INLINE void store(float (&sums)[2][SUMS / 2], const rf_fused_args &args, const shared_t &at,
                     const strip_t &s, int &stage, rf_u32 offset, int group, int rank, int thread) {
#pragma unroll
    for (int part = 0; part < RF_ROWS / RF_FUSED_PART; part++) {
        const rf_u32 to = at.stages + (group * RF_FUSED_STAGES + stage) * STAGE_BYTES;
        if (++stage == RF_FUSED_STAGES) stage = 0;
        if (thread == 0) rf_stores_wait<RF_FUSED_STAGES - 1>();
        rf_group_sync(group + 1, WARPGROUP);
#pragma unroll
        for (int i = part * 16; i < part * 16 + 16; i += 8)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + offset + (i - part * 16) * 256),
                         "r"(pack_two(SUM(i), SUM(i + 1))), "r"(pack_two(SUM(i + 2), SUM(i + 3))),
                         "r"(pack_two(SUM(i + 4), SUM(i + 5))), "r"(pack_two(SUM(i + 6), SUM(i + 7)))
                         : "memory");
        rf_async_fence();
        rf_group_sync(group + 1, WARPGROUP);
        if (thread == 0)
            rf_store_box(&args.out, s.column * RF_FUSED_COLUMNS, rank * RF_ROWS + part * RF_FUSED_PART,
                         s.item, to);
    }
}

/* One warpgroup: its strip of every turn. */
RF_INLINE void multiply_strips(const rf_fused_args &args, const shared_t &at, int group, int rank) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    /* Where ldmatrix and stmatrix have this thread's row of 16 bytes in a box [rows][64 columns] with a swizzle of 128. */
    const rf_u32 offset =
        lane % 8 * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16 + lane / 16 * 1024;
    float sums[2][SUMS / 2];
    ring_t ring = {0, 0};
    int turn = 0, stage = 0;
    for (int l = 0; l < args.n_levels; l++) {
        const rf_fused_level &level = args.levels[l], &up = args.levels[l > 0 ? l - 1 : 0];
        bool ready = l == 0;
        for (int turns = turns_of(range_of(at, l)); turns > 0; turns--, turn++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
            const strip_t s = strip_read(at, turn, group);
            if (s.flags & CHANGED && thread == 0) rf_barrier_arrive(at.sums_empty);
            if (s.item < 0) { /* one warp passes slots on: the others could fall a lap behind it */
                for (int k = 0; k < level.slots; k++, ring.next()) {
                    if (thread >= 32) continue;
                    rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
                    slot_free(at, ring.slot, thread);
                }
                rf_group_sync(group + 1, WARPGROUP);
                continue;
            }
            const float4 *from = nullptr;
            if (!(s.flags & HERE)) {
                if (!ready) rf_count_wait(up.done, (rf_u32)up.count * args.strips * RF_RANKS);
                ready = true;
                from = (const float4 *)up.sums + ((rf_i64)s.parent * RF_RANKS + rank) * (SUMS_BYTES / 16) +
                       thread;
            }
#pragma unroll
            for (int i = 0; i < SUMS;
                 i += 4) /* a load that is a branch would make the products wait for each other (C7512) */
                asm volatile(
                    "{ .reg .pred p; setp.ne.b64 p, %4, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; "
                    "mov.f32 %2, 0f00000000; mov.f32 %3, 0f00000000; "
                    "@p ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%5], %6; }"
                    : "=f"(SUM(i)), "=f"(SUM(i + 1)), "=f"(SUM(i + 2)), "=f"(SUM(i + 3))
                    : "l"(from), "l"(from + i / 4 * WARPGROUP), "l"(RF_L2_LAST)
                    : "memory");
            multiply(sums, at, ring, level.slots, group * X_BYTES + offset, thread);
            if (s.flags & HERE) {
                rf_barrier_wait(at.sums_full, s.flags & PARITY ? 1 : 0);
#pragma unroll
                for (int i = 0; i < SUMS; i += 4) {
                    float4 more;
                    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                                 : "r"(at.sums + (i / 4 * WARPGROUP + thread) * 16)
                                 : "memory");
                    SUM(i) += more.x;
                    SUM(i + 1) += more.y;
                    SUM(i + 2) += more.z;
                    SUM(i + 3) += more.w;
                }
            }
            if (l == args.n_levels - 1) {
                store(sums, args, at, s, stage, offset, group, rank, thread);
                continue;
            }
            float4 *to = (float4 *)level.sums +
                         ((rf_i64)(s.item * args.strips + s.column) * RF_RANKS + rank) * (SUMS_BYTES / 16) +
                         thread;
#pragma unroll
            for (int i = 0; i < SUMS; i += 4)
                __stcg(to + i / 4 * WARPGROUP, make_float4(SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)));
            __threadfence();
            rf_group_sync(group + 1, WARPGROUP);
            if (thread == 0) rf_count_up(level.done);
        }
    }
    if (thread == 0) rf_stores_finish();
}

extern "C" __global__ void __launch_bounds__(RF_FUSED_THREADS, 1)
    rf_ikbo_linear(const __grid_constant__ rf_fused_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, rank = RF_RANKS == 2 ? blockIdx.x % 2 : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RF_SLOTS; i++) {
            rf_barrier_init(at.full + i * 8, GROUPS + 1);
            rf_barrier_init(at.empty + i * 8, GROUPS * RF_RANKS);
        }
        rf_barrier_init(at.sums_full, 1);
        rf_barrier_init(at.sums_empty, GROUPS);
        cut(args, at, blockIdx.x / RF_RANKS, gridDim.x / RF_RANKS);
        rf_barriers_ready();
    }
    if (RF_RANKS == 2)
        rf_cluster_sync();
    else
        __syncthreads();
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        const int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 32 == 0 && warp < GROUPS) copy_strips(args, at, warp, rank);
        if (warp == GROUPS) copy_weights(args, at, threadIdx.x % 32, rank);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        multiply_strips(args, at, group, rank);
        __syncwarp();
    }
    if (RF_RANKS == 2) rf_cluster_sync(); /* a block whose other still writes to it must not end */
}
