/* The row that supplied the maximum of each column of each bag, for features that pool by maximum; -1 if no
 * lookup counts and in the columns of other features. The first of equal values wins, and a NaN wins if it
 * comes first, as in the forward pass.
 *
 * Thread mapping. A thread has four columns of a bag (of wide rows, several sets of four). The lanes of a bag
 * are adjacent. A block has bags of one feature, found by bisection among the features' first blocks. Rows
 * are compared in their order, four in flight.
 * Launch: grid [blocks], block [RF_BAGS_BLOCK].
 */
#include "families/fused_backward/bags/backward_bags.cuh"

enum { ROWS = 4 /* rows in flight */ };

/* Returns the feature of a block. */
RF_INLINE rf_i64 feature_of(const rf_bags_args &args, rf_i64 block) {
    rf_i64 first = 0, end = args.n_features;
    while (end - first > 1) {
        const rf_i64 middle = first + (end - first) / 2;
        if (rf_load(&args.features[middle].first_block) <= block) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

/* Compares the rows of a bag in `count` columns from `column` on. */
RF_INLINE void columns_compare(const rf_bags_args &args, const rf_bags_feature &feature, const bag_t &bag,
                               rf_i64 column, int count, bool is_aligned, rf_i64 *winners) {
    columns_t best = {};
    rf_i64 won[LANE_COLUMNS] = {-1, -1, -1, -1};
    for (rf_i64 at = bag.from; at < bag.to; at += ROWS) {
        rf_i64 rows[ROWS];
        columns_t values[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) rows[k] = at + k < bag.to ? row_of(args, feature, at + k) : -1;
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (rows[k] >= 0)
                values[k] = columns_of(feature.weight, feature.dtype, rows[k] * feature.dim + column, count,
                                       is_aligned);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (rows[k] < 0) continue;
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) {
                const bool wins = won[i] < 0 || values[k].of[i] > best.of[i];
                best.of[i] = wins ? values[k].of[i] : best.of[i];
                won[i] = wins ? rows[k] : won[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++)
        if (i < count) winners[column + i] = won[i];
}

extern "C" __global__ void __launch_bounds__(RF_BAGS_BLOCK)
    rf_winners(const __grid_constant__ rf_bags_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 number = feature_of(args, blockIdx.x);
    const rf_bags_feature feature = args.features[number];
    const int lanes = lanes_of(feature.dim, BLOCK);
    const rf_i64 bag = (blockIdx.x - feature.first_block) * (BLOCK / lanes) + threadIdx.x / lanes;
    if (bag >= args.bags) return;
    const bool is_aligned = are_aligned(feature.weight, feature.dtype, feature.dim, feature.dim);
    const bag_t lookups = feature.pooling == RF_MAX ? bag_of(args, number, bag) : bag_t{0, 0};
    rf_i64 *winners = args.winners + bag * args.output_dim + feature.output_column;
    for (rf_i64 column = threadIdx.x % lanes * LANE_COLUMNS; column < feature.dim;
         column += lanes * LANE_COLUMNS) {
        const int count = (int)min(feature.dim - column, (rf_i64)LANE_COLUMNS);
        columns_compare(args, feature, lookups, column, count, is_aligned, winners);
    }
}
