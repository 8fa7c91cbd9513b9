/* Fix-up of runs of equal keys that cross the border of chunks: adds the partial sums of rows.cu and emits
 * the row.
 *
 * Thread mapping. A warp has the run that begins in its chunk and continues in the next, if any. The block
 * handles a run of more than FEW chunks together: each group of lanes adds the parts of consecutive chunks,
 * then the first group adds theirs. So the order of additions depends only on the number of chunks.
 * Shared memory: static. Launch: grid [ceil(chunks / warps), slices], block [RF_BACKWARD_BLOCK].
 */
#include "families/fused_backward/backward_pool.cuh"

enum {
    WARPS = BLOCK / 32,
    FEW = 32,
    AHEAD = 4,
    BLOCKS = RF_VECTORS == 4 ? 1 : 3 /* per SM, by registers */
};

/* Returns a key, read through L2 only: it is prefetched before rows.cu has ended. */
RF_INLINE RF_KEY key_at(const rf_backward_rows_args &args, rf_i64 at) {
    return __ldcg(&args.entries[at].key);
}

/* Returns the key of the run that begins in a chunk and continues in the next, or -1. */
RF_INLINE rf_i64 run_of(const rf_backward_rows_args &args, rf_i64 count, rf_i64 chunk) {
    const rf_i64 first = chunk * args.chunk, behind = first + args.chunk;
    if (behind >= count) return -1;
    const RF_KEY key = key_at(args, behind), last = key_at(args, behind - 1);
    const bool earlier = first > 0 && key_at(args, first - 1) == key;
    return last != key || earlier ? -1 : (rf_i64)key;
}

RF_INLINE bool goes_on(const rf_backward_rows_args &args, rf_i64 count, rf_i64 chunk, rf_i64 key) {
    const rf_i64 at = chunk * args.chunk;
    return at < count && (rf_i64)key_at(args, at) == key;
}

/* Adds the first sums of the chunks [first, behind). */
RF_INLINE void parts_add(const rf_backward_rows_args &args, const lane_t &lane, rf_i64 first, rf_i64 behind,
                         four_t *sums) {
    for (rf_i64 chunk = first; chunk < behind; chunk += AHEAD) {
        four_t parts[AHEAD][RF_VECTORS] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                if (chunk + i < behind && lane.valid[v] > 0)
                    part_add(partial_of(args, chunk + i, 0, lane.column + APART * v), parts[i][v]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
                for (int k = 0; k < 4; k++) sums[v].of[k] += parts[i][v].of[k];
            }
        }
    }
}

/* Emits a run, by one group; `others`: the sums of the following chunks. The row has been prefetched. */
RF_INLINE void run_emit(const rf_backward_rows_args &args, const rf_emit_t &emit, const groups_t &groups,
                        const lane_t &lane, rf_i64 chunk, const four_t *others, ready_t<1> &ready) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        ready.sums[0][v] = four_t{};
        if (lane.valid[v] > 0)
            part_add(partial_of(args, chunk, 1, lane.column + APART * v), ready.sums[0][v]);
#pragma unroll
        for (int k = 0; k < 4; k++) ready.sums[0][v].of[k] += others[v].of[k];
    }
    const bool listed = !EMIT_READS && args.bases != nullptr;
    row_emit(args, emit, lane, groups, listed ? args.bases[chunk + 1] - 1 : 0, ready);
}

/* Handles a run that covers many other chunks, by the whole block. */
RF_INLINE void long_run(const rf_backward_rows_args &args, const rf_emit_t &emit, float *parts, rf_i64 count,
                        rf_i64 chunk, rf_i64 key) {
    int others = 0;
    for (int more = BLOCK; more == BLOCK;) {
        more = __syncthreads_count(goes_on(args, count, chunk + 1 + others + (int)threadIdx.x, key));
        others += more;
    }
    const rf_backward_matrix &matrix = args.matrices[matrix_of(args, key)];
    const groups_t groups = groups_of(matrix.dim);
    const lane_t lane = lane_of(matrix, groups);
    const int share = (others + groups.count - 1) / groups.count;
    const int first = min(groups.group * share, others), behind = min(first + share, others);
    four_t sums[RF_VECTORS] = {};
    parts_add(args, lane, chunk + 1 + first, chunk + 1 + behind, sums);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        part_store(parts + 4 * ((v * groups.count + groups.group) * groups.lanes + groups.lane), sums[v]);
    __syncthreads();
    if (groups.group == 0) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        for (int group = 0; group < groups.count && group * share < others; group++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                part_add(parts + 4 * ((v * groups.count + group) * groups.lanes + groups.lane), sums[v]);
        }
        ready_t<1> ready;
        row_ask(lane, (RF_KEY)key, ready);
        run_emit(args, emit, groups, lane, chunk, sums, ready);
    }
    /* The next run writes its parts after the barrier at which its chunks are counted. */
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_joins(const __grid_constant__ rf_backward_rows_args args) {
    __shared__ __align__(16) float parts[BLOCK * 4 * RF_VECTORS];
    __shared__ rf_i64 left[WARPS]; /* keys of runs for the whole block; -1: none */
    const int warp = threadIdx.x / 32, number = threadIdx.x % 32;
    /* All data except the partial sums are older than the previous kernel, or are rows that it does not
     * write. */
    const rf_emit_t emit = rf_emit_of(args.emit);
    const rf_i64 count = __ldcg(args.count), chunk = (rf_i64)blockIdx.x * WARPS + warp;
    const rf_i64 key = run_of(args, count, chunk);
    int others = 0;
    if (key >= 0) others = __popc(__ballot_sync(RF_FULL_WARP, goes_on(args, count, chunk + 1 + number, key)));
    if (number == 0) left[warp] = others == FEW ? key : -1;
    const rf_backward_matrix &matrix = args.matrices[matrix_of(args, key)];
    const groups_t groups = groups_of(matrix.dim);
    const lane_t lane = lane_of(matrix, groups);
    const bool own = others > 0 && others < FEW && number < groups.lanes;
    ready_t<1> ready;
    if (own) row_ask(lane, (RF_KEY)key, ready);
    rf_wait_for_previous_kernel();
    if (emit.skip) return;
    if (own) {
        four_t sums[RF_VECTORS] = {};
        parts_add(args, lane, chunk + 1, chunk + 1 + others, sums);
        run_emit(args, emit, groups, lane, chunk, sums, ready);
    }
    __syncthreads();
    for (int other = 0; other < WARPS; other++)
        if (left[other] >= 0)
            long_run(args, emit, parts, count, (rf_i64)blockIdx.x * WARPS + other, left[other]);
}
