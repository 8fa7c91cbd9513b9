/* Tables of narrow rows that are staged in shared memory as a whole: their choice, and the SM of each.
 *
 * To delete this feature: this folder; in fused_schedule.c staged_complete and staged_fill; in
 * fused_kernel.c, fused_lower.c and fused_prepare.c the code for `staged`; the lists in partition
 * (partition.h, cut.c, write.c, check.c); RF_WITH_STAGED in kernels; RF_FUSED_KIND_STAGED in the public
 * header.
 */
#ifndef RECFUSE_CUDA_FUSED_STAGED_H
#define RECFUSE_CUDA_FUSED_STAGED_H

#include "gpu/driver/gpu.h"
#include "families/fused_embedding_bag/features.h"

/* Follows the lanes in a mapping with staged tables: this row, then `depth` times `lists` tasks, each list
 * ended by a task of feature -1. */
typedef struct rf__fused_staged {
    int32_t depth, lists, unused[6];
} rf__fused_staged;
RF_SIZE_IS(rf__fused_staged, 32);

/* Returns true if a feature's table can be staged. `weight`: its address. */
bool rf__fused_stageable(const rf__fused_geometry *shape, uint64_t weight, int64_t rows);
/* Returns true if a GPU can stage tables for a call of this many lookups. */
bool rf__fused_can_stage(const rf__gpu *gpu, int64_t lookups);
/* The features of a batch on a GPU. All arrays are the caller's, [n_features]. */
typedef struct rf__fused_staging_problem {
    const rf__fused_feature *features;
    int64_t n_features;
    const double *lookups; /* of each feature in the batch */
    const rf__fused_batch *batch;
    int32_t sms;
    bool *staged; /* set by rf__fused_stage */
} rf__fused_staging_problem;

/* Selects the features to stage, by their lookups in the batch; returns their number. */
int64_t rf__fused_stage(const rf__fused_staging_problem *problem);
/* Computes lists of the `n_staged` staged features, one per SM, about equally long: *rows [1 + depth * lists],
 * which the caller frees by free(). */
rf_status rf__fused_staged_lists(const rf__fused_staging_problem *problem, int64_t n_staged,
                                 rf__fused_staged **rows, int64_t *n_rows);

#endif
