/* The columns of a lane in a row of a small table: gradients, which may be staged in shared memory, weight,
 * state, and the step. The including file defines BLOCK and WARPS, the threads and warps of a block,
 * MOST_COLUMNS of a task, and RF_STAGED. */
#ifndef RECFUSE_CUDA_BACKWARD_COLUMNS_CUH
#define RECFUSE_CUDA_BACKWARD_COLUMNS_CUH

#include "families/fused_backward/epilogue.cuh"
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
struct mapping_t {
    int lanes, groups, group, lane; /* lanes: share a row */
    int column[VECTORS]; /* first of four columns in the row */
    bool valid[VECTORS]; /* the row has them */
    rf_epilogue_rows_t rows[VECTORS];
    rf_u8 *states; /* of row-wise Adagrad: a state per row */
    float inverse_columns; /* 1 / columns of a row */
    const rf_u8 *grad[VECTORS]; /* of bag 0; a lane without columns has those of the first column */
    rf_u32 pitch; /* bytes between bags */
    const float *factors; /* a factor per bag; nullptr: all are 1 */
    rf_u32 staged[VECTORS],
        staged_pitch; /* addresses in shared memory; staged gradients include the factors */
};

RF_INLINE mapping_t mapping_of(const rf_small_args &args, const rf_small_task &task,
                               const rf_backward_matrix &matrix, const float *staged) {
    mapping_t mapping;
    int bits = 0;
    while (LANE_COLUMNS << bits < task.columns) bits++;
    mapping.lanes = 1 << bits;
    mapping.groups = BLOCK >> bits;
    mapping.group = (int)threadIdx.x >> bits;
    mapping.lane = (int)threadIdx.x & (mapping.lanes - 1);
    mapping.pitch = (rf_u32)(args.output_dim * GRAD_BYTES);
    mapping.factors = task.factors >= 0 ? args.factors + task.factors : nullptr;
    mapping.staged_pitch = task.columns * 4;
    mapping.states = EPILOGUE_ROWWISE ? (rf_u8 *)(matrix.states[0] + task.row) : nullptr;
    if (EPILOGUE_ROWWISE) rf_keep(mapping.states);
    mapping.inverse_columns = 1.0f / (float)matrix.dim;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int own_column = 4 * (mapping.lane + v * mapping.lanes);
        const int prefetched = own_column < task.columns ? own_column : 0;
        mapping.column[v] = task.column + own_column;
        mapping.valid[v] = own_column < task.columns;
        mapping.rows[v] = rf_epilogue_rows(matrix, task.row, mapping.column[v]);
        mapping.grad[v] = args.grad + (rf_i64)(task.output_column + task.column + prefetched) * GRAD_BYTES;
        if (!RF_STAGED) rf_keep(mapping.grad[v]);
        mapping.staged[v] = RF_STAGED ? rf_shared_pinned(staged + prefetched) : 0;
    }
    return mapping;
}

/* Stores four columns to shared memory. */
RF_INLINE void sums_store(float *to, const four_t &from) {
    *(rf_bytes<16> *)to = *(const rf_bytes<16> *)from.of;
}
RF_INLINE four_t sums_load(rf_u32 from) {
    const rf_bytes<16> loaded = rf_shared_load(from);
    four_t to;
#pragma unroll
    for (int i = 0; i < 4; i++) to.of[i] = __uint_as_float(loaded.word[i]);
    return to;
}

/* Starts copies of the task's columns of all bags into shared memory, if they need no factors. Returns true
 * if it did. */
RF_INLINE bool grad_prefetch(int bags, const rf_small_task &task, const mapping_t &mapping) {
    if (RF_GRAD_DTYPE != RF_FLOAT32 || mapping.factors != nullptr) return false;
    for (int bag = mapping.group; bag < bags; bag += mapping.groups) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (mapping.valid[v])
                rf_shared_copy<16>(mapping.staged[v] + (rf_u32)bag * mapping.staged_pitch,
                                   rf_address(mapping.grad[v], (rf_u32)bag, mapping.pitch));
    }
    rf_shared_copies_end();
    return true;
}

