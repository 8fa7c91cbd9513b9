/* The columns of a lane in a row of a small table: gradients, which may be staged in shared memory, weight,
 * state, and the step. The including file defines BLOCK and WARPS, the threads and warps of a block,
 * MOST_COLUMNS of a task, and RF_STAGED. */
#ifndef RECFUSE_CUDA_BACKWARD_COLUMNS_CUH
#define RECFUSE_CUDA_BACKWARD_COLUMNS_CUH

#include "families/fused_backward/emit.cuh"
#include "families/fused_backward/small/backward_small_args.h"
#include "gpu/device/shared.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
static_assert(RF_ALIGNED, "small features are");

enum {
    GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES,
    LANE_COLUMNS = RF_SMALL_LANE_COLUMNS(RF_STAGED),
    VECTORS = LANE_COLUMNS / 4, /* vectors of four columns per lane */
    STAGED_AT_ONCE = 2
};

/* The task of a lane. Rows count from the first row of the feature's table. */
struct place_t {
    int lanes, groups, group, lane; /* lanes: share a row */
    int column[VECTORS]; /* first of four columns in the row */
    bool valid[VECTORS]; /* the row has them */
    rf_emit_rows_t rows[VECTORS];
    rf_u8 *states; /* of row-wise Adagrad: a state per row */
    float each; /* 1 / columns of a row */
    const rf_u8 *grad[VECTORS]; /* of bag 0; a lane without columns has those of the first column */
    rf_u32 pitch; /* bytes between bags */
    const float *factors; /* a factor per bag; nullptr: all are 1 */
    rf_u32 staged[VECTORS],
        staged_pitch; /* addresses in shared memory; staged gradients include the factors */
};

RF_INLINE place_t place_of(const rf_small_args &args, const rf_small_task &task,
                           const rf_backward_matrix &matrix, const float *staged) {
    place_t place;
    int bits = 0;
    while (LANE_COLUMNS << bits < task.columns) bits++;
    place.lanes = 1 << bits;
    place.groups = BLOCK >> bits;
    place.group = (int)threadIdx.x >> bits;
    place.lane = (int)threadIdx.x & (place.lanes - 1);
    place.pitch = (rf_u32)(args.output_dim * GRAD_BYTES);
    place.factors = task.factors >= 0 ? args.factors + task.factors : nullptr;
    place.staged_pitch = task.columns * 4;
    place.states = EMIT_ROWWISE ? (rf_u8 *)(matrix.states[0] + task.row) : nullptr;
    if (EMIT_ROWWISE) rf_keep(place.states);
    place.each = 1.0f / (float)matrix.dim;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int own = 4 * (place.lane + v * place.lanes);
        const int read = own < task.columns ? own : 0;
        place.column[v] = task.column + own;
        place.valid[v] = own < task.columns;
        place.rows[v] = rf_emit_rows(matrix, task.row, place.column[v]);
        place.grad[v] = args.grad + (rf_i64)(task.output_column + task.column + read) * GRAD_BYTES;
        if (!RF_STAGED) rf_keep(place.grad[v]);
        place.staged[v] = RF_STAGED ? rf_shared_pinned(staged + read) : 0;
    }
    return place;
}

/* Stores four columns to shared memory. */
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

/* Starts copies of the task's columns of all bags into shared memory, if they need no factors. Returns true
 * if it did. */
RF_INLINE bool grad_ask(int bags, const rf_small_task &task, const place_t &place) {
    if (RF_GRAD_DTYPE != RF_FLOAT32 || place.factors != nullptr) return false;
    for (int bag = place.group; bag < bags; bag += place.groups) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (place.valid[v])
                rf_shared_copy<16>(place.staged[v] + (rf_u32)bag * place.staged_pitch,
                                   rf_place(place.grad[v], (rf_u32)bag, place.pitch));
    }
    rf_shared_copies_end();
    return true;
}

