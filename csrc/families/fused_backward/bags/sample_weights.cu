/* The gradient of sample weights: for each lookup that counts, the dot product of its row and its bag's
 * gradient. Other elements keep their value, zero.
 *
 * Thread mapping. A warp has a bag, of which it takes every gridDim.y-th round of lookups; LANES lanes have a
 * lookup, at most a quarter of the columns, so a round has 32 / LANES lookups, with UNROLL rounds in flight.
 * A lane adds its columns in their order, then lanes are reduced pairwise: a fixed order of additions.
 * Launch: grid [ceil(n_features * bags / warps), parts], block [RF_BAGS_BLOCK].
 */
#include "families/fused_backward/bags/backward_bags.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif

enum { UNROLL = 2 /* lookups in flight per lane */ };

/* A bag's gradient, and the lanes of a row. */
struct bag_grad_t {
    const rf_u8 *grad; /* of the bag's first column */
    rf_i64 first; /* first column of the lane */
    int lanes;
    bool is_aligned, grad_is_aligned;

    RF_INLINE columns_t grad_of(rf_i64 column, int count) const {
        return columns_of<RF_GRAD_DTYPE>(grad, column, count, grad_is_aligned);
    }
};

/* Adds the products of four columns of some lookups. */
RF_INLINE void products_add(const rf_bags_feature &feature, const bag_grad_t &bag, rf_i64 column, int count,
                            const columns_t &grad, const rf_i64 (&rows)[UNROLL], float (&sums)[UNROLL]) {
    columns_t values[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
        if (rows[k] >= 0)
            values[k] = columns_of(feature.weight, feature.dtype, rows[k] * feature.dim + column, count,
                                   bag.is_aligned);
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        if (rows[k] < 0) continue;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) sums[k] = fmaf(grad.of[i], values[k].of[i], sums[k]);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BAGS_BLOCK, 8)
    rf_sample_weights(const __grid_constant__ rf_bags_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 slot = (rf_i64)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    if (slot >= args.n_features * args.bags) return;
    const rf_i64 number = slot / args.bags, bag = slot - number * args.bags;
    const rf_bags_feature feature = args.features[number];
    const bag_t lookups = bag_of(args, number, bag);
    bag_grad_t at;
    at.lanes = lanes_of(feature.dim, 32);
    at.first = threadIdx.x % at.lanes * LANE_COLUMNS;
    const rf_u8 *grad = args.grad + feature.output_column * rf_element<RF_GRAD_DTYPE>::BYTES;
    at.grad = grad + bag * args.output_dim * rf_element<RF_GRAD_DTYPE>::BYTES;
    at.is_aligned = are_aligned(feature.weight, feature.dtype, feature.dim, feature.dim);
    at.grad_is_aligned = are_aligned(grad, RF_GRAD_DTYPE, args.output_dim, feature.dim);
    const bool is_narrow = feature.dim <= 32 * LANE_COLUMNS;
    const int count = (int)min(max(feature.dim - at.first, (rf_i64)0), (rf_i64)LANE_COLUMNS);
    columns_t narrow_grad = {};
    if (is_narrow && count > 0 && lookups.from < lookups.to) narrow_grad = at.grad_of(at.first, count);
    const int at_once = 32 / at.lanes, own_slot = (int)threadIdx.x % 32 / at.lanes;
    const rf_i64 stride = (rf_i64)at_once * UNROLL;
    for (rf_i64 round = lookups.from + blockIdx.y * stride; round < lookups.to; round += gridDim.y * stride) {
        rf_i64 rows[UNROLL];
        float sums[UNROLL] = {};
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const rf_i64 lookup = round + k * at_once + own_slot;
            rows[k] = lookup < lookups.to ? row_of(args, feature, lookup) : -1;
        }
#pragma unroll 1
        for (rf_i64 column = at.first; column < feature.dim; column += 32 * LANE_COLUMNS) {
            const int some = (int)min(feature.dim - column, (rf_i64)LANE_COLUMNS);
            products_add(feature, at, column, some, is_narrow ? narrow_grad : at.grad_of(column, some), rows,
                         sums);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            for (int apart = at.lanes / 2; apart > 0; apart /= 2)
                sums[k] += __shfl_xor_sync(RF_FULL_WARP, sums[k], apart);
            const rf_i64 lookup = round + k * at_once + own_slot;
            if (threadIdx.x % at.lanes == 0 && rows[k] >= 0) args.output[lookup] = sums[k];
        }
    }
}
