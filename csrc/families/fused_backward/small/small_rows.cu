/* Sums of the rows of small features from the lists of lists.cu -> what emit.cuh makes of them. Each row that was looked up
 * is read and written once.
 *
 * A block: up to RF_SMALL_COLUMNS columns of some rows of a feature (backward_small_args.h: rf_small_task). In the backward the small
 * table is the gradient: the block copies its columns of all bags to shared memory first, times the factors of a mean, and
 * gathers from there (RF_STAGED). Batches that do not fit, and rows that must be whole (row-wise Adagrad) and are wider,
 * are gathered from L2, of up to RF_SMALL_WHOLE_COLUMNS columns.
 * What a block needs before its first row takes as long as many rows, so nothing of it waits for something else: the task says all
 * of its feature, gradients of a sum are copied asynchronously, even before the lists are there, and the first row is asked
 * for while they come.
 * A group of lanes has every so-many-th row. Staged gradients: a lane has one vector of four columns, so that neighbouring lanes
 * read whole pieces of 32 bytes of a bag's gradient, which meet in fewer banks, and of a row, and as many threads as one can have
 * (it is the data pipe of shared memory and L1 that binds). Gathered ones: two vectors, since a bag costs its number's load
 * besides. A group asks for a row's place in the list two rows ahead, for the bags of its list, weight and state one row ahead:
 * there is one wait for memory a row. Most rows have few bags, so what a row costs besides counts: bags are added four at a time
 * from a row's first one on, in the order of the list, out of a window that begins aligned and is shifted to the row's first bag.
 * Rows with more than RF_SMALL_LONG lookups are left to the end. All groups share each of them, in equal runs of the list:
 * sums of a warp's groups meet by shuffles, those of warps in their order. So each sum has one order of additions.
 *
 * A row's step needs all its columns where RF_EMIT is row-wise Adagrad: there a task has whole rows. Shared memory of several
 * blocks (a cluster) would hold the gradients of wider rows, but its blocks would wait for each other at every few rows.
 *
 * Shapes: rf_small_args. Shared memory: dynamic, 4 bytes a bag and column of the widest task; none if not RF_STAGED.
 * Launch: grid [tasks], block [RF_SMALL_THREADS].
 */
#ifndef RF_STAGED
#define RF_STAGED 1
#endif
#define RF_STREAMED 0 /* rows lie close together, and slices of them even share lines */
#include "families/fused_backward/emit.cuh"
#include "families/fused_backward/small/backward_small_args.h"

enum {
    BLOCK = RF_SMALL_THREADS(RF_STAGED, RF_EMIT),
    BLOCKS = RF_STAGED || RF_EMIT > RF_SGD + 1 || RF_ROUND ? 2 : 3, /* of an SM */
    WARPS = BLOCK / 32,
    MOST_COLUMNS = RF_STAGED ? RF_SMALL_COLUMNS : RF_SMALL_WHOLE_COLUMNS,
    QUADS = EMIT_ROWWISE || (RF_STAGED && EMIT_STATES == 0) ? 4 : 2 /* as registers last */
};
#include "families/fused_backward/small/pooled.cuh"

/* What is asked for of a row while the one before is worked on. */
RF_INLINE void row_prepare(const rows_t &rows, const place_t &place, int number, const places_t &places,
                           row_t &row, window_t &window) {
    const bool there = is_short(places);
    window = window_load(rows, places, there);
    row_load(place, number, there, row);
}

/* What is asked for before the first row: of it, and where the next one is. */
struct begin_t {
    places_t places, next;
    row_t row;
    window_t window;
};
RF_INLINE begin_t rows_begin(const place_t &place, const rows_t &rows) {
    const int number = rows.first + place.group;
    begin_t begin;
    begin.places = rows.places(number);
    begin.next = rows.places(number + place.groups);
    row_prepare(rows, place, number, begin.places, begin.row, begin.window);
    return begin;
}

/* All rows of the task that few bags look up, as many turns in each warp as its first group has. Returns whether there are
 * others. */
RF_INLINE bool rows_pool(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                         const rows_t &rows, const begin_t &begin) {
    bool any_long = false;
    int number = rows.first + place.group;
    int left =
        rows.last - (rows.first + ((int)(threadIdx.x & ~31u) / place.lanes)); /* of the warp's first group */
    places_t places = begin.places, next = begin.next;
    row_t row = begin.row;
    window_t window = begin.window;
#pragma unroll 2 /* so that what is asked for ahead stays in its registers */
    for (; left > 0; left -= place.groups) {
        const places_t later = rows.places(number + 2 * place.groups);
        row_t next_row;
        window_t next_window;
        row_prepare(rows, place, number + place.groups, next, next_row, next_window);
        const bool there = is_short(places);
        sums_t sums = {};
        places_add(rows, place, places.from, there ? lookups_of(places) : 0, window, sums);
        row_emit(args, emit, place, number, there, rows.row + number, lookups_of(places), row, sums);
        any_long |= is_long(places);
        number += place.groups;
        places = next;
        next = later;
        row = next_row;
        window = next_window;
    }
    return any_long;
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
    rf_small_rows(const __grid_constant__ rf_small_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ __align__(16) float parts[WARPS * MOST_COLUMNS];
    __shared__ rf_u32 found[WARPS];
    const rf_emit_t emit = rf_emit_of(args.emit);
    const rf_small_task task = args.tasks[blockIdx.x];
    const place_t place = place_of(args, task, args.matrices[task.matrix], (float *)memory);
    const rows_t rows = {args.starts + task.start, args.list, (int)task.row, task.first_row, task.last_row};
    /* Gradients are older than the kernel before, but for factors: lists.cu has waited before this one began. */
    const bool asked = RF_STAGED && grad_ask(args.bags, task, place);
    rf_wait_for_previous_kernel();
    if (emit.skip) {
        rf_shared_copies_wait<0>();
        return;
    }
    const begin_t begin = rows_begin(place, rows);
    if (RF_STAGED) {
        if (!asked) grad_stage(args.bags, task, (float *)memory, place);
        rf_shared_copies_wait<0>();
        __syncthreads();
    }
    const bool any_long = rows_pool(args, emit, place, rows, begin);
    if (__syncthreads_or(any_long)) rows_pool_long(args, emit, place, rows, found, parts);
}
