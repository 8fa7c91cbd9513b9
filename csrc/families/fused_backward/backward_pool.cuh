/* Shared by rows.cu and joins.cu: groups of lanes that pool a row, the matrix of a key, and the end of a
 * row's sum. */
#ifndef RECFUSE_CUDA_BACKWARD_POOL_CUH
#define RECFUSE_CUDA_BACKWARD_POOL_CUH

#include "families/fused_backward/epilogue.cuh"
#include "families/fused_backward/entries.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
#ifndef RF_ENTRIES
#define RF_ENTRIES RF_ENTRIES_DIRECT
#endif
#ifndef RF_VECTORS
#define RF_VECTORS 1 /* vectors of four columns per lane */
#endif

enum {
    BLOCK = RF_BACKWARD_BLOCK,
    BLOCK_BITS = 8,
    GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES,
    APART = 4 * RF_BACKWARD_LANES, /* columns between two vectors of a lane */
    LEAST_LANES = EPILOGUE_ROWWISE ? 4 : 1 /* of a row; row-wise Adagrad: as many as rows at once */
};

static_assert(1 << BLOCK_BITS == (int)BLOCK, "as groups count");

/* Flag in a key: the next entry has another key, so the row is written here. Keys have one bit less. */
#define ROW_END ((RF_KEY)1 << (8 * sizeof(RF_KEY) - 1))

/* The groups of a block: each group of `lanes` lanes has a row of the matrix. */
struct groups_t {
    int bits, lanes, count, group, lane; /* lanes: 1 << bits */
    rf_u32 mask; /* lanes of the group within its warp */
};

RF_INLINE groups_t groups_of(int dim, int least_lanes = LEAST_LANES) {
    int bits = 0;
    while (1 << bits < RF_BACKWARD_LANES && (4 << bits < dim || 1 << bits < least_lanes)) bits++;
    groups_t groups;
    groups.bits = bits;
    groups.lanes = 1 << bits;
    groups.count = BLOCK >> bits;
    groups.group = (int)threadIdx.x >> bits;
    groups.lane = (int)threadIdx.x & (groups.lanes - 1);
    groups.mask = (groups.lanes == 32 ? RF_FULL_WARP : (1u << groups.lanes) - 1)
                  << (threadIdx.x % 32 - groups.lane);
    return groups;
}

/* The columns of a lane in a matrix: vector v is the four columns from column + APART * v on. */
struct lane_t {
    int column;
    float inverse_columns; /* 1 / columns of a row */
    int valid[RF_VECTORS]; /* valid columns of each vector */
    rf_epilogue_rows_t rows; /* indexed by keys with ROW_END */
    rf_u8 *states; /* of row-wise Adagrad, indexed by keys with ROW_END */
    rf_i64 first_row; /* key of row 0 of the matrix */
};

RF_INLINE lane_t lane_of(const rf_backward_matrix &matrix, const groups_t &groups) {
    lane_t lane;
    lane.inverse_columns = 1.0f / (float)matrix.dim;
    lane.column = 4 * groups.lane + APART * RF_VECTORS * (int)blockIdx.y;
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) lane.valid[v] = min(max(matrix.dim - lane.column - APART * v, 0), 4);
    /* A lane without columns reads column 0, which needs no predicate. */
    if (RF_ALIGNED && lane.valid[0] == 0) lane.column = 0;
    lane.first_row = matrix.first_row;
    const rf_i64 row_offset = -(rf_i64)((rf_u64)matrix.first_row + ROW_END);
    lane.rows = rf_epilogue_rows(matrix, row_offset, lane.column);
    lane.states = EPILOGUE_ROWWISE ? (rf_u8 *)(matrix.states[0] + row_offset) : nullptr;
    if (EPILOGUE_ROWWISE) rf_keep(lane.states);
    return lane;
}

/* Returns the number of columns of vector v that are read: of the first vector always all four. */
RF_INLINE int readable_of(const lane_t &lane, int v) { return RF_ALIGNED && v == 0 ? 4 : lane.valid[v]; }

