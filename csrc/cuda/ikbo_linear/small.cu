/* A level of a linear layer over users and their candidates, as fused.cu has all of them, for items so few that they do not
 * fill a GPU by its strips: the time is then that of loads that wait for each other.
 *
 *     sums of an item = W . x[item] + sums of its parent;   the last level: out[item] = activation(sums + bias)
 *
 * A block has one piece, and ends: RF_ROWS rows of the weight (rank) for RF_GROUPS strips of 64 columns. Its ring is as deep as
 * shared memory allows, so that most of what it reads is on its way at once. Weights are read as they lie, RF_GRAIN bytes at a
 * time, since packing them first would take as long as a small call. A launch for each level, each of which begins beside the
 * one before, and waits for it where it needs its sums.
 *
 * A block: RF_GROUPS warpgroups that multiply, and four warps that copy: one for each strip, the rest for weights.
 * A thread: RF_ROWS / 2 sums as in fused.cu. Shared memory: RF_SMALL_SHARED_BYTES. Launch: grid
 * [ceil(items * strips / RF_GROUPS) * ranks], block [(RF_GROUPS + 1) * 128].
 * Source: IKBO (in-kernel broadcast optimization), section 2: decomposition, broadcast fusion.
 */

#ifndef RF_DTYPE
#define RF_DTYPE 1
#endif
#ifndef RF_ACTIVATION
#define RF_ACTIVATION 0
#endif
#ifndef RF_ROWS
#define RF_ROWS 64
#define RF_GROUPS 2
#define RF_SLOTS 16
#define RF_GRAIN 4
#endif

#include "device/hopper.cuh"
#include "device/wgmma.cuh"
#include "ikbo_linear/activation.cuh"
#include "ikbo_linear/args.h"
#include "ikbo_linear/parent.cuh"

enum {
    WARPGROUP = 128,
    LOADERS = 4 - RF_GROUPS, /* warps that copy weights */
    SUMS = RF_ROWS / 2, /* of a thread */
    X_BYTES = RF_FUSED_X_BYTES,
    WEIGHT_BYTES = RF_FUSED_WEIGHT_BYTES(RF_ROWS),
    SLOT_BYTES = RF_SMALL_SLOT_BYTES(RF_ROWS, RF_GROUPS),
    STAGE_BYTES = RF_ROWS * RF_FUSED_COLUMNS * 2,
};

/* Addresses in shared memory. */
struct shared_t {
    rf_u32 slots, stages;
    rf_u32 full, empty; /* [RF_SLOTS] barriers each */
};

RF_INLINE shared_t shared_of(rf_u8 *memory) {
    shared_t at;
    at.slots = (rf_shared(memory) + 1023) & ~1023u; /* the swizzle goes by addresses */
    at.stages = at.slots + RF_SLOTS * SLOT_BYTES;
    at.full = at.stages + RF_GROUPS * STAGE_BYTES;
    at.empty = at.full + RF_SLOTS * 8;
    return at;
}

/* A place in the ring. */
struct ring_t {
    int slot;
    rf_u32 parity;
    RF_INLINE void next() {
        if (++slot == RF_SLOTS) slot = 0, parity ^= 1;
    }
    RF_INLINE int before() const { return slot > 0 ? slot - 1 : RF_SLOTS - 1; }
};

/* One thread: the boxes of a strip. */
RF_INLINE void copy_strip(const rf_small_args &args, const shared_t &at, int strip, int group) {
    const int column = strip / args.count, item = strip - column * args.count;
    ring_t ring = {0, 1};
    for (int k = 0; k < args.slots; k++, ring.next()) {
        const rf_u32 full = at.full + ring.slot * 8;
        rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
        rf_barrier_expect(full, X_BYTES);
        rf_copy_box(at.slots + ring.slot * SLOT_BYTES + WEIGHT_BYTES + group * X_BYTES, &args.x,
                    column * RF_FUSED_COLUMNS, k * RF_FUSED_K, item, full, RF_L2_NORMAL);
    }
}

