/* Transposes the lookups of small features: a stable counting sort in the shared memory of a block lists, row
 * by row, the bags that looked the row up. Only the list and the begins of the rows are written to memory.
 *
 * Thread mapping. A block has the rows [first_row, last_row) of one feature (backward_small_args.h:
 * rf_small_list). It reads all lookups of the feature twice. The first pass counts them by row and part; a
 * part is a range of consecutive lookups. The prefix sums of the counts, by row and within a row by part, are
 * the positions in the list at which each part's lookups of a row begin. In the second pass a warp reads a
 * part in order, 32 lookups at once, and takes their positions from the counters. So the list is that of a
 * stable sort. It is built in shared memory and copied from there, except for the part that does not fit.
 *
 * Methods: steps.cuh; with invalid offsets, too many lookups or few rows, parts.cuh: it searches the bag of
 * each lookup, and builds the list for as many rows at a time as fit.
 * Mean: a block with first row 0 also writes 1 / counted lookups of each bag. The counts are integers, so the
 * order of atomic operations has no effect.
 *
 * A block prefetches its task, which the host has copied, before it waits for the previous kernel. It
 * prefetches no lookup: in a recomputed backward pass that kernel may write the indices and offsets.
 * (small_rows.cu may prefetch gradients, because this kernel has waited.)
 *
 * Shapes: rf_small_lists_args. Shared memory: dynamic, args.shared_bytes, RF_SMALL_LISTS_LEAST_SHARED at
 * least. Launch: grid [tasks], block [RF_SMALL_LISTS_BLOCK].
 */
#include "families/fused_backward/small/backward_small_args.h"

enum { BLOCK = RF_SMALL_LISTS_BLOCK, WARPS = BLOCK / 32 };
#include "families/fused_backward/small/step_list.cuh"

/* Lists by steps, with counters of BITS. Returns false if that is impossible. */
template <int BITS>
RF_INLINE bool list_by_steps(const rf_small_lists_args &args, const feature_t &feature, const block_t &block,
                             rf_u8 *memory, rf_u32 *of_warps, rf_u32 &lost) {
    steps_t steps;
    if (!steps_room<BITS>(feature, block, memory, args.shared_bytes, steps)) return false;
    if (threadIdx.x == 0) lost = 0;
    steps_begin(feature, steps, of_warps);
    counting_begin(feature, block);
    rf_u32 before = 0;
    const rf_u32 n_counted = block.factors != nullptr || block.first_row > 0
                                 ? steps_count<BITS, true>(feature, steps, block, before)
                                 : steps_count<BITS, false>(feature, steps, block, before);
    before = counting_end(feature, block, before, of_warps);
    const rf_u32 position = (rf_u32)feature.first + before;
    const rf_u32 counts_total = steps_sum<BITS>(steps, block, position, n_counted, of_warps, lost);
    if (counts_total == NO_POSITIONS) return false;
    steps_list<BITS>(feature, steps, block, counts_total, block.list + position);
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

/* Handles features for which counters of 8 bits fail. Loads everything again, to keep no registers. */
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
