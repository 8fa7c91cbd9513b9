/* What rows.cu and joins.cu share: groups of lanes that pool a row, what a lane has of a matrix, the matrix of a key, and the
 * end of a row's sum. */
#ifndef RECFUSE_CUDA_BACKWARD_POOL_CUH
#define RECFUSE_CUDA_BACKWARD_POOL_CUH

#include "families/fused_backward/emit.cuh"
#include "families/fused_backward/entries.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
#ifndef RF_ENTRIES
#define RF_ENTRIES RF_ENTRIES_DIRECT
#endif
#ifndef RF_VECTORS
#define RF_VECTORS 1 /* of four columns, a lane, at once */
#endif

enum {
    BLOCK = RF_BACKWARD_BLOCK,
    BLOCK_BITS = 8,
    GRAD_BYTES = rf_element<RF_GRAD_DTYPE>::BYTES,
    APART = 4 * RF_BACKWARD_LANES, /* columns between two vectors of a lane */
    LEAST_LANES = EMIT_ROWWISE
                      ? 4
                      : 1 /* that share a row: of row-wise Adagrad as many as rows that they have at once */
};

static_assert(1 << BLOCK_BITS == (int)BLOCK, "as groups count");

/* A row's number where it is emitted: its key with this bit, which says of an entry that the next one has another key. Keys
 * need one bit less. */
#define ENDS ((RF_KEY)1 << (8 * sizeof(RF_KEY) - 1))

/* How the threads of a block share rows of one matrix: groups of `lanes` have a row each. */
struct groups_t {
    int bits, lanes, count, group, lane; /* lanes: 1 << bits */
    rf_u32 mask; /* of the group's lanes in its warp */
};

RF_INLINE groups_t groups_of(int dim, int least = LEAST_LANES) {
    int bits = 0;
    while (1 << bits < RF_BACKWARD_LANES && (4 << bits < dim || 1 << bits < least)) bits++;
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

/* What a lane has of a matrix: vector v is four columns from column + APART * v on. */
struct lane_t {
    int column;
    float each; /* one over the columns of a row */
    int valid[RF_VECTORS]; /* columns */
    rf_emit_rows_t rows; /* by keys with ENDS */
    rf_u8 *states; /* of row-wise Adagrad: of rows, by keys with ENDS */
    rf_i64 first_row; /* the key of the matrix's row 0 */
};

RF_INLINE lane_t lane_of(const rf_backward_matrix &matrix, const groups_t &groups) {
    lane_t lane;
    lane.each = 1.0f / (float)matrix.dim;
    lane.column = 4 * groups.lane + APART * RF_VECTORS * (int)blockIdx.y;
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) lane.valid[v] = min(max(matrix.dim - lane.column - APART * v, 0), 4);
    /* A lane without columns reads those of others: that takes no predicate. */
    if (RF_ALIGNED && lane.valid[0] == 0) lane.column = 0;
    lane.first_row = matrix.first_row;
    const rf_i64 before = -(rf_i64)((rf_u64)matrix.first_row + ENDS);
    lane.rows = rf_emit_rows(matrix, before, lane.column);
    lane.states = EMIT_ROWWISE ? (rf_u8 *)(matrix.states[0] + before) : nullptr;
    if (EMIT_ROWWISE) rf_keep(lane.states);
    return lane;
}

/* Columns of vector v that are read: of the first one always. */
RF_INLINE int readable_of(const lane_t &lane, int v) { return RF_ALIGNED && v == 0 ? 4 : lane.valid[v]; }

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

/* Rows of a group that are ready at once: a key with ENDS where `emits`, the row's number among those that are listed, what is
 * read of it early, its sums. */
template <int N> struct ready_t {
    bool emits[N];
    RF_KEY keys[N];
    rf_u32 found[N];
    rf_emit_ahead_t ahead[N][RF_VECTORS];
    /* Of row-wise Adagrad: the key of the row own_row<N>, 0 where it is not emitted, and its state. */
    RF_KEY own;
    float state;
    four_t sums[N][RF_VECTORS];
};

/* Lanes of a group that have one of N rows, a power of two: as bits. */
template <int N> RF_INLINE int each_bits(const groups_t &groups) {
    return groups.bits - (N == 4 ? 2 : N == 2 ? 1 : 0);
}
/* The row among N whose sum of squares a lane adds up, and whose state it has. */
template <int N> RF_INLINE int own_row(const groups_t &groups) { return groups.lane >> each_bits<N>(groups); }

RF_INLINE void row_load(const lane_t &lane, RF_KEY key, rf_emit_ahead_t *ahead) {
    const rf_emit_place_t place = lane.rows.place(key);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        rf_emit_load(rf_emit_behind(place, APART * v), readable_of(lane, v), ahead[v]);
}

/* Adds up N numbers of each lane over a group; returns the sum of own_row<N>. Half of the lanes go on with one half of the
 * numbers, the others with the other. */
