/* Fused embedding bag, schedule "staged": copies tables of narrow rows into shared memory and pools them
 * there.
 *
 * A row of 32 bytes costs L2 as much as a row of 128 bytes: the bound of such tables is the number of rows,
 * not of bytes. If a batch reads the rows of a table more than once, it is cheaper to copy the whole table
 * and read the rows on chip.
 *
 * Thread mapping. One block an SM runs as long as there are tasks. A task is all bags of one feature, or a
 * range of them if there are more than MOST_BAGS. Each block has its own list of tasks (staged/staged.c); the
 * lists are about equally long. Four helper warps copy the tables one after another into a ring and sort the
 * bags of each by length (staged/producer.cuh). WARPS warps pool, each 32 / THREADS bags of about equal
 * length at once; they claim the next bags by a counter in shared memory. THREADS lanes share a bag: each
 * takes four consecutive lookups out of 4 * THREADS, loads their indices at once, and adds their rows alone.
 *
 * A row of 32 bytes is two vectors. Of two adjacent lanes one begins with the first vector and the other with
 * the second, so that they use all banks.
 *
 * The kernel of the other features runs concurrently, on the remaining registers and shared memory
 * (RF_WITH_STAGED).
 *
 * On an H200 the bounds are bank conflicts, because rows are read in random order, and the latency of
 * indices, about equally. Prefetching indices further, tables that stay in L2, and more warps with fewer
 * registers are all slower.
 *
 * Shapes: those of rf_fused_args (fused_args.h); tasks are lists [limit][grid], each ended by a task of
 * feature -1. Launch: grid [lists], block [RF_BLOCK + HELPERS], dynamic shared memory: sizeof(ring). Compute
 * capability 9.0.
 */
#include "families/fused_embedding_bag/staged/staged_rows.cuh"

#ifndef RF_SCHEDULES
#define RF_SCHEDULES(X) X(0, 2, 0, 16, 16, 1, 2, 1, 0, 0, 16, 4, 1)
#endif

/* The next bag of a group of lanes. */
template <class S> struct staged_bag {
    rf_bag lookups;
    int number; /* number of the bag; -1: none */

    RF_INLINE staged_bag(int sequence, int round) : lookups({0, 0}), number(-1) {
        const bag_list &list = the_ring().lists[sequence % SLOTS];
        const staged_task &task = the_ring().tasks[sequence % SLOTS];
        const int bag_position = round * (32 / S::GROUP) + (int)threadIdx.x % 32 / S::GROUP;
        if (bag_position >= task.last_bag - task.first_bag) return;
        lookups = list.bags[bag_position];
        number = task.first_bag + list.numbers[bag_position];
    }
};

/* Claims bags of this table, for the whole warp; valid in the first lane. */
RF_INLINE int claim(int sequence) {
    return threadIdx.x % 32 == 0 ? atomicAdd(&the_ring().claims[sequence % (2 * SLOTS)], 1) : 0;
}

/* Prefetches the indices of the next bag into L2, so that no register waits for them. Each lane prefetches
 * its share. */
template <class S> RF_INLINE void prefetch_indices(const rf_fused_args &args, const rf_bag &bag) {
    const RF_POSITION position = bag.begin + threadIdx.x % S::GROUP * 16;
    if (position < bag.end) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.indices + position));
}

