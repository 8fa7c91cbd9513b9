/* Prefix sums over the lanes of a warp and over a block. */
#ifndef RECFUSE_SUMS_CUH
#define RECFUSE_SUMS_CUH

#include "gpu/device/common.cuh"

/* Returns the inclusive prefix sum over lanes. */
template <typename T> RF_INLINE T rf_sum_of_lanes_to(T value) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const T lower = __shfl_up_sync(RF_FULL_WARP, value, apart);
        if ((int)threadIdx.x % 32 >= apart) value += lower;
    }
    return value;
}

/* `before` and the sums of the warps before `warp`, of_warps [WARPS]; to `total` those of all warps are
 * added. */
template <int WARPS, typename T>
RF_INLINE T rf_sum_of_warps_before(T before, const T *of_warps, int warp, T &total) {
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? of_warps[w] : 0;
        total += of_warps[w];
    }
    return before;
}

/* Returns the exclusive prefix sum over the threads of a block of WARPS warps; `total`: the total. Calls with
 * the same of_warps [WARPS], in shared memory, require a barrier between them. */
template <int WARPS, typename T> RF_INLINE T rf_sum_of_block_before(T value, T *of_warps, T &total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T upto = rf_sum_of_lanes_to(value);
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    total = 0;
    return rf_sum_of_warps_before<WARPS>(upto - value, of_warps, warp, total);
}

#endif