/* `bytes` of RF_GRAIN to shared memory, the rest zeros. */
RF_INLINE void copy_grain(rf_u32 to, const rf_u8 *from, int bytes) {
#if RF_GRAIN == 16
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

/* A warp of LOADERS: of every LOADERS-th slot the weights [RF_ROWS][32 of k], zeros beyond m and k; piece c of 16 bytes of row r
 * lies at c ^ (r / 2 % 4), as the swizzle of 64 bytes wants. */
RF_INLINE void copy_weights(const rf_small_args &args, const shared_t &at, int rank, int loader, int lane) {
    enum {
        ROW = RF_FUSED_K * 2,
        IN_ROW = ROW / RF_GRAIN,
        STEP = 32 / IN_ROW
    }; /* bytes, lanes of a row; rows at once */
    const int inside = lane % IN_ROW * RF_GRAIN, row = lane / IN_ROW, rows = args.m - rank * RF_ROWS - row;
    const rf_u8 *from = args.weight + (rank * RF_ROWS + row) * args.weight_pitch + inside;
    ring_t ring = {0, 1};
    for (int k = 0; k < args.slots; k++, ring.next()) {
        if (k % LOADERS != loader) continue;
        const int left = args.k * 2 - k * ROW - inside, bytes = max(0, min(left, (int)RF_GRAIN));
        const rf_u8 *source = bytes > 0 ? from + k * ROW : from - inside;
        const rf_u32 to = at.slots + ring.slot * SLOT_BYTES + row * ROW + inside % 16;
        rf_barrier_wait(at.empty + ring.slot * 8, ring.parity);
#pragma unroll 16
        for (int r = 0; r < RF_ROWS; r += STEP) {
            const bool there = r < rows;
            copy_grain(to + r * ROW + ((inside / 16) ^ ((r + row) / 2 % 4)) * 16,
                       there ? source : args.weight, there ? bytes : 0);
            source += STEP * args.weight_pitch;
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at.full + ring.slot * 8)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

typedef float sums_t[SUMS];

/* sums = strip . weights over the slots of k, of which there are 2 or more, an even number. */
RF_INLINE void multiply(sums_t &sums, const shared_t &at, int slots, rf_u32 from, int thread) {
    rf_u32 a[2][2][4]; /* of two slots in turns: a product may still read what one load ago came */
    ring_t ring = {0, 0};
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    for (int k = 0; k < slots; k += 2) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
            rf_async_fence(); /* weights were written by ordinary copies */
            const rf_u32 slot = at.slots + ring.slot * SLOT_BYTES;
            const rf_u32 b = rf_wgmma_rows_of_64_bytes(slot);
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[q][i][0]), "=r"(a[q][i][1]), "=r"(a[q][i][2]), "=r"(a[q][i][3])
                             : "r"(slot + WEIGHT_BYTES + from + i * (X_BYTES / 2))
                             : "memory");
            rf_wgmma_begin();
#pragma unroll
            for (int i = 0; i < 2; i++) rf_wgmma<RF_DTYPE>(sums, a[q][i], b + i * 2);
            rf_wgmma_commit();
            rf_wgmma_wait<1>();
            if (k + q > 0 && thread == 0) rf_barrier_arrive(at.empty + ring.before() * 8);
            ring.next();
        }
    }
    rf_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory"); /* not read before */
}

/* Where this thread's sums of an item and column are, for the rows of `rank`. */
RF_INLINE rf_i64 sums_at(const rf_small_args &args, rf_i64 item, int column, int rank, int thread) {
    return ((item * args.strips + column) * args.ranks + rank) * (RF_ROWS * RF_FUSED_COLUMNS) + thread * 4;
}

/* Adds the sums of an item's parent; a bad one has none, and is reported. */
RF_INLINE void add_parent(sums_t &sums, const rf_small_args &args, int item, int column, int rank,
                          int thread) {
    const rf_i64 parent = args.parent[item];
    if ((rf_u64)parent >= (rf_u64)args.parents) {
        if (rank == 0 && thread == 0 && column == 0 && args.report)
            rf_report_parent(args.errors, args.map, item, parent, args.parents, args.count);
        return;
    }
    const float4 *from = (const float4 *)(args.base + sums_at(args, parent, column, rank, thread));
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        const float4 more = __ldcg(from + i / 4 * WARPGROUP);
        sums[i] += more.x;
        sums[i + 1] += more.y;
        sums[i + 2] += more.z;
        sums[i + 3] += more.w;
    }
}

