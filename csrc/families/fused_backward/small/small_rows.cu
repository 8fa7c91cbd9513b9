/* Sums the rows of small features from the lists of lists.cu and passes the sums to the epilogue (epilogue.cuh).
 * Each row that was looked up is read and written once.
 *
 * Thread mapping. A block has up to RF_SMALL_COLUMNS columns of some rows of a feature
 * (backward_small_args.h: rf_small_task). It copies its columns of the gradients of all bags into shared
 * memory, times the factors of a mean, and gathers from there (RF_STAGED). It gathers from L2 if the batch
 * does not fit, or if rows must be whole (row-wise Adagrad) and are wider: up to RF_SMALL_WHOLE_COLUMNS
 * columns.
 * The start of a block takes as long as many rows, so its loads are independent: the task describes its
 * feature completely, the gradients of a sum are copied asynchronously before the lists exist, and the first
 * row is prefetched meanwhile. Each group of lanes has every n-th row. With staged gradients, a lane has one
 * vector of four columns: adjacent lanes then read segments of 32 bytes of a bag's gradient, with fewer bank
 * conflicts, and of a row; and a block has as many threads as possible, because the data pipe of shared
 * memory and L1 is the bound. With gathered gradients a lane has two vectors, because each bag also costs the
 * load of its number. A group loads the position of a row in the list two rows early, and the bags of its
 * list, its weight and its state one row early: it waits for memory once a row. Most rows have few bags, so
 * the fixed cost of a row counts: bags are added four at a time from a row's first bag on, in the order of
 * the list, out of a window that is loaded aligned and shifted to the first bag.
 * Rows with more than RF_SMALL_LONG lookups come last. All groups share each of them, in equal ranges of the
 * list: the sums of a warp's groups are reduced by shuffles, those of warps in their order. So each sum has a
 * fixed order of additions.
 *
 * The step of row-wise Adagrad needs all columns of a row: its tasks have whole rows. The distributed shared
 * memory of a cluster could hold the gradients of wider rows, but its blocks would have to synchronise every
 * few rows.
 *
 * Shapes: rf_small_args. Shared memory: dynamic, 4 bytes a bag and column of the widest task; none if not
 * RF_STAGED. Launch: grid [tasks], block [RF_SMALL_THREADS].
 */
#ifndef RF_STAGED
#define RF_STAGED 1
#endif
#define RF_STREAMED 0 /* rows are adjacent, and slices of them even share lines */
#include "families/fused_backward/epilogue.cuh"
#include "families/fused_backward/small/backward_small_args.h"

enum {
    BLOCK = RF_SMALL_THREADS(RF_STAGED, RF_EPILOGUE),
    BLOCKS = RF_STAGED || EPILOGUE_STATES > 0 || EPILOGUE_ROWWISE || RF_ROUND ? 2 : 3, /* per SM */
    WARPS = BLOCK / 32,
    MOST_COLUMNS = RF_STAGED ? RF_SMALL_COLUMNS : RF_SMALL_WHOLE_COLUMNS,
    QUADS = EPILOGUE_ROWWISE || (RF_STAGED && EPILOGUE_STATES == 0) ? 4 : 2 /* limited by registers */
};
#include "families/fused_backward/small/pooled.cuh"

/* The prefetched data of a row. */
RF_INLINE void row_prepare(const rows_t &rows, const mapping_t &mapping, int number, const range_t &range,
                           row_t &row, window_t &window) {
    const bool is_present = is_short(range);
    window = window_load(rows, range, is_present);
    row_load(mapping, number, is_present, row);
}

/* The loads before the first row: its data, and the position of the next row. */
struct begin_t {
    range_t range, next;
    row_t row;
    window_t window;
};
RF_INLINE begin_t rows_begin(const mapping_t &mapping, const rows_t &rows) {
    const int number = rows.first + mapping.group;
    begin_t begin;
    begin.range = rows.range(number);
    begin.next = rows.range(number + mapping.groups);
    row_prepare(rows, mapping, number, begin.range, begin.row, begin.window);
    return begin;
}

/* Sums all rows of the task that few bags look up; each warp takes as many turns as its first group has rows.
 * Returns true if there are other rows. */
RF_INLINE bool rows_pool(const rf_small_args &args, const rf_epilogue_t &epilogue, const mapping_t &mapping,
                         const rows_t &rows, const begin_t &begin) {
    bool any_long = false;
    int number = rows.first + mapping.group;
    int remaining = rows.last - (rows.first +
                                 ((int)(threadIdx.x & ~31u) / mapping.lanes)); /* of the warp's first group */
    range_t range = begin.range, next = begin.next;
    row_t row = begin.row;
    window_t window = begin.window;
#pragma unroll 2 /* keeps prefetched values in registers */
    for (; remaining > 0; remaining -= mapping.groups) {
        const range_t after_next = rows.range(number + 2 * mapping.groups);
        row_t next_row;
        window_t next_window;
        row_prepare(rows, mapping, number + mapping.groups, next, next_row, next_window);
        const bool is_present = is_short(range);
        sums_t sums = {};
        range_add(rows, mapping, range.from, is_present ? lookups_of(range) : 0, window, sums);
        row_epilogue(args, epilogue, mapping, {number, rows.row + number, lookups_of(range), is_present}, row,
                     sums);
        any_long |= is_long(range);
        number += mapping.groups;
        range = next;
        next = after_next;
        row = next_row;
        window = next_window;
    }
    return any_long;
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
    rf_small_rows(const __grid_constant__ rf_small_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ __align__(16) float partials[WARPS * MOST_COLUMNS];
    __shared__ rf_u32 long_rows[WARPS];
    const rf_epilogue_t epilogue = rf_epilogue_of(args.epilogue);
    const rf_small_task task = args.tasks[blockIdx.x];
    const mapping_t mapping = mapping_of(args, task, args.matrices[task.matrix], (float *)memory);
    const rows_t rows = {args.starts + task.start, args.list, (int)task.row, task.first_row, task.last_row};
    /* Gradients are older than the previous kernel, but factors are not: lists.cu has waited before this
     * kernel began. */
    const bool is_prefetched = RF_STAGED && grad_prefetch(args.bags, task, mapping);
    rf_wait_for_previous_kernel();
    if (epilogue.skip) {
        rf_shared_copies_wait<0>();
        return;
    }
    const begin_t begin = rows_begin(mapping, rows);
    if (RF_STAGED) {
        if (!is_prefetched) grad_stage(args.bags, task, (float *)memory, mapping);
        rf_shared_copies_wait<0>();
        __syncthreads();
    }
    const bool any_long = rows_pool(args, epilogue, mapping, rows, begin);
    if (__syncthreads_or(any_long)) rows_pool_long(args, epilogue, mapping, rows, long_rows, partials);
}
