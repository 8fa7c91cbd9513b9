/* Backward calls that are described once and launched often, as cuda/fused_embedding_bag/call.h has the forward's.
 *
 * A description is what the kernels read of a call beside its lookups, gradients, weights and states: features, lists and
 * tasks. It depends on features, sizes and alignments, and on how many lookups there are, about.
 *
 * Where it is, and the locks: as of the forward's. In memory of the caller's allocator, and of one stream; a captured call
 * has one that is resident, and stays until the process ends. */
#ifndef RECFUSE_CUDA_BACKWARD_CALL_H
#define RECFUSE_CUDA_BACKWARD_CALL_H

#include "cuda/fused_embedding_bag/backward/backward.h"
#include "cuda/fused_embedding_bag/backward/small/small.h"

/* What a description is made for, but for what pointers lead to; without padding. */
typedef struct rf__backward_call_key {
    uint64_t stream_id, allocate;
    int64_t n_features;
    int64_t bags, lookups, output_dim; /* lookups rounded up */
    int32_t n_matrices, dtype, grad_dtype, grad_alignment;
    int32_t emit, listed, weighted, unused;
    struct {
        int64_t buffer, rows;
        int32_t dim, weight_alignment, state_alignment, unused;
    } matrices[RF_BACKWARD_MOST_MATRICES];
} rf__backward_call_key;

/* A description. What it is made for and of never changes; the list and counts are under the device's lock. */
typedef struct rf__backward_call {
    struct rf__backward_call *next; /* used less recently */
    rf__cuda_store store; /* where its memory is */
    int32_t users; /* launches under way */
    bool dropped; /* from the list: the last user frees it */
    int64_t bytes; /* on the device */
    /* What it was made for. */
    rf__backward_call_key key;
    rf_feature *given; /* [n_features] */
    /* What was made of it. The arrays themselves are on the device alone. */
    rf__backward_features described; /* of the general path */
    rf__backward_small_plan plan;
    rf__cuda_block features; /* [n_features] rf_backward_feature, if some take the general path */
    rf__cuda_block description; /* of the plan */
} rf__backward_call;

/* The problem as the small path has it. */
rf__backward_small_call rf__backward_small_call_of(const rf__backward_problem *problem,
                                                   const rf__cuda_device *device);
/* Which features take which path: of those in `described`, the plan takes what the small one is for. */
rf_status rf__backward_paths(const rf__cuda_device *device, const rf__backward_problem *problem,
                             rf__backward_features *described, rf__backward_small_plan *plan);
/* Finds or makes the description of a problem, and holds it. RF_ERR_MEMORY and so on. */
rf_status rf__backward_call_acquire(const rf__cuda_store *store, const rf__backward_problem *problem,
                                    rf__backward_call **call);
/* When the launches are in the stream: frees what is dropped and has no other user. */
void rf__backward_call_release(rf__backward_call *call);

#endif
