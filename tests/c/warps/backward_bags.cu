/* Kernels of the backward that work bag by bag, on the host. */
#include "warps.h"

#include "families/fused_backward/bags/backward_bags.cuh"

#include "families/fused_backward/bags/sample_weights.cu"
#include "families/fused_backward/bags/winners.cu"

static void winners_block(const void *args) { rf_winners(*static_cast<const rf_bags_args *>(args)); }
static void weights_block(const void *args) { rf_sample_weights(*static_cast<const rf_bags_args *>(args)); }

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void bags_winners(const void *args, unsigned blocks, rf_u64 seed) {
    run_blocks(winners_block, args, blocks, BLOCK, seed);
}
EXPORTED void bags_weights(const void *args, unsigned blocks, unsigned parts, rf_u64 seed) {
    gridDim.y = parts;
    for (blockIdx.y = 0; blockIdx.y < parts; blockIdx.y++)
        run_blocks(weights_block, args, blocks, BLOCK, seed);
}
