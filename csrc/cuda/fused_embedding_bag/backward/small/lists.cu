/* Sorts the lookups of small features by row: a stable counting sort in the shared memory of a block, which lists, row after
 * row, the bags that looked the row up. Nothing but the list and where rows begin in it goes to memory.
 *
 * A block: rows [first_row, last_row) of one feature (args.h: rf_small_list). It goes through all of the feature's lookups
 * twice. First they are counted, by row and by part: a part is a run of neighbouring lookups, parts follow each other.
 * Summed up, row by row and in a row part by part, the counts say where each part's lookups of a row begin in the list.
 * (Where shared memory does not allow a part for each warp: short_rows.cuh.) Then a warp has a part and goes through it in
 * order, 32 lookups at once; their places are what counters were before. Within a step, lookups of one row and different bags must keep their order: the lanes that have the same row find each
 * other (__match_any_sync), and one of them counts for all. Lookups of one bag have no order, since the list says no more
 * than the bag: where all lanes have one bag, each counts for itself. So the list is that of a stable sort.
 * Counters have 16 bits where a feature's lookups allow it; how many parts there are is what shared memory allows.
 * The list is formed in shared memory and copied from there, by as many rows at a time as there is room for; a row that is
 * too long, and a feature with many more lookups than there is room for, is written to memory at once.
 *
 * The bag of a lookup: a bit is set where a bag begins, so that those up to a lookup count the bags (bags without lookups have
 * no bit). Where bags or lookups are too many for that, by bisection between the bags of its piece of the lookups and of
 * the next, which are marked before; where a bag's offsets are bad, between all bags, and it is asked whether the bag
 * holds the lookup.
 * Mean: a block with first row 0 also writes one over the lookups of each bag that count; integers are counted, so the
 * order of atomic operations does not matter.
 *
 * Shapes: rf_small_lists_args. Shared memory: dynamic, args.shared_bytes, RF_SMALL_LISTS_LEAST_SHARED at least.
 * Launch: grid [tasks], block [RF_SMALL_LISTS_BLOCK].
 */
#include "fused_embedding_bag/backward/small/args.h"

enum { BLOCK = RF_SMALL_LISTS_BLOCK, WARPS = BLOCK / 32 };
#include "fused_embedding_bag/backward/small/parts.cuh"

/* A counter a row. Returns whether that is done: not where many rows have many lookups. */
RF_INLINE bool list_by_rows(const feature_t &feature, const room_t &room, const block_t &block,
                            rf_u32 *of_warps, long_rows_t &many) {
    if (threadIdx.x == 0) many.count = 0;
    counting_begin(feature, room, block, of_warps);
    rf_u32 before = 0;
    if (block.factors == nullptr && block.first_row == 0 && block.rows > FEW_ROWS) {
        short_rows_count(feature, room, block.first_row, block.rows);
    } else {
        before = rows_count(feature, room, block.first_row, block.rows, (int *)block.factors);
    }
    before = counting_end(feature, block, before, of_warps);
    const rf_u32 place = (rf_u32)feature.first + before, all = rows_sum(room, block, place, of_warps, many);
    if (all == NO_PLACES) return false;
    spans_list(room, block, block.list + place, all, [&](const span_t &span, rf_u16 *to) {
        span_list(feature, room, block.first_row, span, many, to, of_warps);
    });
    return true;
}

extern "C" __global__ void __launch_bounds__(RF_SMALL_LISTS_BLOCK, RF_SMALL_LISTS_BLOCKS)
    rf_small_lists(const __grid_constant__ rf_small_lists_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ rf_u32 of_warps[WARPS];
    __shared__ long_rows_t many;
    __shared__ unsigned long long bounds[2];
    rf_wait_for_previous_kernel();
    const rf_small_list task = args.tasks[blockIdx.x];
    const feature_t feature = feature_of(args, task, bounds);
    block_t block;
    block.first_row = task.first_row;
    block.rows = task.last_row - task.first_row;
    block.is_last = task.last_row == task.rows;
    block.starts = args.starts + task.start;
    block.list = args.list;
    block.factors = task.factors >= 0 && task.first_row == 0 ? args.factors + task.factors : nullptr;
    const room_t single = room_of(feature, memory, args.shared_bytes, (int)block.rows, true);
    if (feature.sound && feature.count <= MOST_TURNS * single.window_size &&
        parts_of(feature, args.shared_bytes, (int)block.rows) < (int)WARPS &&
        list_by_rows(feature, single, block, of_warps, many))
        return;
    list_by_parts(args, feature, block, memory, of_warps);
}
