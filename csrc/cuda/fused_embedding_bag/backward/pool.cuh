/* What rows.cu and joins.cu share: entries of a chunk, groups of lanes that pool a row, the matrix of a key. */
#ifndef RECFUSE_CUDA_BACKWARD_POOL_CUH
#define RECFUSE_CUDA_BACKWARD_POOL_CUH

#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/entries.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
#ifndef RF_ENTRIES
#define RF_ENTRIES RF_ENTRIES_DIRECT
#endif
#ifndef RF_VECTORS
#define RF_VECTORS 1 /* of four columns, a lane, at once */
#endif

enum { BLOCK = RF_BACKWARD_BLOCK, GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES };

/* How the threads of a block share rows of one matrix: groups of `lanes` have a row each. A lane's vector v is four columns
 * from column_of(groups, v) on. */
struct groups_t {
    int lanes, count, group, lane;
    int dim;
    rf_u32 mask; /* of the group's lanes in its warp */
    rf_i64 first_element; /* of the lane's first column, less that of its row: see element_of */
};

RF_INLINE groups_t groups_of(const rf_backward_matrix &matrix) {
    const int dim = matrix.dim;
    groups_t groups = {1, 0, 0, 0, dim, 0, 0};
    while (groups.lanes < RF_BACKWARD_LANES && 4 * groups.lanes < dim) groups.lanes *= 2;
    groups.count = BLOCK / groups.lanes;
    groups.group = (int)threadIdx.x / groups.lanes;
    groups.lane = (int)threadIdx.x % groups.lanes;
    groups.mask = (groups.lanes == 32 ? RF_FULL_WARP : (1u << groups.lanes) - 1)
                  << (threadIdx.x % 32 - groups.lane);
    groups.first_element =
        4 * (groups.lane + (int)blockIdx.y * RF_VECTORS * groups.lanes) - matrix.first_row * dim;
    return groups;
}

/* Element of the lane's first column of row `key` of all; vectors are 4 * lanes apart. */
RF_INLINE rf_i64 element_of(const groups_t &groups, rf_i64 key) {
    return (rf_i64)((rf_u64)key * (rf_u32)groups.dim) + groups.first_element;
}
RF_INLINE int column_of(const groups_t &groups, int v) {
    return 4 * (groups.lane + (v + (int)blockIdx.y * RF_VECTORS) * groups.lanes);
}
RF_INLINE int valid_of(const groups_t &groups, int v) {
    return min(max(groups.dim - column_of(groups, v), 0), 4);
}

/* Four columns of partial sums, in shared or global memory. */
RF_INLINE void part_store(float *to, const four_t &from) {
    *(rf_bytes<16> *)to = *(const rf_bytes<16> *)from.of;
}
RF_INLINE void part_add(const float *from, four_t &to) {
    const rf_bytes<16> found = *(const rf_bytes<16> *)from;
#pragma unroll
    for (int i = 0; i < 4; i++) to.of[i] += __uint_as_float(found.word[i]);
}

/* Where a chunk's sums of its first run (0) and its last one (1) are, of runs that go on in other chunks. */
RF_INLINE float *partial_of(const rf_backward_rows_args &args, rf_i64 chunk, int which, int column) {
    return args.partials + (chunk * 2 + which) * args.pitch + column;
}

/* The matrix that has row `key` of all. */
RF_INLINE int matrix_of(const rf_backward_rows_args &args, rf_i64 key) {
    int at = 0;
    while (at + 1 < args.n_matrices && args.matrices[at + 1].first_row <= key) at++;
    return at;
}

/* One over the entries of a row. */
RF_INLINE float frequency_of(const rf_backward_rows_args &args, rf_i64 key) {
    const rf_i64 count = rf_load(args.count), first = entries_before(args.entries, 0, count, key);
    return 1.0f / (float)(entries_before(args.entries, first, count, key + 1) - first);
}

/* A row's columns of one lane, and what is read of it early. */
struct row_t {
    rf_emit_ahead_t ahead[RF_VECTORS];
    float state; /* of row-wise Adagrad */
};

RF_INLINE void row_load(const rf_backward_matrix &matrix, const groups_t &groups, rf_i64 key, row_t &to) {
    const rf_i64 element = element_of(groups, key);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        const int valid = valid_of(groups, v);
        if (valid > 0) rf_emit_load_at(matrix, element + 4 * v * groups.lanes, valid, to.ahead[v]);
    }
    if (EMIT_ROWWISE) to.state = matrix.states[0][key - matrix.first_row];
}

/* The rows of a group that are ready at once: a key where `emits`, the row's number among those that are listed, its sums. */
template <int N> struct ready_t {
    bool emits[N];
    RF_KEY keys[N];
    rf_u32 found[N];
    row_t rows[N];
    four_t sums[N][RF_VECTORS];
};

/* Sums become what the launch is for. By a whole group. Rows are worked on side by side, so that one need not wait for
 * another's. */
template <int N>
RF_INLINE void rows_emit(const rf_backward_rows_args &args, const rf_emit_t &emit,
                         const rf_backward_matrix &matrix, const groups_t &groups, ready_t<N> &ready) {
    float squares[N], factors[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        squares[n] = factors[n] = 0;
        const float frequency =
            args.by_frequency && ready.emits[n] ? frequency_of(args, (rf_i64)ready.keys[n]) : 1.0f;
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++) ready.sums[n][v].of[i] *= frequency;
            squares[n] +=
                rf_emit_gradient(emit, ready.rows[n].ahead[v], valid_of(groups, v), ready.sums[n][v]);
        }
    }
    if (EMIT_ROWWISE) {
        for (int apart = groups.lanes / 2; apart > 0; apart /= 2) {
#pragma unroll
            for (int n = 0; n < N; n++) squares[n] += __shfl_xor_sync(groups.mask, squares[n], apart);
        }
        __syncwarp(groups.mask); /* all have read the states */
#pragma unroll
        for (int n = 0; n < N; n++)
            if (ready.emits[n])
                factors[n] = rf_emit_row_factor(emit, matrix, (rf_i64)ready.keys[n] - matrix.first_row,
                                                ready.rows[n].state, squares[n], groups.lane == 0);
    }
    const bool listed = args.bases != nullptr;
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (!ready.emits[n]) continue;
        const rf_i64 key = (rf_i64)ready.keys[n], row = key - matrix.first_row;
        if (listed && groups.lane == 0 && blockIdx.y == 0) matrix.listed[ready.found[n]] = row;
        const rf_i64 element = element_of(groups, listed ? ready.found[n] + matrix.first_row : key);
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
            const int valid = valid_of(groups, v);
            if (valid > 0)
                rf_emit_store_at(emit, matrix, element + 4 * v * groups.lanes, row, column_of(groups, v),
                                 valid, ready.rows[n].ahead[v], ready.sums[n][v], factors[n]);
        }
    }
}

/* The same of one row that was not asked for before. */
RF_INLINE void row_emit(const rf_backward_rows_args &args, const rf_emit_t &emit,
                        const rf_backward_matrix &matrix, const groups_t &groups, RF_KEY key, rf_u32 found,
                        ready_t<1> &ready) {
    ready.emits[0] = true;
    ready.keys[0] = key;
    ready.found[0] = found;
    row_load(matrix, groups, (rf_i64)key, ready.rows[0]);
    rows_emit(args, emit, matrix, groups, ready);
}

#endif
