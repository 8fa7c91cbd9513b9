/* Numbers of rows before each chunk of rows.cu, for row-sparse gradients. The first kernel counts the rows
 * that begin in a chunk: grid [chunks]; the second computes prefix sums, with the total after the last chunk:
 * grid [1]; the third counts the rows before each of several matrices, a warp a matrix: grid [matrices /
 * warps of a block]. Blocks: [RF_BACKWARD_BLOCK]. */
#include "families/fused_backward/entries.cuh"

enum { BLOCK = RF_BACKWARD_BLOCK };

/* Returns true if an entry is the first of its row. */
RF_INLINE bool is_row_begin(const rf_backward_rows_args &args, rf_i64 at) {
    return at == 0 || args.entries[at - 1].key != args.entries[at].key;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_count_rows(const __grid_constant__ rf_backward_rows_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 count = rf_load(args.count), first = (rf_i64)blockIdx.x * args.chunk;
    int total = 0;
    for (int start = 0; start < args.chunk; start += BLOCK) {
        const rf_i64 at = first + start + threadIdx.x;
        const bool counts = start + (int)threadIdx.x < args.chunk && at < count;
        total += __syncthreads_count(counts && is_row_begin(args, at));
    }
    if (threadIdx.x == 0) args.bases[blockIdx.x] = (rf_u32)total;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_sum_rows(const __grid_constant__ rf_backward_rows_args args) {
    __shared__ rf_u32 of_warps[BLOCK / 32];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    rf_u32 total_before = 0;
    for (int start = 0; start <= args.chunks; start += BLOCK) {
        const int at = start + thread;
        const rf_u32 chunk_rows = at < args.chunks ? args.bases[at] : 0;
        rf_u32 block_total;
        __syncthreads();
        const rf_u32 first = rf_sum_of_block_before<BLOCK / 32>(chunk_rows, of_warps, block_total);
        if (at <= args.chunks) args.bases[at] = total_before + first;
        total_before += block_total;
    }
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_split_rows(const __grid_constant__ rf_backward_rows_args args) {
    rf_wait_for_previous_kernel();
    const int lane = threadIdx.x % 32, matrix = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    if (matrix >= args.n_matrices) return;
    const rf_i64 limit =
        entries_before(args.entries, 0, rf_load(args.count), args.matrices[matrix].first_row);
    const rf_i64 chunk = limit / args.chunk;
    rf_u32 total_before = args.bases[chunk];
    for (rf_i64 first = chunk * args.chunk; first < limit; first += 32) {
        const rf_i64 at = first + lane;
        total_before += __popc(__ballot_sync(RF_FULL_WARP, at < limit && is_row_begin(args, at)));
    }
    if (lane == 0) args.bases[args.chunks + 1 + matrix] = total_before;
}
