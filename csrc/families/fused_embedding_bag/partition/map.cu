/* Partition of the fused embedding bag, computed on the device, where the lengths of bags are known. It makes
 * the choices of partition/cost.c and cut.c by the same cost model (fused_map_args.h), with three
 * differences: ranks are coarser, tasks of tiles come last instead of being spread over the others, and the
 * last tasks are as long as all others.
 *
 * Thread mapping. Run r < n_features is feature r, if its schedule pools; the runs after them are the tiles,
 * each with 32 lanes of features that have short bags. Every block computes the whole partition, a thread a
 * run, in passes that synchronise only within the block. Then each warp of each block writes the tasks of
 * some runs: on one SM writing them would take longer than computing them.
 *
 *   1. lengths -> schedules; positions of columns in the tiles of their schedule; the longest mean of each
 *   tile
 *   2. the work of all runs -> the work of a task
 *   3. the number of tasks of each rank: how long they are, or where their rows come from
 *   4. positions of each run's tasks, the highest rank first; tasks
 *
 * For any contents of the offsets, tasks cover each bag of each feature once, and their number is at most the
 * number for which the host has allocated: it follows from the sum of the work by which they are cut.
 *
 * Shapes: those of rf_fused_map_args (partition/fused_map_args.h). Shared memory, static: shared_data, 45 KB.
 * Launch: grid [1 ...], block [RF_BLOCK]. The result does not depend on the grid.
 * Source: Pan et al., RecFlex, SC'24, section IV-B: thread mapping at run time.
 */
#ifndef RF_BLOCK
#define RF_BLOCK 1024
#endif
#include "families/fused_embedding_bag/partition/map_runs.cuh"

/* For threads with the same bin, in their order: returns ends[bin] plus the weights of the previous threads,
 * and advances ends[bin] by all weights. All threads of the block call it; NO_BIN is skipped. */
RF_INLINE int positions_in_bins(shared_data &shared, int *ends, int bin, int weight) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
#pragma unroll
    for (int k = lane; k < RF_FUSED_MOST_CLASSES; k += 32) shared.totals[k][warp] = 0;
    __syncwarp();
    int previous = 0;
    for (rf_u32 pending = __ballot_sync(RF_FULL_WARP, bin >= 0); pending != 0;) {
        const int item = __shfl_sync(RF_FULL_WARP, bin, __ffs(pending) - 1);
        const bool is_in_bin = bin == item;
        const int sum = rf_sum_of_lanes_to(is_in_bin ? weight : 0);
        if (is_in_bin) previous = sum - weight;
        if (lane == 31) shared.totals[item][warp] = sum;
        pending &= ~__ballot_sync(RF_FULL_WARP, is_in_bin);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RF_FUSED_MOST_CLASSES / WARPS; i++) { /* a lane per warp of the block */
        const int k = warp + i * WARPS, lane_total = shared.totals[k][lane], end = ends[k];
        const int sum = rf_sum_of_lanes_to(lane_total);
        shared.totals[k][lane] = end + sum - lane_total;
        __syncwarp();
        if (lane == 31) ends[k] = end + sum;
    }
    __syncthreads();
    return bin >= 0 ? shared.totals[bin][warp] + previous : 0;
}

/* Returns the sum of a number of all threads, bit-identical in each thread and each block. */
RF_INLINE float sum_of_block(shared_data &shared, float value) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) value += __shfl_xor_sync(RF_FULL_WARP, value, stride);
    if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared.sums[threadIdx.x % 32];
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) value += __shfl_xor_sync(RF_FULL_WARP, value, stride);
    return value;
}

/* Writes the lanes of a warp's features, eight threads a feature: `columns` from lane `first` on. */
RF_INLINE void write_lanes(const rf_fused_map_args &args, int feature, int first, int columns) {
    const int lane = threadIdx.x % 32, base = feature - lane;
#pragma unroll 1
    for (int i = 0; i < 32; i += 4) {
        const int from = i + lane / 8;
        const int count = __shfl_sync(RF_FULL_WARP, columns, from),
                  start = __shfl_sync(RF_FULL_WARP, first, from);
        for (int c = lane % 8; c < count; c += 8) args.lanes[(rf_i64)start + c] = {base + from, c};
    }
}

/* Pass 1. */
RF_INLINE void fill_tiles(const rf_fused_map_args &args, shared_data &shared, rf_u32 *tile_means) {
    for (int base = 0; base < args.n_features; base += RF_BLOCK) {
        const int f = base + (int)threadIdx.x;
        int bin = NO_BIN, columns = 0;
        float mean = 0.0f;
        if (f < args.n_features) {
            const rf_fused_map_feature feature = load_feature(args, f);
            mean = mean_length(args, f);
            bin = class_number(args, feature, mean);
            if (bin >= 0 && shared.classes[bin].first_tile < 0) bin = NO_BIN;
            columns = bin >= 0 ? feature.columns : 0;
        }
        const int first = positions_in_bins(shared, shared.lane_end, bin, columns);
        if (columns > 0) {
            for (int tile = first / 32; tile <= (first + columns - 1) / 32; tile++)
                atomicMax(tile_means + tile, __float_as_uint(mean)); /* bits of floats >= 0 are ordered */
        }
        if (f / 32 % gridDim.x == blockIdx.x) write_lanes(args, f, first, columns);
    }
    __syncthreads();
    /* Lanes of a last tile that belong to no feature. */
    for (int k = threadIdx.x / 32; k < args.n_classes; k += WARPS) {
        const int position = shared.lane_end[k] + (int)threadIdx.x % 32;
        if (blockIdx.x == 0 && shared.classes[k].first_tile >= 0 &&
            position < (shared.lane_end[k] + 31) / 32 * 32)
            args.lanes[position] = {-1, 0};
    }
}

