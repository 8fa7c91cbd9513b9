/* Sums of the rows of small features from the lists of lists.cu -> what emit.cuh makes of them. Each row that was looked up
 * is read and written once.
 *
 * A block: up to RF_SMALL_COLUMNS columns of some rows of a feature (args.h: rf_small_task). In the backward the small
 * table is the gradient: the block copies its columns of all bags to shared memory first, times the factors of a mean, and
 * gathers from there (RF_STAGED). Batches that do not fit, and rows that must be whole (row-wise Adagrad) and are wider,
 * are gathered from L2, of up to RF_SMALL_WHOLE_COLUMNS columns.
 * A group of lanes (a quarter of the columns) has every so-many-th row, so that a block works on neighbouring rows. It asks
 * for a row's place in the list two rows ahead, and for weight, state and the first bags of its list one row ahead: there
 * is one wait for memory a row. Bags are loaded eight at a time, as they lie aligned, and added in the order of the list.
 * Rows with more than RF_SMALL_LONG lookups are left to the end. All groups share each of them, in equal runs of the list:
 * sums of a warp's groups meet by shuffles, those of warps in their order. So each sum has one order of additions.
 *
 * A row's step needs all its columns where RF_EMIT is row-wise Adagrad: there a task has whole rows. Shared memory of several
 * blocks (a cluster) would hold the gradients of wider rows, but its blocks would wait for each other at every few rows.
 *
 * Shapes: rf_small_args. Shared memory: dynamic, 4 bytes a bag and column of the widest task; none if not RF_STAGED.
 * Launch: grid [tasks], block [RF_SMALL_THREADS].
 */
#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/small/args.h"
#include "device/shared.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
#ifndef RF_STAGED
#define RF_STAGED 1
#endif
static_assert(RF_ALIGNED, "small features are");

enum {
    BLOCK = RF_SMALL_THREADS(RF_STAGED, RF_EMIT),
    BLOCKS = RF_STAGED || RF_EMIT == RF_ADAM + 1 ? 2 : 3, /* of an SM */
    WARPS = BLOCK / 32,
    GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES,
    MOST_COLUMNS = RF_STAGED ? RF_SMALL_COLUMNS : RF_SMALL_WHOLE_COLUMNS,
    BAGS = 8, /* of a list that one load brings */
    AT_ONCE = 4 /* gradients that a lane loads at once */
};
typedef rf_bytes<16> bags_t;

/* What a lane has of a task. */
struct place_t {
    int lanes, groups, group, lane; /* that share a row */
    rf_u32 mask; /* of the group's lanes in its warp */
    int column; /* of the row, the first of four */
    int valid; /* columns: 4 or 0 */
    const rf_u8 *grad; /* of bag 0 */
    rf_i64 pitch; /* bytes from bag to bag */
    const float *factors; /* of bags; nullptr: all 1 */
    rf_u32 staged, staged_pitch; /* the same in shared memory, multiplied by factors */
};

RF_INLINE place_t place_of(const rf_small_args &args, const rf_small_feature &feature,
                           const rf_small_task &task) {
    place_t place;
    place.lanes = 1;
    while (4 * place.lanes < task.columns) place.lanes *= 2;
    place.groups = BLOCK / place.lanes;
    place.group = (int)threadIdx.x / place.lanes;
    place.lane = (int)threadIdx.x % place.lanes;
    place.mask = (place.lanes == 32 ? RF_FULL_WARP : (1u << place.lanes) - 1)
                 << (threadIdx.x % 32 - place.lane);
    place.column = task.column + 4 * place.lane;
    place.valid = 4 * place.lane < task.columns ? 4 : 0;
    place.grad = args.grad + (rf_i64)(feature.output_column + place.column) * GRAD_BYTES;
    place.pitch = args.output_dim * GRAD_BYTES;
    place.factors = feature.factors >= 0 ? args.factors + feature.factors : nullptr;
    return place;
}

/* Four columns in shared memory. */
RF_INLINE void sums_keep(float *to, const four_t &from) {
    *(rf_bytes<16> *)to = *(const rf_bytes<16> *)from.of;
}
RF_INLINE four_t sums_kept(rf_u32 from) {
    const rf_bytes<16> found = rf_shared_load(from);
    four_t to;
#pragma unroll
    for (int i = 0; i < 4; i++) to.of[i] = __uint_as_float(found.word[i]);
    return to;
}

