/* The embedding bag on a GPU: lowering, and calls without their checks. */
#ifndef RECFUSE_CUDA_EMBEDDING_BAG_H
#define RECFUSE_CUDA_EMBEDDING_BAG_H

#include "gpu/launches/launches.h"

/* Lowers a call with checked params, by a schedule or, if it is NULL, by the defaults of the GPU. */
rf_status rf__embedding_bag_lower(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                  const rf_embedding_bag_schedule *schedule, rf__launches *launches);
/* Fills in the fields of a schedule that are left open, but for `warps`; *shared_bytes: that a block uses. */
rf_status rf__embedding_bag_complete(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                     rf_embedding_bag_schedule *schedule, int32_t *shared_bytes);

/* Lowers and runs a call with checked params. */
rf_status rf__embedding_bag_run(const rf__cuda_device *device, const rf_embedding_bag_params *params,
                                const rf_embedding_bag_schedule *schedule, void *stream);

/* rf_embedding_bag_compile for a GPU. `complete` may be NULL. Without `compiles` only the schedule is checked
 * and completed. */
RF__SHARED rf_status rf__embedding_bag_compile(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                               const rf_embedding_bag_schedule *schedule, int32_t alignment,
                                               bool compiles, rf_kernel_info *info,
                                               rf_embedding_bag_schedule *complete);

#endif
