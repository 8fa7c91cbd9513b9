/* The work of a batch, cut into tasks that are not written yet: between cost.c, cut.c and write.c. */
#ifndef RECFUSE_CUDA_FUSED_CUT_H
#define RECFUSE_CUDA_FUSED_CUT_H

#include "families/fused_embedding_bag/partition/partition.h"

/* The estimate for a feature's bags. */
typedef struct rf__fused_estimate {
    double mean; /* lookups of a bag */
    double cost; /* that a block takes for the bags that it works on at once */
    double misses; /* cost of all bags of a slice if their rows come from memory */
    double work; /* cost of all bags and slices */
    int32_t number; /* of its class; -1: nothing to cut */
    int32_t rank; /* by rows per lookup; 0: most */
} rf__fused_estimate;

/* Tasks of equal work: those of a feature's slice, or of a tile. */
typedef struct rf__fused_run {
    int32_t feature; /* or the number of a tile */
    int32_t schedule, slice, split;
    int32_t bags_a_task; /* a task */
    int32_t count; /* of tasks, or of groups of `split` that share their bags; 0: not cut yet */
    float work; /* of a task */
    int64_t next; /* next run with about as much work, while they are written; -1: none */
} rf__fused_run;

struct rf__fused_cut {
    rf__fused_mappable input;
    int32_t bags;
    double target, tile_target; /* work of a task, and of a tile's */
    double *lookups; /* [n_features] */
    bool *staged; /* [n_features] */
    int64_t n_staged;
    rf__fused_estimate *estimates; /* [n_features] */
    int32_t *order; /* of features [n_features] */
    rf__fused_run *runs;
    int64_t n_runs;
    rf_fused_lane *lanes; /* [tiles][32] */
    double *tile_mean; /* of the longest bags in it */
    int64_t n_tiles;
    int64_t n_tasks, n_groups, n_partials;
    rf__fused_staged *lists; /* [list_rows], of staged tables */
    int64_t list_rows;
    int64_t rows; /* of the mapping */
};

/* Sets `estimates`, from lookups and staged tables; returns the total work. */
double rf__fused_estimate_all(rf__fused_cut *cut);
/* Sets `order`, from estimates: features with most rows per lookup come first, because these rows come from
 * memory and take longest; similar features keep their order, so that rows of few features are in L2 at a
 * time. */
void rf__fused_order(rf__fused_cut *cut);

/* Returns the size of the partial sums of a group of tasks that share `bags`, in RF_FUSED_PARTIAL_FLOATS. */
static inline int64_t rf__fused_partials(const rf__fused_class *schedule, int64_t bags) {
    const int64_t elements = rf__elements_in((rf_dtype)schedule->dtype, schedule->align);
    const int64_t floats = (schedule->lanes * schedule->vectors * elements + 1) * bags * schedule->split;
    return (floats + RF_FUSED_PARTIAL_FLOATS - 1) / RF_FUSED_PARTIAL_FLOATS;
}

#endif
