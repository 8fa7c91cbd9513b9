/* Sums of the rows of small features from the lists of lists.cu -> what emit.cuh makes of them. Each row that was looked up
 * is read and written once.
 *
 * A block: up to RF_SMALL_COLUMNS columns of some rows of a feature (args.h: rf_small_task). In the backward the small
 * table is the gradient: the block copies its columns of all bags to shared memory first, times the factors of a mean, and
 * gathers from there (RF_STAGED). Batches that do not fit, and rows that must be whole (row-wise Adagrad) and are wider,
 * are gathered from L2, of up to RF_SMALL_WHOLE_COLUMNS columns.
 * What a block needs before its first row takes as long as many rows, so nothing of it waits for something else: the task says all
 * of its feature, gradients of a sum are copied asynchronously, even before the lists are there, and the first row is asked
 * for while they come.
 * A group of lanes (an eighth of the columns) has every so-many-th row, so that a block works on neighbouring rows. It asks
 * for a row's place in the list two rows ahead, and for weight, state and the first bags of its list one row ahead: there
 * is one wait for memory a row. Most rows have few bags, so what a row costs besides counts: a lane has two vectors of four
 * columns, and bags are added four at a time from a row's first one on, in the order of the list, out of a window
 * that begins aligned and is shifted to the row's first bag. Every other group has its two vectors the other way round, so
 * that the halves of two rows are read from all banks of shared memory.
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
#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/small/args.h"

enum {
    BLOCK = RF_SMALL_THREADS(RF_STAGED, RF_EMIT),
    BLOCKS = RF_STAGED || RF_EMIT > RF_SGD + 1 || RF_ROUND ? 2 : 3, /* of an SM */
    WARPS = BLOCK / 32,
    MOST_COLUMNS = RF_STAGED ? RF_SMALL_COLUMNS : RF_SMALL_WHOLE_COLUMNS
};
#include "fused_embedding_bag/backward/small/columns.cuh"

enum {
    /* Rows, so that what is asked for ahead stays in its registers; one where they do not last. */
    UNROLLED = EMIT_STATES > 0 || (!RF_STAGED && !EMIT_ROWWISE) ? 1 : 2,
    LATER = (RF_STAGED || EMIT_ROWWISE) && !RF_ROUND, /* whether registers last for more of a list */
    AT_ONCE = 4, /* bags of a list that one load brings */
    GRADS_AT_ONCE = 2 /* bags whose gradients a lane loads at once */
};
typedef rf_bytes<2 * AT_ONCE> bags_t;

/* The bags of a row: places of the list. */
struct span_t {
    rf_u32 from, to;
};

RF_INLINE rf_u32 lookups_of(const span_t &span) { return span.to - span.from; }
RF_INLINE bool is_short(const span_t &span) { return lookups_of(span) - 1 < RF_SMALL_LONG; }
RF_INLINE bool is_long(const span_t &span) { return lookups_of(span) > RF_SMALL_LONG; }

/* Twelve bags of a list, from the last place of four or before a row's first one on. The last four are there for rows that have
 * so many bags: what is asked for while bags are added comes too late for the next four. */
struct window_t {
    bags_t now, next, later;
};
RF_INLINE const bags_t *bags_at(const rf_u16 *list, rf_u32 place) {
    return (const bags_t *)rf_place((const rf_u8 *)list, place & ~(AT_ONCE - 1u), sizeof *list);
}
RF_INLINE window_t window_load(const rf_u16 *list, const span_t &span, bool there) {
    const bags_t *const bags = bags_at(list, span.from);
    window_t window = {};
    if (there) {
        window.now = rf_load(bags);
        window.next = rf_load(bags + 1);
    }
    if (LATER && there && lookups_of(span) > AT_ONCE) window.later = rf_load(bags + 2);
    return window;
}
RF_INLINE rf_u32 bits_from(rf_u32 low, rf_u32 high, rf_u32 shift) {
    return __funnelshift_r(low, high, shift);
}

/* Adds the gradients of so many bags of the list from a place on, in their order; `window`: the first ones. */
RF_INLINE void span_add(const rf_u16 *list, const place_t &place, rf_u32 from, rf_u32 lookups,
                        window_t window, sums_t &sums) {
    const rf_u32 lead = from % AT_ONCE, shift = lead % 2 * 16;
    const bags_t *next = bags_at(list, from) + (LATER ? 3 : 2);
#pragma unroll 1
    for (int left = (int)lookups; left > 0; left -= AT_ONCE) {
        const rf_u32 low = lead < 2 ? window.now.word[0] : window.now.word[1];
        const rf_u32 middle = lead < 2 ? window.now.word[1] : window.next.word[0];
        const rf_u32 high = lead < 2 ? window.next.word[0] : window.next.word[1];
        const rf_u32 pairs[] = {bits_from(low, middle, shift), bits_from(middle, high, shift)};
        window.now = window.next;
        if (LATER) window.next = window.later;
        if (left > (LATER ? 2 : 1) * AT_ONCE) (LATER ? window.later : window.next) = rf_load(next);
        next++;
#pragma unroll
        for (int pair = 0; pair < AT_ONCE; pair += GRADS_AT_ONCE) {
            four_t found[GRADS_AT_ONCE][VECTORS];
            float factors[GRADS_AT_ONCE];
#pragma unroll
            for (int k = 0; k < GRADS_AT_ONCE; k++) {
                const rf_u32 bag = pairs[(pair + k) / 2] >> (pair + k) % 2 * 16 & 0xffffu;
                factors[k] = 1.0f;
                if (pair + k >= left) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) found[k][v] = grad_load(place, bag, v);
                if (!RF_STAGED && place.factors != nullptr) factors[k] = rf_load(place.factors + bag);
            }
#pragma unroll
            for (int k = 0; k < GRADS_AT_ONCE; k++) {
                if (pair + k >= left) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    float *const to = sums.of[v].of;
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        to[i] = RF_STAGED ? to[i] + found[k][v].of[i]
                                          : fmaf(factors[k], found[k][v].of[i], to[i]);
                }
            }
        }
    }
}