/* Pools all bags of a task; a warp claims 32 / GROUP bags at a time. */
template <class S> RF_INLINE void pool_table(const rf_fused_args &args, int sequence) {
    const staged_task &task = the_ring().tasks[sequence % SLOTS];
    const int first_lookup = threadIdx.x % S::GROUP * 4;
    const int rounds = (task.last_bag - task.first_bag + 32 / S::GROUP - 1) / (32 / S::GROUP);
    const staged_table<S> table(task);
    int missing = 0; /* lookups without a valid row */
    int claimed = claim(sequence);
    int round = (int)threadIdx.x / 32, next_round = round + WARPS;
    staged_bag<S> now(sequence, round);
    staged_remaining remaining(now.lookups, first_lookup);
    four_indices indices;
    if (remaining.count > 0) load_indices(args, args.indices + remaining.position, indices);
    barrier_wait(&the_ring().full[sequence % SLOTS], sequence / SLOTS & 1);
#pragma unroll 1
    while (round < rounds) {
        const staged_bag<S> next(sequence, next_round);
        const int claimed_round = 2 * WARPS + __shfl_sync(RF_FULL_WARP, claimed, 0);
        claimed = claim(sequence);
        const staged_remaining next_remaining(next.lookups, first_lookup);
        prefetch_indices<S>(args, next.lookups);
        staged_sum<S> pooled = {};
        if (remaining.count <= 0 && next_remaining.count > 0)
            load_indices(args, args.indices + next_remaining.position, indices);
#pragma unroll 1
        while (remaining.count > 0) {
            const staged_remaining batch = remaining;
            const four_indices batch_indices = indices;
            remaining.position += S::STRIDE;
            remaining.count -= S::STRIDE;
            remaining.skip = 0;
            const bool has_more = remaining.count > 0;
            if (has_more || next_remaining.count > 0)
                load_indices(args, args.indices + (has_more ? remaining.position : next_remaining.position),
                             indices);
            add_rows(args, table, batch, batch_indices, pooled, missing);
        }
        rf_u8 *to = task.output + (rf_u64)(rf_u32)now.number * args.output_pitch;
        finish_bag(args, to, now.number >= 0, pooled, now.lookups.end - now.lookups.begin);
        remaining = next_remaining;
        now = next;
        round = next_round;
        next_round = claimed_round;
    }
    if (RF_CHECK && missing != 0) rf_report_bags(args, task.feature, task.first_bag, task.last_bag, 1);
}

/* Returns true if this schedule can pool the task. */
template <class S> RF_INLINE bool can_pool(const rf_fused_args &args, int number) {
    if (!RF_CALLERS_MAPPING) return true;
    const rf_fused_descriptor &feature = args.features[number];
    return rf_load(&feature.pitch) == (rf_u32)S::ROW && (rf_load(&feature.shape) & S::SHAPE_BITS) == S::SHAPE;
}

template <int KIND, int DTYPE, int ALIGN, int STORE, int LANES, int VECTORS, int WHOLE, int POOLING,
          int PADDED, int THREADS, int DISTANCE, int SPLIT>
RF_INLINE bool run(const rf_fused_args &args, int sequence) {
    typedef staged_shape<DTYPE, ALIGN, STORE, VECTORS, POOLING, PADDED, THREADS> shape;
    if (!can_pool<shape>(args, the_ring().tasks[sequence % SLOTS].feature)) return false;
    pool_table<shape>(args, sequence);
    return true;
}

/* Pools the tasks of the block's list. */
RF_INLINE void pool_tables(const rf_fused_args &args) {
    ring &from = the_ring();
#pragma unroll 1
    for (int sequence = 0;; sequence++) {
        barrier_wait(&from.bags_listed[sequence % SLOTS], sequence / SLOTS & 1);
        if (from.tasks[sequence % SLOTS].feature < 0) return;
        bool is_pooled = false;
        switch (from.tasks[sequence % SLOTS].schedule) {
#define RF_CASE(number, ...)                          \
    case number:                                      \
        is_pooled = run<__VA_ARGS__>(args, sequence); \
        break;
            RF_SCHEDULES(RF_CASE)
#undef RF_CASE
        }
        /* A warp may release a table only after it has waited for it. */
        if (!is_pooled) barrier_wait(&from.full[sequence % SLOTS], sequence / SLOTS & 1);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&from.empty[sequence % SLOTS]);
    }
}

/* Compiled for 1,024 threads: with more than 64 registers a thread, none are left for the concurrent
 * kernel. */
extern "C" __global__ void __launch_bounds__(1024, 1)
    rf_fused_staged(const __grid_constant__ rf_fused_args args) {
    rf_wait_for_previous_kernel();
    ring_new();
    if (threadIdx.x < RF_BLOCK) {
        pool_tables(args);
    } else {
        load_tables(args);
    }
}