/* Sums 4 i and 4 i + 2 are of row 8 i + 2 (lane % 4), the others of the next one. */
RF_INLINE void add_bias(sums_t &sums, const rf_small_args &args, int rank, int lane) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int row = rank * RF_ROWS + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < args.m)
            sums[i] += rf_element<RF_DTYPE>::get(rf_load((const rf_bytes<2> *)args.bias + row), 0);
    }
}

RF_INLINE rf_u32 pack_two(float low, float high) {
    rf_bytes<4> two;
    rf_element<RF_DTYPE>::set(two, 0, rf_activate<RF_ACTIVATION>(low));
    rf_element<RF_DTYPE>::set(two, 1, rf_activate<RF_ACTIVATION>(high));
    return two.word[0];
}

/* The last level's leave for `out`. */
RF_INLINE void store(const sums_t &sums, const rf_small_args &args, rf_u32 stage, rf_u32 offset, int item,
                     int column, int rank, int group, int thread) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         stage + offset + i * 256),
                     "r"(pack_two(sums[i], sums[i + 1])), "r"(pack_two(sums[i + 2], sums[i + 3])),
                     "r"(pack_two(sums[i + 4], sums[i + 5])), "r"(pack_two(sums[i + 6], sums[i + 7]))
                     : "memory");
    rf_async_fence();
    rf_group_sync(group + 1, WARPGROUP);
    if (thread == 0) {
        rf_store_box(&args.out, column * RF_FUSED_COLUMNS, rank * RF_ROWS, item, stage);
        rf_stores_finish();
    }
}

/* One warpgroup: its strip. */
RF_INLINE void multiply_strip(const rf_small_args &args, const shared_t &at, int strip, int rank, int group) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    const int column = strip / args.count, item = strip - column * args.count;
    /* Where ldmatrix and stmatrix have this thread's row of 16 bytes in a box [rows][64 columns] with a swizzle of 128. */
    const rf_u32 offset =
        lane % 8 * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16 + lane / 16 * 1024;
    sums_t sums;
    multiply(sums, at, args.slots, group * X_BYTES + offset, thread);
    if (args.bias != nullptr) add_bias(sums, args, rank, lane);
    if (args.parent != nullptr) {
        rf_wait_for_previous_kernel();
        add_parent(sums, args, item, column, rank, thread);
    }
    if (args.last) {
        store(sums, args, at.stages + group * STAGE_BYTES, offset, item, column, rank, group, thread);
        return;
    }
    float4 *to = (float4 *)(args.sums + sums_at(args, item, column, rank, thread));
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        to[i / 4 * WARPGROUP] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}

extern "C" __global__ void __launch_bounds__((RF_GROUPS + 1) * 128, 1)
    rf_ikbo_small(const __grid_constant__ rf_small_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first = blockIdx.x / args.ranks * RF_GROUPS, rank = blockIdx.x % args.ranks;
    const int strips = min((int)RF_GROUPS, args.count * args.strips - first);
    if (!args.last) rf_begin_next_kernel();
    if (threadIdx.x == 0) {
        for (int i = 0; i < RF_SLOTS; i++) {
            rf_barrier_init(at.full + i * 8, strips + 32);
            rf_barrier_init(at.empty + i * 8, strips);
        }
        rf_barriers_ready();
    }
    __syncthreads();
    if (group < RF_GROUPS) {
        if (group < strips) multiply_strip(args, at, first + group, rank, group);
    } else if (warp >= RF_GROUPS) {
        copy_weights(args, at, rank, warp - RF_GROUPS, lane);
    } else if (lane == 0 && warp < strips) {
        copy_strip(args, at, first + warp, warp);
    }
}