template <int N> RF_INLINE float sums_of_group(const groups_t &groups, rf_u32 mask, float (&numbers)[N]) {
    int apart = groups.lanes >> 1;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, apart >>= 1) {
        const bool upper = (groups.lane & apart) != 0;
#pragma unroll
        for (int n = 0; n < half; n++) {
            const float given = upper ? numbers[n] : numbers[n + half];
            numbers[n] = (upper ? numbers[n + half] : numbers[n]) + __shfl_xor_sync(mask, given, apart);
        }
    }
#pragma unroll
    for (int all = N; all < RF_BACKWARD_LANES; all *= 2, apart >>= 1) {
        const float other = __shfl_xor_sync(mask, numbers[0], apart); /* by 0: its own */
        if (apart > 0) numbers[0] += other;
    }
    return numbers[0];
}

/* The steps of row-wise Adagrad of rows that are ready: their factors, from each lane's sums of squares. `mask`: of lanes that
 * take part, the group's at least. What is no constant here costs many instructions at each exchange. */
template <int N>
RF_INLINE void row_factors(const rf_emit_t &emit, const lane_t &lane, groups_t groups, rf_u32 mask,
                           const ready_t<N> &ready, float (&squares)[N], float (&factors)[N]) {
    rf_forget(groups.bits);
    groups.lanes = 1 << groups.bits;
    groups.lane = (int)threadIdx.x & (groups.lanes - 1);
    const int bits = each_bits<N>(groups), first = (int)(threadIdx.x % 32) - groups.lane;
    const float state = rf_emit_row_state(ready.state, sums_of_group(groups, mask, squares), lane.each);
    const float factor = rf_emit_row_factor(emit, state);
    __syncwarp(mask); /* all have read the states */
    if (ready.own != 0 && (groups.lane & ((1 << bits) - 1)) == 0) state_write(lane.states, ready.own, state);
#pragma unroll
    for (int n = 0; n < N; n++) factors[n] = __shfl_sync(mask, factor, first + (n << bits));
}

/* Sums become what the launch is for. By a whole group; `mask`: as of row_factors. Rows are worked on side by side, so that
 * one need not wait for another's. */
template <int N>
RF_INLINE void rows_emit(const rf_backward_rows_args &args, const rf_emit_t &emit, const lane_t &lane,
                         const groups_t &groups, rf_u32 mask, ready_t<N> &ready) {
    float squares[N] = {}, factors[N] = {};
    if (!EMIT_READS && args.by_frequency) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float frequency =
                ready.emits[n] ? frequency_of(args, (rf_i64)(ready.keys[n] & ~ENDS)) : 1.0f;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
                for (int i = 0; i < 4; i++) ready.sums[n][v].of[i] *= frequency;
            }
        }
    }
    if (EMIT_READS && !emit.plain) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) rf_emit_gradient(emit, ready.ahead[n][v], ready.sums[n][v]);
        }
    }
#pragma unroll
    for (int n = 0; n < N && EMIT_ROWWISE; n++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
            const float own = rf_emit_squares(lane.valid[v], ready.sums[n][v]);
            squares[n] = v == 0 ? own : squares[n] + own;
        }
    }
    if (EMIT_ROWWISE) row_factors<N>(emit, lane, groups, mask, ready, squares, factors);
#pragma unroll
    for (int n = 0; n < N; n++) {
        /* What a row takes to be written is worked out also where it is not, but for what takes long. */
        if ((RF_ROUND || EMIT_STATES > 0 || !EMIT_READS) && !ready.emits[n]) continue;
        const rf_i64 key = (rf_i64)(ready.keys[n] & ~ENDS), row = key - lane.first_row;
        rf_emit_place_t place = lane.rows.place(ready.keys[n]);
        if (!EMIT_READS && args.bases != nullptr) {
            const rf_u32 found = ready.found[n];
            if (groups.lane == 0 && blockIdx.y == 0) args.matrices[matrix_of(args, key)].listed[found] = row;
            place = lane.rows.place((rf_u64)lane.first_row + ENDS + found);
        }
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++)
            rf_emit_store(emit, rf_emit_behind(place, APART * v), row, lane.column + APART * v,
                          ready.emits[n] ? lane.valid[v] : 0, ready.ahead[n][v], ready.sums[n][v],
                          factors[n]);
    }
}

/* The same of one row. First it is asked for; `key`: without ENDS. */
RF_INLINE void row_ask(const lane_t &lane, RF_KEY key, ready_t<1> &ready) {
    ready.emits[0] = true;
    ready.keys[0] = ready.own = key | ENDS;
    row_load(lane, ready.own, ready.ahead[0]);
    if (EMIT_ROWWISE) ready.state = state_read(lane.states, ready.own);
}
RF_INLINE void row_emit(const rf_backward_rows_args &args, const rf_emit_t &emit, const lane_t &lane,
                        const groups_t &groups, rf_u32 found, ready_t<1> &ready) {
    ready.found[0] = found;
    rows_emit(args, emit, lane, groups, groups.mask, ready);
}

#endif