/* Copies the task's columns of all bags to shared memory. */
RF_INLINE void grad_stage(int bags, int columns, float *staged, place_t &place) {
    for (int first = place.group; first < bags; first += AT_ONCE * place.groups) {
        four_t found[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int bag = first + k * place.groups;
            if (bag < bags)
                found[k] = four_load<RF_GRAD_DTYPE, true>(place.grad + bag * place.pitch, place.valid);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int bag = first + k * place.groups;
            if (bag >= bags || place.valid == 0) continue;
            const float factor = place.factors != nullptr ? rf_load(place.factors + bag) : 1.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) found[k].of[i] *= factor;
            sums_keep(staged + bag * columns + 4 * place.lane, found[k]);
        }
    }
    place.staged = rf_shared_kept(staged + 4 * place.lane);
    place.staged_pitch = columns * 4;
}

/* Four columns of a bag's gradient. */
RF_INLINE four_t grad_load(const place_t &place, rf_u32 bag) {
    if (!RF_STAGED) return four_load<RF_GRAD_DTYPE, true>(place.grad + (rf_i64)bag * place.pitch, 4);
    return sums_kept(place.staged + bag * place.staged_pitch);
}

/* The bags of a row: places of the list. */
struct span_t {
    rf_u32 from, to;
};
RF_INLINE bags_t bags_load(const rf_u16 *list, rf_u32 place) {
    return rf_load((const bags_t *)(list + place / BAGS * BAGS));
}

/* Adds the gradients of the bags of a span in their order; `bags`: the first of them, with those aligned alike. */
RF_INLINE void span_add(const rf_u16 *list, const place_t &place, const span_t &span, bags_t bags,
                        four_t &sums) {
    if (place.valid == 0) return;
    for (rf_u32 at = span.from / BAGS * BAGS; at < span.to; at += BAGS) {
        const bags_t now = bags;
        if (at + BAGS < span.to) bags = bags_load(list, at + BAGS);
#pragma unroll
        for (int first = 0; first < BAGS; first += AT_ONCE) {
            four_t found[AT_ONCE];
            float factors[AT_ONCE];
            bool there[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const int i = first + k;
                const rf_u32 bag = now.word[i / 2] >> i % 2 * 16 & 0xffffu;
                there[k] = at + i - span.from < span.to - span.from;
                factors[k] = 1.0f;
                if (there[k]) {
                    found[k] = grad_load(place, bag);
                    if (!RF_STAGED && place.factors != nullptr) factors[k] = rf_load(place.factors + bag);
                }
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (!there[k]) continue;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums.of[i] = RF_STAGED ? sums.of[i] + found[k].of[i]
                                           : fmaf(factors[k], found[k].of[i], sums.of[i]);
            }
        }
    }
}

/* What is read of a row early. */
struct row_t {
    rf_emit_ahead_t ahead;
    float state; /* of row-wise Adagrad */
};
RF_INLINE void row_load(const rf_backward_matrix &matrix, const place_t &place, rf_i64 row, row_t &to) {
    rf_emit_load(matrix, row, place.column, place.valid, to.ahead);
    if (EMIT_ROWWISE) to.state = matrix.states[0][row];
}

/* A row's sums become what the launch is for, by a group. */
RF_INLINE void row_emit(const rf_small_args &args, const rf_emit_t &emit, const rf_backward_matrix &matrix,
                        const place_t &place, rf_i64 number, rf_u32 lookups, row_t &row, four_t &sums) {
    if (args.by_frequency) {
        const float frequency = 1.0f / (float)lookups;
#pragma unroll
        for (int i = 0; i < 4; i++) sums.of[i] *= frequency;
    }
    float squares = rf_emit_gradient(emit, row.ahead, place.valid, sums), factor = 0;
    if (EMIT_ROWWISE) {
        for (int apart = place.lanes / 2; apart > 0; apart /= 2)
            squares += __shfl_xor_sync(place.mask, squares, apart);
        __syncwarp(place.mask); /* all have read the state */
        factor = rf_emit_row_factor(emit, matrix, number, row.state, squares, place.lane == 0);
    }
    if (place.valid > 0)
        rf_emit_store(emit, matrix, number, place.column, place.valid, row.ahead, sums, factor);
}

/* What a block has of a task. */
struct rows_t {
    const rf_u32 *starts; /* of the feature's row 0 */
    const rf_u16 *list; /* of all features; starts are places in it */
    rf_i64 row; /* where its table begins in the matrix */
    int first, last;

    RF_INLINE span_t span(int number) const {
        span_t found = {0, 0};
        if (number < last) found = {rf_load(starts + number), rf_load(starts + number + 1)};
        return found;
    }
};
RF_INLINE bool is_short(const span_t &span) { return span.to - span.from - 1 < RF_SMALL_LONG; }

