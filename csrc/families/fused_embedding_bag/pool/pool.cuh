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
    const rf_i64 floats = (rf_fused_shares(task.share)) * (rf_i64)(task.last_bag - task.first_bag) *
                          (rf_shared_bags<S>::WIDTH + 1);
    return (rf_fused_share_of(task.share)) < rf_fused_shares(task.share) &&
           (rf_u32)task.group < (rf_u32)args.n_groups && task.partials >= 0 &&
           task.partials * 32ll + floats <= args.n_partials * 32ll;
}

/* Pools the bags of a task, THREADS threads each. `handed`: the row indices of the warp; `left`: the sums of
 * all warps. */
template <class S>
RF_INLINE void rf_pool(const rf_fused_args &args, const rf_fused_task &task, rf_row_number *handed,
                       float *left) {
    constexpr int BAGS = RF_BLOCK / (S::GROUP * S::WARPS); /* bags at once */
    constexpr int ROUNDS = S::BATCH / S::DISTANCE;
    const rf_pool_place<S> place(args, task);
    const RF_OFFSET *offsets = args.offsets + (rf_i64)task.feature * args.bags;
    asm volatile("" : "+l"(offsets)); /* else the compiler recomputes it for each bag */
    const int warp = S::WARPS > 1 ? threadIdx.x / 32 % S::WARPS : 0;
    const int first_lookup = (warp * S::LOADS * S::SLOTS + place.slot()) * S::CHUNK + S::index_of_lane();
    const int mine = (int)threadIdx.x / (S::GROUP * S::WARPS); /* number among the BAGS bags */
    const bool bad_start = rf_bad_start(args, task.feature, task.first_bag);
    int bad = bad_start;
    rf_bag next = rf_load_part<S>(args, task, offsets, task.first_bag + BAGS + mine, bad);
    rf_bag now = rf_load_part<S>(args, task, offsets, task.first_bag + mine, bad);
    if (bad_start && mine == 0) now = {0, 0};
    rf_rest rest(now, first_lookup);
    RF_INDEX indices[S::LOADS];
    rf_load_indices<S>(args, rest.position, rest.left, indices);
#pragma unroll 1
    for (int first = task.first_bag; first < task.last_bag; first += BAGS) {
        const rf_bag after = rf_load_part<S>(args, task, offsets, first + 2 * BAGS + mine, bad);
        rf_pooled<S> pooled = {};
        /* At least one iteration, also for empty bags: the body loads the indices of the next bags. */
#pragma unroll 1
        do {
            const RF_POSITION here = rest.position - S::index_of_lane(); /* the slot's first lookup */
            rf_row_number own[S::LOADS];
            rf_four_rows numbers[S::BATCH / 4];
            rf_flight<S> flight;
            rf_look_at<S>(indices, rest.left, place.rows, place.padding, own, bad, pooled.counted);
            rf_hand_out<S>(own, handed, numbers);
#pragma unroll
            for (int round = 0; round < ROUNDS - 1; round++) {
                rf_fetch(place, round, numbers, flight);
                rf_add_flight(args.sample_weights, here, round, flight, pooled);
            }
            rf_fetch(place, ROUNDS - 1, numbers, flight);
            rest.position += S::STRIDE;
            rest.left -= S::STRIDE;
            const rf_rest coming(next, first_lookup);
            const bool more = rest.left > 0;
            rf_load_indices<S>(args, more ? rest.position : coming.position, more ? rest.left : coming.left,
                               indices);
            rf_add_flight(args.sample_weights, here, ROUNDS - 1, flight, pooled);
        } while (__any_sync(RF_FULL_WARP, rest.left > 0));
        if (S::PADDED && (int)threadIdx.x % S::LANES >= S::CHUNK) pooled.counted = 0;
        rf_finish_bag(args, task, offsets, first + mine, place, pooled, left);
        rest = rf_rest(next, first_lookup);
        next = after;
    }
    if constexpr (S::SPLIT) rf_finish_shared<S>(args, task);
    if (RF_CHECK && bad != 0) rf_report_task(args, false);
}

#endif
