/* Inclusive prefix sums, in place: counts of lookups become offsets.
 *
 * A block has RF_COLUMNS_SCAN_VALUES values, a thread VALUES consecutive values. RF_SUMS 1: writes the sum of
 * each block; 0: the block adds the sums of all previous blocks to its own prefix sums.
 * Shared memory: static. Launch: grid [ceil(count / RF_COLUMNS_SCAN_VALUES)], block [RF_COLUMNS_SCAN_BLOCK].
 */
#ifndef RF_SUMS
#define RF_SUMS 0
#endif

#include "gpu/device/sums.cuh"
#include "families/embedding_columns/columns_args.h"

enum {
    BLOCK = RF_COLUMNS_SCAN_BLOCK,
    VALUES = RF_COLUMNS_SCAN_VALUES / RF_COLUMNS_SCAN_BLOCK,
    WARPS = BLOCK / 32
};

extern "C" __global__ void __launch_bounds__(RF_COLUMNS_SCAN_BLOCK)
    rf_columns_scan(const __grid_constant__ rf_columns_scan_args args) {
    __shared__ rf_i64 of_warps[2][WARPS];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    const rf_i64 first = (rf_i64)blockIdx.x * RF_COLUMNS_SCAN_VALUES + thread * VALUES;
    rf_i64 value[VALUES], thread_sum = 0, earlier = 0, total;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        value[i] = first + i < args.count ? args.values[first + i] : 0;
        thread_sum += value[i];
    }
    if (!RF_SUMS) {
        for (int block = thread; block < (int)blockIdx.x; block += BLOCK) earlier += args.sums[block];
        rf_sum_of_block_before<WARPS>(earlier, of_warps[0], total);
        earlier = total;
    }
    rf_i64 sum = earlier + rf_sum_of_block_before<WARPS>(thread_sum, of_warps[1], total);
    if (RF_SUMS) {
        if (thread == 0) args.sums[blockIdx.x] = total;
        return;
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        sum += value[i];
        if (first + i < args.count) args.values[first + i] = sum;
    }
}
