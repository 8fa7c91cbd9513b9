/* Where the entries of each feature's lookups are, where only some features have entries: one behind the other. A feature
 * whose offsets are bad has none. The last number is that of all entries.
 *
 * A thread: every RF_BACKWARD_BLOCK-th feature. Launch: grid [1], block [RF_BACKWARD_BLOCK]. */
#include "device/sums.cuh"
#include "fused_embedding_bag/backward/args.h"

enum { BLOCK = RF_BACKWARD_BLOCK };

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_shifts(const __grid_constant__ rf_backward_shifts_args args) {
    __shared__ rf_i64 of_warps[BLOCK / 32];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    rf_i64 before = 0;
    for (int start = 0; start < args.n_features; start += BLOCK) {
        const int number = start + thread;
        rf_i64 first = 0, own = 0;
        if (number < args.n_features && rf_load(&args.features[number].pooling) >= 0) {
            first = rf_load(args.offsets + (rf_i64)number * args.bags);
            own = rf_load(args.offsets + (rf_i64)(number + 1) * args.bags) - first;
            if (first < 0 || own < 0 || own > args.lookups - first) own = 0;
        }
        rf_i64 all;
        __syncthreads();
        const rf_i64 entry = before + rf_sum_of_block_before<BLOCK / 32>(own, of_warps, all);
        /* Bad offsets of several features may add up to more than there is room for. */
        if (own > args.lookups - entry) own = 0;
        if (number < args.n_features) args.listings[number] = {first, own, own > 0 ? entry : 0};
        before += all;
    }
    if (thread == 0) *args.count = before < args.lookups ? before : args.lookups;
}
