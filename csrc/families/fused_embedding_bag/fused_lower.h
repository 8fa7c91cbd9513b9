/* The fused embedding bags lowered. */
#ifndef RECFUSE_CUDA_FUSED_LOWER_H
#define RECFUSE_CUDA_FUSED_LOWER_H

#include "families/fused_embedding_bag/fused_kernel.h"
#include "families/fused_embedding_bag/partition/map_lower.h"
#include "families/fused_embedding_bag/partition/partition.h"

/* A batch with the facts that its descriptions have of it (fused_prepare.h). Pointers are borrowed. */
typedef struct rf__fused_problem {
    const rf_fused_embedding_bag_params *params; /* checked; with bags and columns */
    const rf__fused_class_list *classes;
    const rf__fused_traffic *traffic;
    bool wide_rows; /* a table has more rows than 32 bits count */
    bool callers_mapping;
    int32_t warps; /* as in rf_fused_plan */
    const rf__fused_map_table *map_table; /* not NULL: partition/map.cu maps by it */
    /* Otherwise: the mapping's first row, its staged tables, and their share of the batch, 0 to 1. */
    rf__fused_mapping mapping;
    rf__fused_staged staged;
    double staged_share;
    rf__cu_pointer cycles; /* uint64_t [n_features]: blocks are timed; 0: they are not */
} rf__fused_problem;

/* Lowers to at most four launches, which read two uploads: RF__FUSED_UPLOAD_FEATURES (rf_fused_descriptor
 * [n_features]) and RF__FUSED_UPLOAD_PARTITION (the mapping, or the table of map.cu). */
rf_status rf__fused_lower(const rf__gpu *gpu, const rf__fused_problem *problem, rf__launches *launches);

/* Sets the tables whose errors launches of these params raise and report; called by rf__fused_lower. */
void rf__fused_owner_set(const rf_fused_embedding_bag_params *params, rf__launches *launches);

/* Lowers a problem without a mapping to the kernels of all of its batches, by grids of one task: without
 * staged tables, and with them if a batch may have them. Only the kernels of these launches are valid. */
RF__SHARED rf_status rf__fused_lower_any(const rf__gpu *gpu, const rf__fused_problem *problem,
                                         rf__launches *launches);

#endif