/* Copies the gradients into shared memory, times the factors. */
RF_INLINE void grad_stage(int bags, const rf_small_task &task, float *staged, const mapping_t &mapping) {
    for (int first = mapping.group; first < bags; first += STAGED_AT_ONCE * mapping.groups) {
        four_t loaded[STAGED_AT_ONCE][VECTORS];
#pragma unroll
        for (int k = 0; k < STAGED_AT_ONCE; k++) {
            const int bag = first + k * mapping.groups;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (bag < bags)
                    loaded[k][v] = four_load<RF_GRAD_DTYPE, true>(
                        rf_address(mapping.grad[v], (rf_u32)bag, mapping.pitch), 4);
        }
#pragma unroll
        for (int k = 0; k < STAGED_AT_ONCE; k++) {
            const int bag = first + k * mapping.groups;
            if (bag >= bags) continue;
            const float factor = mapping.factors != nullptr ? rf_load(mapping.factors + bag) : 1.0f;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                for (int i = 0; i < 4; i++) loaded[k][v].of[i] *= factor;
                if (mapping.valid[v])
                    sums_store(staged + bag * task.columns + mapping.column[v] - task.column, loaded[k][v]);
            }
        }
    }
}

/* Loads four columns of a bag's gradient. */
RF_INLINE four_t grad_load(const mapping_t &mapping, rf_u32 bag, int v) {
    if (!RF_STAGED) return four_load<RF_GRAD_DTYPE, true>(rf_address(mapping.grad[v], bag, mapping.pitch), 4);
    return sums_load(mapping.staged[v] + bag * mapping.staged_pitch);
}

/* The sums of a lane for a row. */
struct sums_t {
    four_t of[VECTORS];
};

/* Returns the addresses of a vector of a row. If a row has several values per column, not all vectors keep
 * their addresses in registers. */
RF_INLINE rf_epilogue_address_t row_place(const mapping_t &mapping, int number, int v) {
    if (EPILOGUE_STATES == 0 || v == 0) return mapping.rows[v].address((rf_u32)number);
    return rf_epilogue_offset(mapping.rows[0].address((rf_u32)number), mapping.column[v] - mapping.column[0]);
}

/* Prefetched values of a row. */
struct row_t {
    rf_epilogue_values_t values[VECTORS];
    float state; /* of row-wise Adagrad */
};
/* Prefetches a row if `is_present`. Free of branches, so that the values stay in registers. */
RF_INLINE void row_load(const mapping_t &mapping, int number, bool is_present, row_t &to) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        rf_epilogue_load(row_place(mapping, number, v), mapping.valid[v] && is_present ? 4 : 0, to.values[v]);
    to.state = 1; /* for a missing row */
    if (EPILOGUE_ROWWISE && is_present) to.state = state_read(mapping.states, (rf_u32)number);
}

/* The step of row-wise Adagrad for a row, by a whole warp. Returns the factor of its gradient. */
RF_INLINE float row_factor(const rf_epilogue_t &epilogue, const mapping_t &mapping, int number,
                           bool is_present, const row_t &prefetched, const sums_t &sums) {
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) squares += rf_epilogue_squares(mapping.valid[v] ? 4 : 0, sums.of[v]);
#pragma unroll 1
    for (int apart = mapping.lanes / 2; apart > 0; apart /= 2)
        squares += __shfl_xor_sync(RF_FULL_WARP, squares, apart);
    __syncwarp(); /* all lanes have read the state */
    const float state = rf_epilogue_row_state(prefetched.state, squares, mapping.inverse_columns);
    if (is_present && mapping.lane == 0) state_write(mapping.states, (rf_u32)number, state);
    return rf_epilogue_row_factor(epilogue, state);
}

/* The row of a group: its number in the feature and in the matrix, and its lookups. */
struct summed_row_t {
    int number, row;
    rf_u32 lookups;
    bool is_present; /* the row is to be written */
};

/* Epilogue of rows, by a whole warp. */
RF_INLINE void row_epilogue(const rf_small_args &args, const rf_epilogue_t &epilogue,
                            const mapping_t &mapping, const summed_row_t &of, row_t &prefetched,
                            sums_t &sums) {
    float factor = 0;
    if (!EPILOGUE_READS && args.by_frequency) {
        const float frequency = 1.0f / (float)of.lookups;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums.of[v].of[i] *= frequency;
        }
    }
    if (EPILOGUE_READS && !epilogue.plain) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) rf_epilogue_gradient(epilogue, prefetched.values[v], sums.of[v]);
    }
    if (EPILOGUE_ROWWISE) factor = row_factor(epilogue, mapping, of.number, of.is_present, prefetched, sums);
    /* The values of a row are computed even if it is not written, except for expensive ones. */
    if ((RF_ROUND || EPILOGUE_STATES > 0) && !of.is_present) return;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        rf_epilogue_store(epilogue, row_place(mapping, of.number, v), of.row, mapping.column[v],
                          mapping.valid[v] && of.is_present ? 4 : 0, prefetched.values[v], sums.of[v],
                          factor);
}

#endif