/* What a block has of a task. */
struct rows_t {
    const rf_u32 *starts; /* of the feature's row 0 */
    const rf_u16 *list; /* of all features; starts are places in it */
    int row; /* where its table begins in the matrix */
    int first, last;

    RF_INLINE span_t span(int number) const {
        const rf_u32 *const at =
            (const rf_u32 *)rf_place((const rf_u8 *)starts, (rf_u32)number, sizeof *starts);
        span_t found = {0, 0};
        if (number < last) found = {rf_load(at), rf_load(at + 1)};
        return found;
    }
};
/* What is asked for of a row while the one before is worked on. */
RF_INLINE void row_prepare(const rows_t &rows, const place_t &place, int number, const span_t &span,
                           row_t &row, window_t &window) {
    const bool there = is_short(span);
    window = window_load(rows.list, span, there);
    row_load(place, number, there, row);
}

/* What is asked for before the first row: of it, and where the next one is. */
struct begin_t {
    span_t span, next;
    row_t row;
    window_t window;
};
RF_INLINE begin_t rows_begin(const place_t &place, const rows_t &rows) {
    const int number = rows.first + place.group;
    begin_t begin;
    begin.span = rows.span(number);
    begin.next = rows.span(number + place.groups);
    row_prepare(rows, place, number, begin.span, begin.row, begin.window);
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
    span_t span = begin.span, next = begin.next;
    row_t row = begin.row;
    window_t window = begin.window;
#pragma unroll UNROLLED
    for (; left > 0; left -= place.groups) {
        const span_t later = rows.span(number + 2 * place.groups);
        row_t next_row;
        window_t next_window;
        row_prepare(rows, place, number + place.groups, next, next_row, next_window);
        const bool there = is_short(span);
        sums_t sums = {};
        span_add(rows.list, place, span.from, there ? lookups_of(span) : 0, window, sums);
        row_emit(args, emit, place, number, there, rows.row + number, lookups_of(span), row, sums);
        any_long |= is_long(span);
        number += place.groups;
        span = next;
        next = later;
        row = next_row;
        window = next_window;
    }
    return any_long;
}

/* One row, by the whole block. `parts`: [WARPS][columns]. */
RF_INLINE void row_pool_long(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                             const rows_t &rows, int number, float *parts) {
    const int warp = threadIdx.x / 32;
    const span_t span = rows.span(number);
    const rf_u32 lookups = span.to - span.from;
    const rf_u32 share = (lookups + place.groups * AT_ONCE - 1) / (place.groups * AT_ONCE) * AT_ONCE;
    span_t own;
    own.from = min(span.from + place.group * share, span.to);
    own.to = min(own.from + share, span.to);
    row_t row;
    row_load(place, number, place.group == 0, row);
    sums_t sums = {};
    span_add(rows.list, place, own.from, lookups_of(own), window_load(rows.list, own, own.from < own.to),
             sums);
    /* By column from here on: neighbouring groups have their vectors the other way round. */
    sums_t columns;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            columns.of[v].of[i] = place.turned ? sums.of[v ^ 1].of[i] : sums.of[v].of[i];
    }
    __syncwarp();
    for (int apart = place.lanes; apart < 32; apart *= 2) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                columns.of[v].of[i] += __shfl_xor_sync(RF_FULL_WARP, columns.of[v].of[i], apart);
        }
    }
    if (threadIdx.x % 32 < (rf_u32)place.lanes) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            sums_keep(parts + 4 * ((warp * VECTORS + v) * place.lanes + place.lane), columns.of[v]);
    }
    __syncthreads();
    if (place.group == 0) {
        for (int other = 1; other < WARPS; other++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const float *from = parts + 4 * ((other * VECTORS + v) * place.lanes + place.lane);
                const four_t part = sums_kept(rf_shared_kept(from));
#pragma unroll
                for (int i = 0; i < 4; i++) columns.of[v].of[i] += part.of[i];
            }
        }
    }
    if (threadIdx.x < 32)
        row_emit(args, emit, place, number, place.group == 0, rows.row + number, lookups, row, columns);
    __syncthreads();
}

RF_INLINE void rows_pool_long(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                              const rows_t &rows, rf_u32 *found, float *parts) {
    for (int first = rows.first; first < rows.last; first += BLOCK) {
        const span_t span = rows.span(first + threadIdx.x);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, is_long(span));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = all;
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) {
            for (rf_u32 left = found[warp]; left != 0; left &= left - 1)
                row_pool_long(args, emit, place, rows, first + warp * 32 + __ffs(left) - 1, parts);
        }
        __syncthreads();
    }
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
    /* Not meanwhile where registers do not last for both. */
    const bool late = RF_STAGED && (RF_ROUND || RF_GRAD_DTYPE != RF_FLOAT32);
    begin_t begin;
    if (!late) begin = rows_begin(place, rows);
    if (RF_STAGED) {
        if (!asked) grad_stage(args.bags, task, (float *)memory, place);
        rf_shared_copies_wait<0>();
        __syncthreads();
    }
    if (late) begin = rows_begin(place, rows);
    const bool any_long = rows_pool(args, emit, place, rows, begin);
    if (__syncthreads_or(any_long)) rows_pool_long(args, emit, place, rows, found, parts);
}
