/* A lowered backward problem: its description, which many batches share, and its launches.
 *
 * A description contains all data that the kernels read of a call except its lookups, gradients, weights and
 * states: features of the general path, lists and tasks of the small path. It depends on features, sizes and
 * alignments, and on the approximate number of lookups.
 */
#ifndef RECFUSE_CUDA_BACKWARD_LOWERING_H
#define RECFUSE_CUDA_BACKWARD_LOWERING_H

#include "families/fused_backward/general/general.h"
#include "families/fused_backward/small/small.h"
#include "gpu/launches/description.h"

typedef struct rf__backward_description {
    rf__backward_features general;
    rf__backward_small_plan small;
    int64_t small_at; /* bytes of the upload: after features of the general path */
} rf__backward_description;

/* Sizes and alignments from which a description is made, without padding; features are compared
 * separately. */
typedef struct rf__backward_key {
    int64_t n_features;
    int64_t bags, lookups, output_dim; /* lookups rounded up */
    int32_t n_matrices, dtype, grad_dtype, grad_alignment;
    int32_t epilogue, row_sparse, weighted, omitted;
    struct {
        int64_t buffer, rows;
        int32_t dim, weight_alignment, state_alignment, unused;
    } matrices[RF_BACKWARD_MOST_MATRICES];
} rf__backward_key;
rf__backward_key rf__backward_key_of(const rf__backward_problem *problem);

/* An rf__description_make; its problem is an rf__backward_problem. */
rf_status rf__backward_description_make(const rf__gpu *gpu, const void *problem, rf__description *to);

/* Adds the launches of a batch: all, or with `row_sparse` those up to the number of rows, which is at *counts_at
 * of the workspace (rf__backward_counts_at); nothing is counted if *counts_at is 0. Description NULL: no
 * lookups. */
rf_status rf__backward_lower(const rf__gpu *gpu, const rf__backward_description *description,
                             const rf__backward_problem *problem, rf__launches *launches, int64_t *counts_at);
/* Adds the launches after them, in the same workspace; the matrices point to memory for rows and their
 * numbers. */
rf_status rf__backward_row_sparse_lower(const rf__gpu *gpu, const rf__backward_description *description,
                                        const rf__backward_problem *problem, rf__launches *launches);

/* Puts the work into the stream; with `row_sparse` waits for the number of rows. */
rf_status rf__backward_run(const char *operator_name, rf__backward_problem *problem,
                           const rf_cuda_allocator *allocator, const rf_cuda_stream *stream);

#endif
