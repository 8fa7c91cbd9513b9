/* The host part of the small path: selection of features (small.c), tasks of blocks (small_tasks.c), launches
 * (small_launch.c). */
#ifndef RECFUSE_CUDA_BACKWARD_SMALL_H
#define RECFUSE_CUDA_BACKWARD_SMALL_H

#include "families/fused_backward/backward.h"
#include "families/fused_backward/small/backward_small_args.h"

/* A small feature. */
typedef struct rf_small_feature {
    rf_i64 row, start, factors; /* as of tasks */
    rf_i32 number, rows, padding_idx;
    rf_i32 output_column, matrix, dim;
} rf_small_feature;
RF_SIZE_IS(rf_small_feature, 48);

/* Lists and tasks of blocks, determined by features and sizes, and by the approximate number of lookups. */
typedef struct rf__backward_small_plan {
    int64_t n_features; /* small features; 0: all other fields are unused */
    void *description; /* [description_bytes]: lists and tasks, for an upload aligned to 16 bytes */
    int64_t description_bytes, tasks_at;
    int32_t n_lists, n_staged, n_gathered; /* tasks: those that stage gradients come first */
    int32_t lists_shared, staged_shared, most_staged_shared; /* bytes a block */
    int64_t factors_at, list_at; /* in the workspace, aligned to 16 bytes; starts are in front of them */
    bool any_mean;
    rf__backward_traffic traffic;
} rf__backward_small_plan;

/* Takes the small features out of `features` [n_features]: their pooling becomes -1. The caller frees the
 * plan, also on failure. RF_ERR_MEMORY. */
rf_status rf__backward_small_take(const rf__gpu *gpu, const rf__backward_problem *problem,
                                  rf_backward_feature *features, rf__backward_small_plan *plan);
void rf__backward_small_free(rf__backward_small_plan *plan);
/* Returns the bytes of workspace for a call with this many lookups. */
int64_t rf__backward_small_workspace(const rf__backward_small_plan *plan, int64_t lookups);

/* Adds the launches of a plan, whose description is at byte `upload_at` of upload 0, and its workspace at
 * `workspace_at`. */
rf_status rf__backward_small_lower(const rf__backward_problem *problem, const rf__backward_small_plan *plan,
                                   int64_t upload_at, int64_t workspace_at, rf__launches *launches);

/* The sizes by which features are cut into tasks of small_rows.cu. */
typedef struct rf__backward_small_sizes {
    int64_t bags, sms;
    double lookups; /* a feature, about */
    int64_t staged_bytes; /* of shared memory per block */
    int32_t epilogue;
    rf_dtype dtype; /* of the matrices */
} rf__backward_small_sizes;
/* The columns of a task, of a feature of `dim` columns; *staged: whether their gradients are. */
int32_t rf__backward_small_columns(const rf__backward_small_sizes *sizes, int32_t dim, bool *staged);
/* Computes tasks of similar size, heavy ones first, staged ones before the others. The caller frees *tasks by
 * free(). RF_ERR_MEMORY. */
rf_status rf__backward_small_tasks(const rf__backward_small_sizes *sizes, const rf_small_feature *features,
                                   int64_t n_features, rf_small_task **tasks, int32_t *n_staged,
                                   int32_t *n_gathered);

#endif
