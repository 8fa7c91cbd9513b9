/* A linear layer over users and their candidates, as in ikbo_linear_fused.cu, for so few items that their
 * strips do not fill a GPU: the bound is the latency of dependent loads.
 *
 *     sums of an item = W_level . x[item] + sums of its parent;   out[candidate] = activation(its sums)
 *
 * A block has one task of a level and then ends: RF_ROWS rows of the weight (rank) for RF_GROUPS strips of
 * 64 columns. Its ring is as deep as shared memory allows, so that most of its loads are in flight at once. A
 * block waits for the sums of its parents' level: so all blocks must run at once (a cooperative launch). If
 * there are too many, blocks claim tasks by a ticket, in the order of levels: then they wait only for blocks
 * that have started, in any order of execution. RF_JOINED, for two levels: a candidate's strip accumulates
 * over its own k, then its user's, and waits for no block. pack.cu packs the weights and sets counters and
 * tickets to 0. This kernel starts concurrently with it, reads its inputs, and waits for it where needed.
 * RF_DIRECT: tensor maps read the weights in place, so with RF_JOINED there is one launch.
 *
 * A block has RF_GROUPS warpgroups that multiply and warps that copy: one for each strip, one for weights. A
 * thread has RF_ROWS / 2 sums as in ikbo_linear_fused.cu. Shared memory: RF_SMALL_SHARED_BYTES. Launch: grid
 * [tasks of all levels], block [(RF_GROUPS + 1) * 128].
 * Source: IKBO (in-kernel broadcast optimization), section 2: decomposition, broadcast fusion, multi-stage
 * fusion.
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
#endif
#ifndef RF_JOINED
#define RF_JOINED 0
#endif
#ifndef RF_DIRECT
#define RF_DIRECT 0
#endif

#include "gpu/device/wgmma.cuh"
#include "families/ikbo_linear/activation.cuh"
#include "families/ikbo_linear/bias.cuh"
#include "families/ikbo_linear/parent.cuh"
#include "families/ikbo_linear/small/small_copy.cuh"

typedef float sums_t[HALVES][SUMS / HALVES];
/* Sum i of all halves. */
#define SUM(i) sums[(i) / (SUMS / HALVES)][(i) % (SUMS / HALVES)]

/* sums = strip . weights over the slots of k, an even number of at least 2. */
RF_INLINE void multiply(sums_t &sums, const shared_t &at, int slots, rf_u32 from, int thread) {
    rf_u32 a[2][2][4]; /* double buffer: a product may still read the previous load */
    ring_t ring = {0, 0};
#pragma unroll
    for (int i = 0; i < SUMS; i++) SUM(i) = 0;
    for (int k = 0; k < slots; k += 2) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
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
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    rf_wgmma<RF_DTYPE>(sums[half], a[q][i], b + i * 2 + half * (HALF * RF_FUSED_K * 2 / 16));
            rf_wgmma_commit();
            rf_wgmma_wait<1>();
            if (k + q > 0 && thread == 0) rf_barrier_arrive(at.empty + ring.before() * 8);
            ring.next();
        }
    }
    rf_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(SUM(i))::"memory"); /* no read before this point */
}

/* Returns the address of a strip's sums for the rows of `rank`. */
RF_INLINE float4 *sums_of(const rf_fused_args &args, float *sums, rf_i64 number, int rank, int thread) {
    return (float4 *)(sums + (number * args.ranks + rank) * (SUMS_BYTES / (rf_i64)sizeof *sums)) + thread;
}

/* Returns the parent of an item, or -1; reports an invalid parent. */
RF_INLINE int parent_of(const rf_fused_args &args, int l, int item, bool reports) {
    if (l == 0) return -1;
    const rf_fused_level &level = args.levels[l];
    const rf_i64 parent = level.parent[item];
    const rf_i32 parents = args.levels[l - 1].count;
    const bool good = (rf_u64)parent < (rf_u64)parents;
    if (!good && reports && args.report)
        rf_report_parent(args.errors, args.chain ? l - 1 : -1, item, parent, parents, level.count);
    return good ? (int)parent : -1;
}

RF_INLINE void add_bias(sums_t &sums, const rf_fused_args &args, int rank, int thread) {
    if (args.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) { /* i % 4 is 0 or 2: the same rows of two columns */
        const int row = rank * RF_ROWS + i / 4 * 8 + thread % 4 * 2;
        SUM(i) += rf_bias_of<RF_DTYPE>(args.bias, row, args.m);
        SUM(i + 1) += rf_bias_of<RF_DTYPE>(args.bias, row + 1, args.m);
    }
}

