/* Variants of the fused kernels: what they are compiled with, and how many blocks an SM runs. */
#ifndef RECFUSE_CUDA_FUSED_KERNEL_H
#define RECFUSE_CUDA_FUSED_KERNEL_H

#include "cuda/fused_embedding_bag/features.h"
#include "cuda/jit/jit.h"

enum {
    RF__FUSED_DEFAULT_WARPS = 28, /* of an SM: 72 registers a thread, without spills */
    RF__FUSED_BLOCKS = RF__FUSED_DEFAULT_WARPS * 32 / RF_FUSED_BLOCK /* that an SM runs by default */
};

/* What the code of a kernel depends on, but for its classes, which follow it in the key. */
typedef struct rf__fused_variant {
    int32_t index_type, offset_type, output_dtype;
    int32_t wide_positions, wide_rows, weighted, check, timed;
    int32_t min_blocks, dynamic_shared;
    int32_t n_classes;
    int32_t staged; /* 1: the kernel of staged tables instead */
    int32_t with_staged; /* 1: runs while the kernel of staged tables does */
    int32_t callers_mapping; /* 1: the mapping is the caller's, and tasks are checked */
} rf__fused_variant;

/* Blocks an SM for `warps`, and the bytes of shared memory that keep others out. */
RF__SHARED void rf__fused_occupancy(const rf__cuda_device *device, int32_t warps, rf__fused_variant *variant,
                                    const rf__fused_classes *classes);
/* Makes the variant that runs while the kernel of staged tables does. */
void rf__fused_with_staged(rf__fused_variant *variant, const rf__fused_classes *classes);
/* Of a block, at launch. */
int32_t rf__fused_shared_bytes(const rf__cuda_device *device, const rf__fused_variant *variant,
                               const rf__fused_classes *classes, const rf__kernel *kernel);
/* The kernel of a variant. */
rf_status rf__fused_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                           const rf__fused_classes *classes, const rf__kernel **kernel);
/* That kernel for an architecture, of which `info` tells, and those that batches with staged tables need. */
RF__SHARED rf_status rf__fused_kernel_compile(const char *arch, const rf__fused_variant *variant,
                                              const rf__fused_classes *classes, rf_kernel_info *info);

#endif