/* Pass 3, to the begins of the tasks of each rank; returns the number of tasks. */
RF_INLINE void count_ranks(const rf_fused_map_args &args, shared_data &shared, const rf_u32 *tile_means,
                           const task_costs &targets) {
    const int lane = threadIdx.x % 32, n_runs = args.n_features + args.n_tiles;
    for (int base = 0; base < n_runs; base += RF_BLOCK) {
        run_tasks tasks;
        const int rank =
            cut(args, shared, run_of(args, shared, tile_means, base + (int)threadIdx.x), targets, tasks);
        const rf_u32 same_rank = __match_any_sync(RF_FULL_WARP, rank);
        const int total = __reduce_add_sync(same_rank, tasks.total);
        if (rank >= 0 && lane == __ffs(same_rank) - 1) atomicAdd(shared.rank_total + rank, total);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int rank = RANKS - 1 - lane, lane_total = shared.rank_total[rank];
        const int sum = rf_sum_of_lanes_to(lane_total);
        shared.task_end[rank] = sum - lane_total;
        if (lane == 31 && blockIdx.x == 0) *args.n_tasks = min(sum, args.most_tasks);
    }
    __syncthreads();
}

/* Two threads a task. */
RF_INLINE void write_tasks(const rf_fused_map_args &args, const run_tasks &item) {
    const int lane = threadIdx.x % 32;
    for (int i = lane / 2; i < item.total; i += 16) {
        const int slice = item.total == item.count ? 0 : i / item.count,
                  bag = (i - slice * item.count) * item.bags_a_task;
        rf_bytes<16> half;
        half.word[0] = lane % 2 == 0 ? item.number : item.schedule & LONGER ? 1 : slice;
        half.word[1] = lane % 2 == 0 ? bag : RF_FUSED_WHOLE_BAGS;
        half.word[2] = lane % 2 == 0 ? min(bag + item.bags_a_task, args.bags) : 0;
        half.word[3] = lane % 2 == 0 ? item.schedule & (LONGER - 1) : 0;
        if (item.first + i < args.most_tasks)
            *((rf_bytes<16> *)(args.tasks + item.first + i) + lane % 2) = half;
    }
}

/* Pass 4. */
RF_INLINE void make_tasks(const rf_fused_map_args &args, shared_data &shared, const rf_u32 *tile_means,
                          const task_costs &targets) {
    const int n_runs = args.n_features + args.n_tiles;
    for (int base = 0; base < n_runs; base += RF_BLOCK) {
        const int r = base + (int)threadIdx.x;
        run_tasks tasks;
        const int rank = cut(args, shared, run_of(args, shared, tile_means, r), targets, tasks);
        tasks.number = r < args.n_features ? r : r - args.n_features;
        tasks.first = positions_in_bins(shared, shared.task_end, rank, tasks.total);
        shared.runs[threadIdx.x] = tasks;
        __syncthreads();
        for (int i = (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x); i < RF_BLOCK; i += WARPS * gridDim.x)
            if (shared.runs[i].total > 0) write_tasks(args, shared.runs[i]);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_fused_map(const __grid_constant__ rf_fused_map_args args) {
    __shared__ shared_data shared;
    rf_u32 *tile_means = args.tile_means + (rf_i64)blockIdx.x * args.n_tiles;
    const int n_runs = args.n_features + args.n_tiles;
    /* Descriptions of features do not depend on previous kernels. */
    for (int k = threadIdx.x; k < RF_FUSED_MOST_CLASSES; k += RF_BLOCK) {
        rf_fused_map_class schedule = {-1, 1, 1.0f, 0};
        if (k < args.n_classes) schedule = args.classes[k];
        shared.classes[k] = schedule;
        shared.lane_end[k] = max(schedule.first_tile, 0) * 32;
        shared.task_end[k] = 0;
        if (k < RANKS) shared.rank_total[k] = 0;
    }
    rf_wait_for_previous_kernel();
    for (int tile = threadIdx.x; tile < args.n_tiles; tile += RF_BLOCK) tile_means[tile] = 0;
    __syncthreads();
    fill_tiles(args, shared, tile_means);
    float work = 0.0f, tiles = 0.0f;
    for (int r = threadIdx.x; r < n_runs; r += RF_BLOCK) {
        const run item = run_of(args, shared, tile_means, r);
        const float of_run = work_of(args, shared, item) * (float)item.slices;
        work += of_run;
        if (r >= args.n_features) tiles += of_run;
    }
    task_costs targets;
    targets.of_feature = rf_fused_task_cost(sum_of_block(shared, work), args.most_cuts, args.least_cuts);
    __syncthreads(); /* all threads have read the sum */
    targets.of_tile =
        rf_fused_tile_task_cost(targets.of_feature, sum_of_block(shared, tiles), args.least_cuts);
    count_ranks(args, shared, tile_means, targets);
    make_tasks(args, shared, tile_means, targets);
}
