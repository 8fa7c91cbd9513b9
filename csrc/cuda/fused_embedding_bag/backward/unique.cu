/* Rows found before each chunk of rows.cu, for gradients that are listed. The first kernel counts the rows that begin in a
 * chunk: grid [chunks], block [RF_BACKWARD_BLOCK]; the second sums them up, behind the last chunk all: grid [1]. */
#include "device/sums.cuh"
#include "fused_embedding_bag/backward/args.h"

enum { BLOCK = RF_BACKWARD_BLOCK };

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_count_rows(const __grid_constant__ rf_backward_rows_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 count = args.count != nullptr ? rf_load(args.count) : args.lookups;
    const rf_i64 first = (rf_i64)blockIdx.x * args.chunk;
    int total = 0;
    for (int start = 0; start < args.chunk; start += BLOCK) {
        const rf_i64 at = first + start + threadIdx.x;
        bool begins = start + (int)threadIdx.x < args.chunk && at < count;
        if (begins) {
            const RF_KEY key = args.keys[at];
            begins = (rf_i64)key < args.trash && (at == 0 || args.keys[at - 1] != key);
        }
        total += __syncthreads_count(begins);
    }
    if (threadIdx.x == 0) args.bases[blockIdx.x] = (rf_u32)total;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_sum_rows(const __grid_constant__ rf_backward_rows_args args) {
    __shared__ rf_u32 of_warps[BLOCK / 32];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    rf_u32 before = 0;
    for (int start = 0; start <= args.chunks; start += BLOCK) {
        const int at = start + thread;
        const rf_u32 own = at < args.chunks ? args.bases[at] : 0;
        rf_u32 all;
        __syncthreads();
        const rf_u32 first = rf_sum_of_block_before<BLOCK / 32>(own, of_warps, all);
        if (at <= args.chunks) args.bases[at] = before + first;
        before += all;
    }
}
