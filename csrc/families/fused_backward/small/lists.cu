/* Sorts the lookups of small features by row: a stable counting sort in the shared memory of a block, which lists, row after
 * row, the bags that looked the row up. Nothing but the list and where rows begin in it goes to memory.
 *
 * A block: rows [first_row, last_row) of one feature (backward_small_args.h: rf_small_list). It goes through all of the feature's lookups
 * twice. First they are counted, by row and by part: a part is a run of neighbouring lookups, parts follow each other.
 * Summed up, row by row and in a row part by part, the counts say where each part's lookups of a row begin in the list. Then a
 * warp has a part and goes through it in order, 32 lookups at once; their places are what counters were before. So the list is
 * that of a stable sort. The list is formed in shared memory and copied from there, but for what there is no room for.
 *
 * How: steps.cuh. Where bags' offsets are bad, lookups are too many for it, or rows few, parts.cuh: there a lookup's bag is
 * searched for, and a list is formed by as many rows at a time as there is room for.
 * Mean: a block with first row 0 also writes one over the lookups of each bag that count; integers are counted, so the
 * order of atomic operations does not matter.
 *
 * A block asks for its task, which the host has copied, before it waits for the kernel before, but for no lookup: what an index
 * or an offset is may be what that kernel writes, where a backward pass computes them anew. (small_rows.cu reads gradients as early,
 * since this one has waited.)
 *
 * Shapes: rf_small_lists_args. Shared memory: dynamic, args.shared_bytes, RF_SMALL_LISTS_LEAST_SHARED at least.
 * Launch: grid [tasks], block [RF_SMALL_LISTS_BLOCK].
 */
#include "families/fused_backward/small/backward_small_args.h"

enum { BLOCK = RF_SMALL_LISTS_BLOCK, WARPS = BLOCK / 32 };
#include "families/fused_backward/small/step_list.cuh"

/* By steps, with counters of BITS. Returns whether that is done. */
template <int BITS>
RF_INLINE bool list_by_steps(const rf_small_lists_args &args, const feature_t &feature, const block_t &block,
                             rf_u8 *memory, rf_u32 *of_warps, rf_u32 &lost) {
    steps_t steps;
    if (!steps_room<BITS>(feature, block, memory, args.shared_bytes, steps)) return false;
    if (threadIdx.x == 0) lost = 0;
    steps_begin(feature, steps, of_warps);
    counting_begin(feature, block);
    rf_u32 before = 0;
    const rf_u32 seen = block.factors != nullptr || block.first_row > 0
                            ? steps_count<BITS, true>(feature, steps, block, before)
                            : steps_count<BITS, false>(feature, steps, block, before);
    before = counting_end(feature, block, before, of_warps);
    const rf_u32 place = (rf_u32)feature.first + before;
    const rf_u32 all = steps_sum<BITS>(steps, block, place, seen, of_warps, lost);
    if (all == NO_PLACES) return false;
    steps_list<BITS>(feature, steps, block, all, block.list + place);
    return true;
}

RF_INLINE block_t block_of(const rf_small_lists_args &args, const rf_small_list &task) {
    block_t block;
    block.first_row = task.first_row;
    block.rows = task.last_row - task.first_row;
    block.is_last = task.last_row == task.rows;
    block.starts = args.starts + task.start;
    block.list = args.list;
    block.factors = task.factors >= 0 && task.first_row == 0 ? args.factors + task.factors : nullptr;
    return block;
}

/* What counters of 8 bits do not do. Asks for all again, so that registers need not keep it. */
RF_APART void list_others(const rf_small_lists_args &args, rf_u8 *memory, unsigned long long *bounds,
                          rf_u32 *of_warps, rf_u32 &lost) {
    const rf_small_list task = args.tasks[blockIdx.x];
    const feature_t feature = feature_of(args, task, bounds);
    const block_t block = block_of(args, task);
    if (is_for_steps(feature) && list_by_steps<16>(args, feature, block, memory, of_warps, lost)) return;
    list_by_parts(args, feature, block, memory, of_warps);
}

extern "C" __global__ void __launch_bounds__(RF_SMALL_LISTS_BLOCK, RF_SMALL_LISTS_BLOCKS)
    rf_small_lists(const __grid_constant__ rf_small_lists_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ rf_u32 of_warps[WARPS];
    __shared__ unsigned long long bounds[2];
    __shared__ rf_u32 lost;
    const rf_small_list task = args.tasks[blockIdx.x];
    rf_wait_for_previous_kernel();
    const feature_t feature = feature_of(args, task, bounds);
    indices_prefetch(feature);
    if (is_for_steps(feature) && feature.count <= MOST_AVERAGE * feature.rows &&
        list_by_steps<8>(args, feature, block_of(args, task), memory, of_warps, lost))
        return;
    list_others(args, memory, bounds, of_warps, lost);
}
