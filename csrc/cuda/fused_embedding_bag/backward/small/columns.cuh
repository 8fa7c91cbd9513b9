/* What a lane has of a row of a small table: its columns' gradients, which the block may have in shared memory, weight, state,
 * and the step. Who includes this says BLOCK and WARPS, the threads and warps of a block, and RF_STAGED. */
#ifndef RECFUSE_CUDA_BACKWARD_COLUMNS_CUH
#define RECFUSE_CUDA_BACKWARD_COLUMNS_CUH

#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/small/args.h"
#include "device/shared.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
static_assert(RF_ALIGNED, "small features are");

enum {
    GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES,
    VECTORS = RF_SMALL_LANE_COLUMNS / 4, /* of four columns, a lane */
    STAGED_AT_ONCE = 2
};

/* What a lane has of a task. */
struct place_t {
    int lanes, groups, group, lane; /* that share a row */
    rf_u32 mask; /* of the group's lanes in its warp */
    int turned; /* 1: its two vectors are the other way round */
    int column[VECTORS]; /* of the row, the first of four */
    int valid[VECTORS]; /* columns: 4 or 0; one vector at least has some */
    const rf_u8 *grad[VECTORS]; /* of bag 0; where there are none those of the other vector */
    rf_i64 pitch; /* bytes from bag to bag */
    const float *factors; /* of bags; nullptr: all 1 */
    rf_u32 staged[VECTORS], staged_pitch; /* the same in shared memory, multiplied by factors */
};

RF_INLINE place_t place_of(const rf_small_args &args, const rf_small_task &task, const float *staged) {
    place_t place;
    place.lanes = 1;
    while (RF_SMALL_LANE_COLUMNS * place.lanes < task.columns) place.lanes *= 2;
    place.groups = BLOCK / place.lanes;
    place.group = (int)threadIdx.x / place.lanes;
    place.lane = (int)threadIdx.x % place.lanes;
    place.mask = (place.lanes == 32 ? RF_FULL_WARP : (1u << place.lanes) - 1)
                 << (threadIdx.x % 32 - place.lane);
    place.turned = place.group & 1;
    place.pitch = args.output_dim * GRAD_BYTES;
    place.factors = task.factors >= 0 ? args.factors + task.factors : nullptr;
    place.staged_pitch = task.columns * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int own = 4 * (place.lane + (v ^ place.turned) * place.lanes);
        const int read = own < task.columns ? own : 4 * place.lane;
        place.column[v] = task.column + own;
        place.valid[v] = own < task.columns ? 4 : 0;
        place.grad[v] = args.grad + (rf_i64)(task.output_column + task.column + read) * GRAD_BYTES;
        place.staged[v] = RF_STAGED ? rf_shared_kept(staged + read) : 0;
    }
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

/* Asks for the task's columns of all bags, into shared memory, where they are what is summed up. Returns whether they are. */
RF_INLINE bool grad_ask(int bags, const rf_small_task &task, const place_t &place) {
    if (RF_GRAD_DTYPE != RF_FLOAT32 || place.factors != nullptr) return false;
    for (int bag = place.group; bag < bags; bag += place.groups) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (place.valid[v] > 0)
                rf_shared_copy<16>(place.staged[v] + (rf_u32)bag * place.staged_pitch,
                                   place.grad[v] + bag * place.pitch);
    }
    rf_shared_copies_end();
    return true;
}

/* Copies them there, times factors. */
RF_INLINE void grad_stage(int bags, const rf_small_task &task, float *staged, const place_t &place) {
    for (int first = place.group; first < bags; first += STAGED_AT_ONCE * place.groups) {
        four_t found[STAGED_AT_ONCE][VECTORS];
#pragma unroll
        for (int k = 0; k < STAGED_AT_ONCE; k++) {
            const int bag = first + k * place.groups;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (bag < bags)
                    found[k][v] = four_load<RF_GRAD_DTYPE, true>(place.grad[v] + bag * place.pitch, 4);
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
                if (place.valid[v] > 0)
                    sums_keep(staged + bag * task.columns + place.column[v] - task.column, found[k][v]);
            }
        }
    }
}

/* Four columns of a bag's gradient. */
RF_INLINE four_t grad_load(const place_t &place, rf_u32 bag, int v) {
    if (!RF_STAGED) return four_load<RF_GRAD_DTYPE, true>(place.grad[v] + (rf_i64)bag * place.pitch, 4);
    return sums_kept(place.staged[v] + bag * place.staged_pitch);
}

/* A row's sums of a lane. */
struct sums_t {
    four_t of[VECTORS];
};

/* What is read of a row early; `element`: where the row begins in the matrix. */
struct row_t {
    rf_emit_ahead_t ahead[VECTORS];
    float state; /* of row-wise Adagrad */
};
RF_INLINE void row_load(const rf_backward_matrix &matrix, const place_t &place, rf_i64 number, rf_i64 element,
                        row_t &to) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        rf_emit_load_at(matrix, element + place.column[v], place.valid[v], to.ahead[v]);
    if (EMIT_ROWWISE) to.state = matrix.states[0][number];
}

/* A row's sums become what the launch is for, by a group. */
RF_INLINE void row_emit(const rf_small_args &args, const rf_emit_t &emit, const rf_backward_matrix &matrix,
                        const place_t &place, rf_i64 number, rf_i64 element, rf_u32 lookups, row_t &row,
                        sums_t &sums) {
    const float frequency = args.by_frequency ? 1.0f / (float)lookups : 1.0f;
    float squares = 0, factor = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums.of[v].of[i] *= frequency;
        squares += rf_emit_gradient(emit, row.ahead[v], place.valid[v], sums.of[v]);
    }
    if (EMIT_ROWWISE) {
        for (int apart = place.lanes / 2; apart > 0; apart /= 2)
            squares += __shfl_xor_sync(place.mask, squares, apart);
        __syncwarp(place.mask); /* all have read the state */
        factor = rf_emit_row_factor(emit, matrix, number, row.state, squares, place.lane == 0);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (place.valid[v] > 0)
            rf_emit_store_at(emit, matrix, element + place.column[v], number, place.column[v], 4,
                             row.ahead[v], sums.of[v], factor);
}

#endif