/* What is asked for of a row while the one before is worked on. */
RF_INLINE void row_prepare(const rows_t &rows, const rf_backward_matrix &matrix, const place_t &place,
                           int number, const span_t &span, row_t &row, bags_t &bags) {
    if (!is_short(span)) return;
    bags = bags_load(rows.list, span.from);
    row_load(matrix, place, rows.row + number, row);
}

/* All rows of the task that few bags look up. Returns whether there are others. */
RF_INLINE bool rows_pool(const rf_small_args &args, const rf_emit_t &emit, const rf_backward_matrix &matrix,
                         const place_t &place, const rows_t &rows) {
    bool any_long = false;
    int number = rows.first + place.group;
    span_t span = rows.span(number), next = rows.span(number + place.groups);
    row_t row;
    bags_t bags;
    row_prepare(rows, matrix, place, number, span, row, bags);
#pragma unroll 1
    for (; number < rows.last; number += place.groups) {
        const span_t later = rows.span(number + 2 * place.groups);
        row_t next_row;
        bags_t next_bags;
        row_prepare(rows, matrix, place, number + place.groups, next, next_row, next_bags);
        if (is_short(span)) {
            four_t sums = {};
            span_add(rows.list, place, span, bags, sums);
            row_emit(args, emit, matrix, place, rows.row + number, span.to - span.from, row, sums);
        } else {
            any_long |= span.to != span.from;
        }
        span = next;
        next = later;
        row = next_row;
        bags = next_bags;
    }
    return any_long;
}

/* One row, by the whole block. `parts`: [WARPS][columns]. */
RF_INLINE void row_pool_long(const rf_small_args &args, const rf_emit_t &emit,
                             const rf_backward_matrix &matrix, const place_t &place, const rows_t &rows,
                             int number, float *parts) {
    const int warp = threadIdx.x / 32;
    const span_t span = rows.span(number);
    const rf_u32 lookups = span.to - span.from;
    const rf_u32 share = (lookups + place.groups * BAGS - 1) / (place.groups * BAGS) * BAGS;
    span_t own;
    own.from = min(span.from + place.group * share, span.to);
    own.to = min(own.from + share, span.to);
    row_t row;
    if (place.group == 0) row_load(matrix, place, rows.row + number, row);
    four_t sums = {};
    if (own.from < own.to) span_add(rows.list, place, own, bags_load(rows.list, own.from), sums);
    __syncwarp();
    for (int apart = place.lanes; apart < 32; apart *= 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums.of[i] += __shfl_xor_sync(RF_FULL_WARP, sums.of[i], apart);
    }
    if (threadIdx.x % 32 < (rf_u32)place.lanes)
        sums_keep(parts + 4 * (warp * place.lanes + place.lane), sums);
    __syncthreads();
    if (place.group == 0) {
        for (int other = 1; other < WARPS; other++) {
            const four_t part = sums_kept(rf_shared_kept(parts + 4 * (other * place.lanes + place.lane)));
#pragma unroll
            for (int i = 0; i < 4; i++) sums.of[i] += part.of[i];
        }
        row_emit(args, emit, matrix, place, rows.row + number, lookups, row, sums);
    }
    __syncthreads();
}

RF_INLINE void rows_pool_long(const rf_small_args &args, const rf_emit_t &emit,
                              const rf_backward_matrix &matrix, const place_t &place, const rows_t &rows,
                              rf_u32 *found, float *parts) {
    for (int first = rows.first; first < rows.last; first += BLOCK) {
        const span_t span = rows.span(first + threadIdx.x);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, span.to != span.from && !is_short(span));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = all;
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) {
            for (rf_u32 left = found[warp]; left != 0; left &= left - 1)
                row_pool_long(args, emit, matrix, place, rows, first + warp * 32 + __ffs(left) - 1, parts);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
    rf_small_rows(const __grid_constant__ rf_small_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ __align__(16) float parts[WARPS * MOST_COLUMNS];
    __shared__ rf_u32 found[WARPS];
    rf_wait_for_previous_kernel();
    const rf_emit_t emit = rf_emit_of(args.emit);
    if (emit.skip) return;
    const rf_small_task task = args.tasks[blockIdx.x];
    const rf_small_feature feature = args.features[task.feature];
    const rf_backward_matrix &matrix = args.matrices[feature.matrix];
    place_t place = place_of(args, feature, task);
    const rows_t rows = {args.starts + feature.start, args.list, feature.row, task.first_row, task.last_row};
    if (RF_STAGED) {
        grad_stage(args.bags, task.columns, (float *)memory, place);
        __syncthreads();
    }
    const bool any_long = rows_pool(args, emit, matrix, place, rows);
    if (__syncthreads_or(any_long)) rows_pool_long(args, emit, matrix, place, rows, found, parts);
}
