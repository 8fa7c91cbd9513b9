/* Schedule "pool" of the fused embedding bag: groups of lanes pool the bags of one feature.
 *
 * Thread mapping. THREADS threads share a bag. LANES of them read a row, VECTORS vectors of ALIGN bytes each;
 * so SLOTS = THREADS / LANES rows of the bag are read at once, and a warp has 32 / THREADS bags if THREADS is
 * less than a warp. A slot has DISTANCE rows in flight and loads BATCH indices at a time (indices.cuh), CHUNK
 * consecutive indices by each load. The indices of the next rows, or of the next bag, are loaded while rows
 * are in flight, and offsets one bag earlier. A warp continues until the longest of its bags is done.
 *
 * The sums of slots are reduced by shuffles in which each lane keeps half of its elements, down to one
 * element: a butterfly of whole vectors takes up to four times as many. The sums of warps and blocks that
 * share a bag are added in the order of their numbers: results are bit-identical from run to run.
 *
 * A maximum is taken by one slot in the order of the lookups: torch's rule for NaN depends on it.
 */
#ifndef RECFUSE_FUSED_POOL_CUH
#define RECFUSE_FUSED_POOL_CUH

#include "families/fused_embedding_bag/pool/pool_finish.cuh"

/* Returns true if this schedule can pool the task. */
template <class S> RF_INLINE bool rf_can_pool(const rf_fused_args &args, const rf_fused_task &task) {
    if (!RF_CALLERS_MAPPING) return true;
    if (!rf_is_feature(args, task.feature) || task.first_bag < 0 || task.first_bag >= task.last_bag)
        return false;
    const rf_fused_descriptor &feature = args.features[task.feature];
    if (rf_load(&feature.shape) != S::SHAPE) return false;
    const rf_i64 column = (rf_i64)task.slice * S::LANES * S::VECTORS;
    if (column < 0 || column >= rf_load(&feature.columns)) return false;
    if (!S::SPLIT) return true;
    const rf_i64 floats = (rf_fused_splits(task.split)) * (rf_i64)(task.last_bag - task.first_bag) *
                          (rf_shared_bags<S>::WIDTH + 1);
    return (rf_fused_split_part(task.split)) < rf_fused_splits(task.split) &&
           (rf_u32)task.group < (rf_u32)args.n_groups && task.partials >= 0 &&
           task.partials * 32ll + floats <= args.n_partials * 32ll;
}

/* Pools the bags of a task, THREADS threads each. `exchanged`: the row indices of the warp; `count`: the sums of
 * all warps. */
template <class S>
RF_INLINE void rf_pool(const rf_fused_args &args, const rf_fused_task &task, rf_row_number *exchanged,
                       float *count) {
    constexpr int BAGS = RF_BLOCK / (S::GROUP * S::WARPS); /* bags at once */
    constexpr int ROUNDS = S::BATCH / S::DISTANCE;
    const rf_pool_source<S> source(args, task);
    const RF_OFFSET *offsets = args.offsets + (rf_i64)task.feature * args.bags;
    asm volatile("" : "+l"(offsets)); /* else the compiler recomputes it for each bag */
    const int warp = S::WARPS > 1 ? threadIdx.x / 32 % S::WARPS : 0;
    const int first_lookup = (warp * S::LOADS * S::SLOTS + source.slot()) * S::CHUNK + S::index_of_lane();
    const int group_number = (int)threadIdx.x / (S::GROUP * S::WARPS); /* number among the BAGS bags */
    const bool bad_start = rf_bad_start(args, task.feature, task.first_bag);
    int bad = bad_start;
    rf_bag next = rf_load_part<S>(args, task, offsets, task.first_bag + BAGS + group_number, bad);
    rf_bag now = rf_load_part<S>(args, task, offsets, task.first_bag + group_number, bad);
    if (bad_start && group_number == 0) now = {0, 0};
    rf_remaining remaining(now, first_lookup);
    RF_INDEX indices[S::LOADS];
    rf_load_indices<S>(args, remaining.position, remaining.count, indices);
#pragma unroll 1
    for (int first = task.first_bag; first < task.last_bag; first += BAGS) {
        const rf_bag after_next = rf_load_part<S>(args, task, offsets, first + 2 * BAGS + group_number, bad);
        rf_pooled<S> pooled = {};
        /* At least one iteration, also for empty bags: the body loads the indices of the next bags. */
#pragma unroll 1
        do {
            const RF_POSITION first_position =
                remaining.position - S::index_of_lane(); /* the slot's first lookup */
            rf_row_number lane_rows[S::LOADS];
            rf_four_rows numbers[S::BATCH / 4];
            rf_flight<S> flight;
            rf_check_indices<S>(indices, remaining.count, source.rows, source.padding, lane_rows, bad,
                                pooled.counted);
            rf_exchange<S>(lane_rows, exchanged, numbers);
#pragma unroll
            for (int round = 0; round < ROUNDS - 1; round++) {
                rf_fetch(source, round, numbers, flight);
                rf_add_flight(args.sample_weights, first_position, round, flight, pooled);
            }
            rf_fetch(source, ROUNDS - 1, numbers, flight);
            remaining.position += S::STRIDE;
            remaining.count -= S::STRIDE;
            const rf_remaining next_remaining(next, first_lookup);
            const bool has_more = remaining.count > 0;
            rf_load_indices<S>(args, has_more ? remaining.position : next_remaining.position,
                               has_more ? remaining.count : next_remaining.count, indices);
            rf_add_flight(args.sample_weights, first_position, ROUNDS - 1, flight, pooled);
        } while (__any_sync(RF_FULL_WARP, remaining.count > 0));
        if (S::PADDED && (int)threadIdx.x % S::LANES >= S::CHUNK) pooled.counted = 0;
        rf_finish_bag(args, task, offsets, first + group_number, source, pooled, count);
        remaining = rf_remaining(next, first_lookup);
        next = after_next;
    }
    if constexpr (S::SPLIT) rf_finish_shared<S>(args, task);
    if (RF_CHECK && bad != 0) rf_report_task(args, false);
}

#endif
