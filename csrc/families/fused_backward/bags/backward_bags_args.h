/* Shared by the host and the kernels winners.cu and sample_weights.cu. Read by C11 and by NVRTC, as
 * "families/fused_backward/bags/backward_bags_args.h" on both sides. */
#ifndef RECFUSE_CUDA_BACKWARD_BAGS_ARGS_H
#define RECFUSE_CUDA_BACKWARD_BAGS_ARGS_H

#include "families/fused_backward/backward_args.h"

enum { RF_BAGS_BLOCK = 128 }; /* threads */

/* A feature with a table of any dtype. */
typedef struct rf_bags_feature {
    RF_BACKWARD_ADDRESS(const rf_u8) weight; /* [rows, dim] of dtype */
    RF_BACKWARD_ADDRESS(const rf_u8) parameters; /* scale and bias of row 0, of a quantised table */
    rf_i64 pitch, parameters_pitch; /* bytes from row to row */
    rf_i64 rows, padding_idx; /* -1: no padding */
    rf_i64 output_column;
    rf_i64 dim;
    rf_i32 dtype, pooling;
    rf_i64 first_block; /* of winners.cu */
} rf_bags_feature;
RF_SIZE_IS(rf_bags_feature, 80);

typedef struct rf_bags_args {
    RF_BACKWARD_ADDRESS(const RF_INDEX) indices; /* [lookups] */
    RF_BACKWARD_ADDRESS(const RF_OFFSET) offsets; /* [n_features * bags + 1] */
    RF_BACKWARD_ADDRESS(const rf_bags_feature) features; /* [n_features] */
    RF_BACKWARD_ADDRESS(const rf_u8) grad; /* [bags, output_dim]; of sample_weights.cu */
    RF_BACKWARD_ADDRESS(float) output; /* [lookups], zeros; of sample_weights.cu */
    RF_BACKWARD_ADDRESS(rf_i64) winners; /* [bags, output_dim]; of winners.cu */
    rf_i64 lookups, bags, n_features, output_dim;
} rf_bags_args;
RF_SIZE_IS(rf_bags_args, 80);

#endif
