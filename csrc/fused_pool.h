/* The fused embedding bag on a GPU for callers that have an allocator of device memory: rf_fused_embedding_bag_cuda
 * without asking for the size of its workspace before, which finds the prepared call twice.
 */
#ifndef RECFUSE_FUSED_POOL_H
#define RECFUSE_FUSED_POOL_H

#include "recfuse.h"

typedef struct rf__allocator {
    /* Called once at most, and only for more than 0 bytes; no lock is held and no context entered. What it gives lives
     * until the work in the stream is done. */
    rf_status (*allocate)(void *context, int64_t bytes, void **memory);
    void *context;
} rf__allocator;

rf_status rf__fused_pool(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                         const rf__allocator *allocator, const rf_cuda_stream *stream);

#endif
