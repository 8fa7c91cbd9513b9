/* Fix-up of runs of equal keys that cross the border of chunks: adds the partial sums of rows.cu and writes
 * the row.
 *
 * Thread mapping. A warp has the run that begins in its chunk and continues in the next, if any. The block
 * handles a run of more than WARP_CHUNKS chunks together: each group of lanes adds the parts of consecutive chunks,
 * then the first group adds theirs. So the order of additions depends only on the number of chunks.
 * Shared memory: static. Launch: grid [ceil(chunks / warps), slices], block [RF_BACKWARD_BLOCK].
 */
#include "families/fused_backward/backward_pool.cuh"

enum {
    WARPS = BLOCK / 32,
    WARP_CHUNKS = 32,
    CHUNKS_AT_ONCE = 4,
    BLOCKS = RF_VECTORS == 4 ? 1 : 3 /* per SM, by registers */
};

/* Returns a key, read through L2 only: it is prefetched before rows.cu has ended. */
RF_INLINE RF_KEY key_at(const rf_backward_rows_args &args, rf_i64 at) {
    return __ldcg(&args.entries[at].key);
}

/* Returns the key of the run that begins in a chunk and continues in the next, or -1. */
RF_INLINE rf_i64 run_of(const rf_backward_rows_args &args, rf_i64 count, rf_i64 chunk) {
    const rf_i64 first = chunk * args.chunk, end = first + args.chunk;
    if (end >= count) return -1;
    const RF_KEY key = key_at(args, end), last = key_at(args, end - 1);
    const bool earlier = first > 0 && key_at(args, first - 1) == key;
    return last != key || earlier ? -1 : (rf_i64)key;
}

RF_INLINE bool continues(const rf_backward_rows_args &args, rf_i64 count, rf_i64 chunk, rf_i64 key) {
    const rf_i64 at = chunk * args.chunk;
    return at < count && (rf_i64)key_at(args, at) == key;
}

/* Adds the first sums of the chunks [first, end). */
RF_INLINE void partials_add(const rf_backward_rows_args &args, const lane_t &lane, rf_i64 first, rf_i64 end,
                            four_t *sums) {
    for (rf_i64 chunk = first; chunk < end; chunk += CHUNKS_AT_ONCE) {
        four_t partials[CHUNKS_AT_ONCE][RF_VECTORS] = {};
#pragma unroll
        for (int i = 0; i < CHUNKS_AT_ONCE; i++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                if (chunk + i < end && lane.valid[v] > 0)
                    part_add(partial_of(args, chunk + i, 0, lane.column + APART * v), partials[i][v]);
        }
#pragma unroll
        for (int i = 0; i < CHUNKS_AT_ONCE; i++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
                for (int k = 0; k < 4; k++) sums[v].of[k] += partials[i][v].of[k];
            }
        }
    }
}

/* Writes a run, by one group; `n_chunks`: the sums of the following chunks. The row has been prefetched. */
RF_INLINE void run_epilogue(const rf_backward_rows_args &args, const rf_epilogue_t &epilogue,
                            const groups_t &groups, const lane_t &lane, rf_i64 chunk, const four_t *n_chunks,
                            pending_t<1> &pending) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        pending.sums[0][v] = four_t{};
        if (lane.valid[v] > 0)
            part_add(partial_of(args, chunk, 1, lane.column + APART * v), pending.sums[0][v]);
#pragma unroll
        for (int k = 0; k < 4; k++) pending.sums[0][v].of[k] += n_chunks[v].of[k];
    }
    const bool row_sparse = !EPILOGUE_READS && args.bases != nullptr;
    row_epilogue(args, epilogue, lane, groups, row_sparse ? args.bases[chunk + 1] - 1 : 0, pending);
}

/* Handles a run that covers many other chunks, by the whole block. */
RF_INLINE void long_run(const rf_backward_rows_args &args, const rf_epilogue_t &epilogue, float *partials,
                        rf_i64 count, rf_i64 chunk, rf_i64 key) {
    int n_chunks = 0;
    for (int continuing = BLOCK; continuing == BLOCK;) {
        continuing =
            __syncthreads_count(continues(args, count, chunk + 1 + n_chunks + (int)threadIdx.x, key));
        n_chunks += continuing;
    }
    const rf_backward_matrix &matrix = args.matrices[matrix_of(args, key)];
    const groups_t groups = groups_of(matrix.dim);
    const lane_t lane = lane_of(matrix, groups);
    const int group_chunks = (n_chunks + groups.count - 1) / groups.count;
    const int first = min(groups.group * group_chunks, n_chunks), end = min(first + group_chunks, n_chunks);
    four_t sums[RF_VECTORS] = {};
    partials_add(args, lane, chunk + 1 + first, chunk + 1 + end, sums);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        part_store(partials + 4 * ((v * groups.count + groups.group) * groups.lanes + groups.lane), sums[v]);
    __syncthreads();
    if (groups.group == 0) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        for (int group = 0; group < groups.count && group * group_chunks < n_chunks; group++) {
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                part_add(partials + 4 * ((v * groups.count + group) * groups.lanes + groups.lane), sums[v]);
        }
        pending_t<1> pending;
        row_prefetch(lane, (RF_KEY)key, pending);
        run_epilogue(args, epilogue, groups, lane, chunk, sums, pending);
    }
    /* The next run writes its parts after the barrier at which its chunks are counted. */
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_joins(const __grid_constant__ rf_backward_rows_args args) {
    __shared__ __align__(16) float partials[BLOCK * 4 * RF_VECTORS];
    __shared__ rf_i64 long_keys[WARPS]; /* keys of runs for the whole block; -1: none */
    const int warp = threadIdx.x / 32, number = threadIdx.x % 32;
    /* All data except the partial sums are older than the previous kernel, or are rows that it does not
     * write. */
    const rf_epilogue_t epilogue = rf_epilogue_of(args.epilogue);
    const rf_i64 count = __ldcg(args.count), chunk = (rf_i64)blockIdx.x * WARPS + warp;
    const rf_i64 key = run_of(args, count, chunk);
    int n_chunks = 0;
    if (key >= 0)
        n_chunks = __popc(__ballot_sync(RF_FULL_WARP, continues(args, count, chunk + 1 + number, key)));
    if (number == 0) long_keys[warp] = n_chunks == WARP_CHUNKS ? key : -1;
    const rf_backward_matrix &matrix = args.matrices[matrix_of(args, key)];
    const groups_t groups = groups_of(matrix.dim);
    const lane_t lane = lane_of(matrix, groups);
    const bool is_short = n_chunks > 0 && n_chunks < WARP_CHUNKS && number < groups.lanes;
    pending_t<1> pending;
    if (is_short) row_prefetch(lane, (RF_KEY)key, pending);
    rf_wait_for_previous_kernel();
    if (epilogue.skip) return;
    if (is_short) {
        four_t sums[RF_VECTORS] = {};
        partials_add(args, lane, chunk + 1, chunk + 1 + n_chunks, sums);
        run_epilogue(args, epilogue, groups, lane, chunk, sums, pending);
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        if (long_keys[w] >= 0)
            long_run(args, epilogue, partials, count, (rf_i64)blockIdx.x * WARPS + w, long_keys[w]);
}
