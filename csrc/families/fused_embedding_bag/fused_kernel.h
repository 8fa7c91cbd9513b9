/* Variants of the fused kernels: the options that they are compiled with, and their shared memory. */
#ifndef RECFUSE_CUDA_FUSED_KERNEL_H
#define RECFUSE_CUDA_FUSED_KERNEL_H

#include "families/fused_embedding_bag/features.h"
#include "gpu/launches/launches.h"

enum {
    RF__FUSED_DEFAULT_WARPS = 28, /* per SM: 72 registers per thread, without spills */
    RF__FUSED_BLOCKS = RF__FUSED_DEFAULT_WARPS * 32 / RF_FUSED_BLOCK /* that an SM runs by default */
};

/* A list of classes that some kernel has compiled in. Equal lists have one address, and stay until the
 * process ends: so the address stands for all of them in the key of a kernel. */
typedef struct rf__fused_class_list {
    struct rf__fused_class_list *next; /* fused_kernel.c's */
    int32_t count;
    int32_t pool_rows; /* row numbers that a warp hands out at once, at most, by classes that pool */
    int32_t sum_bytes; /* that warps sharing a bag leave their sums in */
    bool has_columns, has_staged; /* classes of these kinds */
    rf__fused_class of[];
} rf__fused_class_list;

/* The list of these classes. Takes no lock. */
RF__SHARED rf_status rf__fused_class_list_of(const rf__fused_classes *classes,
                                             const rf__fused_class_list **list);

/* Everything on which the code of a kernel depends; compared bytewise, so it has no padding. */
typedef struct rf__fused_variant {
    const rf__fused_class_list *classes;
    int32_t index_type, offset_type, output_dtype;
    int32_t wide_positions, wide_rows, weighted, check, timed;
    int32_t min_blocks, dynamic_shared;
    int32_t staged; /* 1: the kernel of staged tables */
    int32_t with_staged; /* 1: runs while the kernel of staged tables does */
    int32_t callers_mapping; /* 1: the mapping is the caller's, and tasks are checked */
    int32_t unused; /* 0 */
} rf__fused_variant;
_Static_assert(sizeof(rf__fused_variant) == sizeof(void *) + 14 * sizeof(int32_t), "compared bytewise");

/* Completes a variant of fused_embedding_bag.cu, and a launch by its kernel, threads and shared memory. An SM
 * runs at most `warps` warps of it; 0: the default, without a limit. */
void rf__fused_kernel_choose(const rf__gpu *gpu, int32_t warps, rf__fused_variant *variant,
                             rf__kernel_launch *launch);
/* As above, for staged/staged.cu: clears the parts of the variant on which its code does not depend. */
void rf__fused_staged_kernel_choose(rf__fused_variant *variant, rf__kernel_launch *launch);

#endif
