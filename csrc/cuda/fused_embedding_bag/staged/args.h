/* Sizes of a block of staged/staged.cu. Read by C11 and by NVRTC. */
#ifndef RECFUSE_CUDA_FUSED_STAGED_ARGS_H
#define RECFUSE_CUDA_FUSED_STAGED_ARGS_H

enum {
    RF_FUSED_STAGED_BLOCK = 640, /* threads that pool */
    RF_FUSED_STAGED_HELPERS = 128, /* producer threads, that load tables for them */
    RF_FUSED_STAGED_BAGS = 512, /* of a task, at most */
    RF_FUSED_STAGED_RING = 210944, /* bytes of shared memory for tables */
    RF_FUSED_STAGED_SHARED = RF_FUSED_STAGED_RING + 15360 /* and lists of bags */
};

#endif