/* Stores four columns of partial sums to shared or global memory. */
RF_INLINE void part_store(float *to, const four_t &from) {
    *(rf_bytes<16> *)to = *(const rf_bytes<16> *)from.of;
}
RF_INLINE void part_add(const float *from, four_t &to) {
    const rf_bytes<16> row_numbers = *(const rf_bytes<16> *)from;
#pragma unroll
    for (int i = 0; i < 4; i++) to.of[i] += __uint_as_float(row_numbers.word[i]);
}

/* Returns the partial sums of a chunk for runs that continue in other chunks: 0 its first run, 1 its last. */
RF_INLINE float *partial_of(const rf_backward_rows_args &args, rf_i64 chunk, int which, int column) {
    return args.partials + (chunk * 2 + which) * args.pitch + column;
}

/* Returns the matrix that contains row `key` of the launch. */
RF_INLINE int matrix_of(const rf_backward_rows_args &args, rf_i64 key) {
    int at = 0;
    while (at + 1 < args.n_matrices && args.matrices[at + 1].first_row <= key) at++;
    return at;
}

/* Returns 1 / entries of a row. */
RF_INLINE float frequency_of(const rf_backward_rows_args &args, rf_i64 key) {
    const rf_i64 count = rf_load(args.count), first = entries_before(args.entries, 0, count, key);
    return 1.0f / (float)(entries_before(args.entries, first, count, key + 1) - first);
}

/* Complete rows of a group: key with ROW_END if `writes`, number among the listed rows, prefetched data, sums. */
template <int N> struct pending_t {
    bool writes[N];
    RF_KEY keys[N];
    rf_u32 row_numbers[N];
    rf_epilogue_values_t values[N][RF_VECTORS];
    /* Row-wise Adagrad: the key of row own_row<N>, or 0 if it is not written, and its state. */
    RF_KEY own_key;
    float state;
    four_t sums[N][RF_VECTORS];
};

/* Returns log2 of the number of lanes of a group that share one of N rows; N is a power of two. */
template <int N> RF_INLINE int each_bits(const groups_t &groups) {
    return groups.bits - (N == 4 ? 2 : N == 2 ? 1 : 0);
}
/* Returns the row, out of N, whose sum of squares and state this lane holds. */
template <int N> RF_INLINE int own_row(const groups_t &groups) { return groups.lane >> each_bits<N>(groups); }

RF_INLINE void row_load(const lane_t &lane, RF_KEY key, rf_epilogue_values_t *values) {
    const rf_epilogue_address_t address = lane.rows.address(key);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        rf_epilogue_load(rf_epilogue_offset(address, APART * v), readable_of(lane, v), values[v]);
}

/* Sums N numbers of each lane over a group; returns the sum of own_row<N>. In each step half of the lanes
 * continue with one half of the numbers, the others with the other half. */
template <int N> RF_INLINE float sums_of_group(const groups_t &groups, rf_u32 mask, float (&numbers)[N]) {
    int stride = groups.lanes >> 1;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, stride >>= 1) {
        const bool upper = (groups.lane & stride) != 0;
#pragma unroll
        for (int n = 0; n < half; n++) {
            const float sent = upper ? numbers[n] : numbers[n + half];
            numbers[n] = (upper ? numbers[n + half] : numbers[n]) + __shfl_xor_sync(mask, sent, stride);
        }
    }
#pragma unroll
    for (int n_sums = N; n_sums < RF_BACKWARD_LANES; n_sums *= 2, stride >>= 1) {
        const float received = __shfl_xor_sync(mask, numbers[0], stride); /* by 0: its own number */
        if (stride > 0) numbers[0] += received;
    }
    return numbers[0];
}

/* The step of row-wise Adagrad for complete rows: computes the factors from the sums of squares of the lanes.
 * `mask`: the participating lanes, at least the group's. N is a constant, because exchanges of a variable
 * number are slow. */