/* Copies the gradients into shared memory, times the factors. */
RF_INLINE void grad_stage(int bags, const rf_small_task &task, float *staged, const place_t &place) {
    for (int first = place.group; first < bags; first += STAGED_AT_ONCE * place.groups) {
        four_t found[STAGED_AT_ONCE][VECTORS];
#pragma unroll
        for (int k = 0; k < STAGED_AT_ONCE; k++) {
            const int bag = first + k * place.groups;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (bag < bags)
                    found[k][v] =
                        four_load<RF_GRAD_DTYPE, true>(rf_place(place.grad[v], (rf_u32)bag, place.pitch), 4);
        }
#pragma unroll
        for (int k = 0; k < STAGED_AT_ONCE; k++) {
            const int bag = first + k * place.groups;
            if (bag >= bags) continue;
            const float factor = place.factors != nullptr ? rf_load(place.factors + bag) : 1.0f;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                for (int i = 0; i < 4; i++) found[k][v].of[i] *= factor;
                if (place.valid[v])
                    sums_keep(staged + bag * task.columns + place.column[v] - task.column, found[k][v]);
            }
        }
    }
}

/* Loads four columns of a bag's gradient. */
RF_INLINE four_t grad_load(const place_t &place, rf_u32 bag, int v) {
    if (!RF_STAGED) return four_load<RF_GRAD_DTYPE, true>(rf_place(place.grad[v], bag, place.pitch), 4);
    return sums_kept(place.staged[v] + bag * place.staged_pitch);
}

/* The sums of a lane for a row. */
struct sums_t {
    four_t of[VECTORS];
};

/* Returns the addresses of a vector of a row. If a row has several values per column, not all vectors keep
 * their addresses in registers. */
RF_INLINE rf_emit_place_t row_place(const place_t &place, int number, int v) {
    if (EMIT_STATES == 0 || v == 0) return place.rows[v].place((rf_u32)number);
    return rf_emit_behind(place.rows[0].place((rf_u32)number), place.column[v] - place.column[0]);
}

/* Prefetched values of a row. */
struct row_t {
    rf_emit_ahead_t ahead[VECTORS];
    float state; /* of row-wise Adagrad */
};
/* Prefetches a row if `there`. Free of branches, so that the values stay in registers. */
RF_INLINE void row_load(const place_t &place, int number, bool there, row_t &to) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        rf_emit_load(row_place(place, number, v), place.valid[v] && there ? 4 : 0, to.ahead[v]);
    to.state = 1; /* for a missing row */
    if (EMIT_ROWWISE && there) to.state = state_read(place.states, (rf_u32)number);
}

/* The step of row-wise Adagrad for a row, by a whole warp. Returns the factor of its gradient. */
RF_INLINE float row_factor(const rf_emit_t &emit, const place_t &place, int number, bool there,
                           const row_t &read, const sums_t &sums) {
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) squares += rf_emit_squares(place.valid[v] ? 4 : 0, sums.of[v]);
#pragma unroll 1
    for (int apart = place.lanes / 2; apart > 0; apart /= 2)
        squares += __shfl_xor_sync(RF_FULL_WARP, squares, apart);
    __syncwarp(); /* all lanes have read the state */
    const float state = rf_emit_row_state(read.state, squares, place.each);
    if (there && place.lane == 0) state_write(place.states, (rf_u32)number, state);
    return rf_emit_row_factor(emit, state);
}

/* The row of a group: its number in the feature and in the matrix, and its lookups. */
struct summed_row_t {
    int number, row;
    rf_u32 lookups;
    bool there; /* the row is to be written */
};

/* Epilogue of rows, by a whole warp. */
RF_INLINE void row_emit(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                        const summed_row_t &of, row_t &read, sums_t &sums) {
    float factor = 0;
    if (!EMIT_READS && args.by_frequency) {
        const float frequency = 1.0f / (float)of.lookups;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums.of[v].of[i] *= frequency;
        }
    }
    if (EMIT_READS && !emit.plain) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) rf_emit_gradient(emit, read.ahead[v], sums.of[v]);
    }
    if (EMIT_ROWWISE) factor = row_factor(emit, place, of.number, of.there, read, sums);
    /* The values of a row are computed even if it is not written, except for expensive ones. */
    if ((RF_ROUND || EMIT_STATES > 0) && !of.there) return;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        rf_emit_store(emit, row_place(place, of.number, v), of.row, place.column[v],
                      place.valid[v] && of.there ? 4 : 0, read.ahead[v], sums.of[v], factor);
}

#endif