/* Adds the parent's sums. */
RF_INLINE void add_parent(sums_t &sums, const float4 *from) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        const float4 more = __ldcg(from + i / 4 * WARPGROUP);
        SUM(i) += more.x;
        SUM(i + 1) += more.y;
        SUM(i + 2) += more.z;
        SUM(i + 3) += more.w;
    }
}

RF_INLINE rf_u32 pack_two(float low, float high) {
    rf_bytes<4> two;
    rf_element<RF_DTYPE>::set(two, 0, rf_activate<RF_ACTIVATION>(low));
    rf_element<RF_DTYPE>::set(two, 1, rf_activate<RF_ACTIVATION>(high));
    return two.word[0];
}

/* A strip's item and column of strips, and the rank of a block's rows. */
struct strip_t {
    int item, column, rank;
};

/* Stores the sums of the last level to `out`. `offset`: of this thread's row in the stage. */
RF_INLINE void store(sums_t &sums, const rf_fused_args &args, rf_u32 stage, rf_u32 offset,
                     const strip_t &strip, int group, int thread) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         stage + offset + i * 256),
                     "r"(pack_two(SUM(i), SUM(i + 1))), "r"(pack_two(SUM(i + 2), SUM(i + 3))),
                     "r"(pack_two(SUM(i + 4), SUM(i + 5))), "r"(pack_two(SUM(i + 6), SUM(i + 7)))
                     : "memory");
    rf_async_fence();
    rf_group_sync(group + 1, WARPGROUP);
    if (thread == 0) {
        rf_store_box(&args.out, strip.column * RF_FUSED_COLUMNS, strip.rank * RF_ROWS, strip.item, stage);
        rf_stores_finish();
    }
}

/* Writes the sums of other levels to global memory, and counts them. */
RF_INLINE void store_sums(sums_t &sums, const rf_fused_level &level, float4 *to, int group, int thread) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        __stcg(to + i / 4 * WARPGROUP, make_float4(SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)));
    __threadfence();
    rf_group_sync(group + 1, WARPGROUP);
    if (thread == 0) rf_count_up(level.done);
}

/* One warpgroup multiplies its strip. */
RF_INLINE void multiply_strip(const rf_fused_args &args, const shared_t &at, const task_t &task, int group) {
    const rf_fused_level &level = args.levels[task.level];
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, strip = task.first + group;
    const int column = strip / level.count, item = strip - column * level.count;
    /* The offset of this thread's row of 16 bytes, for ldmatrix and stmatrix, in a box [rows][64 columns]
     * with a swizzle of 128. */
    const rf_u32 offset =
        lane % 8 * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16 + lane / 16 * 1024;
    const int parent = parent_of(args, task.level, item, task.rank == 0 && column == 0 && thread == 0);
    sums_t sums;
    multiply(sums, at, level.slots + (RF_JOINED ? args.levels[task.level - 1].slots : 0),
             group * X_BYTES + offset, thread);
    if (!RF_JOINED) rf_wait_for_previous_kernel(); /* pack.cu sets the counters */
    if (RF_JOINED || parent < 0) {
        add_bias(sums, args, task.rank, thread);
    } else {
        const rf_fused_level &up = args.levels[task.level - 1];
        if (thread == 0) rf_count_wait(up.done, (rf_u32)up.count * args.strips * args.ranks);
        rf_group_sync(group + 1, WARPGROUP);
        add_parent(sums, sums_of(args, up.sums, (rf_i64)parent * args.strips + column, task.rank, thread));
    }
    if (task.level == args.n_levels - 1)
        store(sums, args, at.stages + group * STAGE_BYTES, offset, {item, column, task.rank}, group, thread);
    else
        store_sums(sums, level,
                   sums_of(args, level.sums, (rf_i64)item * args.strips + column, task.rank, thread), group,
                   thread);
}

extern "C" __global__ void __launch_bounds__((RF_GROUPS + 1) * 128, 1)
    rf_ikbo_small(const __grid_constant__ rf_fused_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, warp = threadIdx.x / 32 % 4;
    if (threadIdx.x == 0) {
        const task_t task = task_of(args, claim_number(args));
        *at.task = task;
        for (int i = 0; i < RF_SLOTS; i++) {
            rf_barrier_init(at.full + i * 8, task.strips + 1);
            rf_barrier_init(at.empty + i * 8, task.strips);
        }
        rf_barriers_ready();
    }
    __syncthreads();
    const task_t task = *at.task;
    if (group < RF_GROUPS) {
        if (group < task.strips) multiply_strip(args, at, task, group);
    } else if (threadIdx.x % 32 == 0) {
        if (warp < task.strips) copy_strip(args, at, task.level, task.first + warp, warp);
        if (warp == RF_GROUPS) copy_weights(args, at, task.level, task.rank);
    }
}