template <int N>
RF_INLINE void row_factors(const rf_epilogue_t &epilogue, const lane_t &lane, groups_t groups, rf_u32 mask,
                           const pending_t<N> &pending, float (&squares)[N], float (&factors)[N]) {
    rf_forget(groups.bits);
    groups.lanes = 1 << groups.bits;
    groups.lane = (int)threadIdx.x & (groups.lanes - 1);
    const int bits = each_bits<N>(groups), first = (int)(threadIdx.x % 32) - groups.lane;
    const float state =
        rf_epilogue_row_state(pending.state, sums_of_group(groups, mask, squares), lane.inverse_columns);
    const float factor = rf_epilogue_row_factor(epilogue, state);
    __syncwarp(mask); /* all lanes have read the states */
    if (pending.own_key != 0 && (groups.lane & ((1 << bits) - 1)) == 0)
        state_write(lane.states, pending.own_key, state);
#pragma unroll
    for (int n = 0; n < N; n++) factors[n] = __shfl_sync(mask, factor, first + (n << bits));
}

/* Writes sums, by a whole group; `mask` as in row_factors. The rows are interleaved so that they do not wait
 * for each other. */
template <int N>
RF_INLINE void rows_epilogue(const rf_backward_rows_args &args, const rf_epilogue_t &epilogue,
                             const lane_t &lane, const groups_t &groups, rf_u32 mask, pending_t<N> &pending) {
    float squares[N] = {}, factors[N] = {};
    if (!EPILOGUE_READS && args.by_frequency) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float frequency =
                pending.writes[n] ? frequency_of(args, (rf_i64)(pending.keys[n] & ~ROW_END)) : 1.0f;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
                for (int i = 0; i < 4; i++) pending.sums[n][v].of[i] *= frequency;
            }
        }
    }
    if (EPILOGUE_READS && !epilogue.plain) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                rf_epilogue_gradient(epilogue, pending.values[n][v], pending.sums[n][v]);
        }
    }
#pragma unroll
    for (int n = 0; n < N && EPILOGUE_ROWWISE; n++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
            const float square = rf_epilogue_squares(lane.valid[v], pending.sums[n][v]);
            squares[n] = v == 0 ? square : squares[n] + square;
        }
    }
    if (EPILOGUE_ROWWISE) row_factors<N>(epilogue, lane, groups, mask, pending, squares, factors);
#pragma unroll
    for (int n = 0; n < N; n++) {
        /* The values of a row are computed even if it is not written, except for expensive ones. */
        if ((RF_ROUND || EPILOGUE_STATES > 0 || !EPILOGUE_READS) && !pending.writes[n]) continue;
        const rf_i64 key = (rf_i64)(pending.keys[n] & ~ROW_END), row = key - lane.first_row;
        rf_epilogue_address_t address = lane.rows.address(pending.keys[n]);
        if (!EPILOGUE_READS && args.bases != nullptr) {
            const rf_u32 row_numbers = pending.row_numbers[n];
            if (groups.lane == 0 && blockIdx.y == 0)
                args.matrices[matrix_of(args, key)].row_sparse[row_numbers] = row;
            address = lane.rows.address((rf_u64)lane.first_row + ROW_END + row_numbers);
        }
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++)
            rf_epilogue_store(epilogue, rf_epilogue_offset(address, APART * v), row, lane.column + APART * v,
                              pending.writes[n] ? lane.valid[v] : 0, pending.values[n][v], pending.sums[n][v],
                              factors[n]);
    }
}

/* Prefetches one row before rows_epilogue; `key`: without ROW_END. */
RF_INLINE void row_prefetch(const lane_t &lane, RF_KEY key, pending_t<1> &pending) {
    pending.writes[0] = true;
    pending.keys[0] = pending.own_key = key | ROW_END;
    row_load(lane, pending.own_key, pending.values[0]);
    if (EPILOGUE_ROWWISE) pending.state = state_read(lane.states, pending.own_key);
}
RF_INLINE void row_epilogue(const rf_backward_rows_args &args, const rf_epilogue_t &epilogue,
                            const lane_t &lane, const groups_t &groups, rf_u32 row_numbers,
                            pending_t<1> &pending) {
    pending.row_numbers[0] = row_numbers;
    rows_epilogue(args, epilogue, lane, groups, groups.mask, pending);
}

#endif
