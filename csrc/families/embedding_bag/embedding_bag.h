/* The embedding bag on a GPU: lowering, and calls without their checks. */
#ifndef RECFUSE_CUDA_EMBEDDING_BAG_H
#define RECFUSE_CUDA_EMBEDDING_BAG_H

#include "gpu/launches/launches.h"

/* Lowers a call with checked params, by a schedule or, if it is NULL, by the defaults of the GPU. */
rf_status rf__embedding_bag_lower(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                  const rf_embedding_bag_schedule *schedule, rf__launches *launches);
/* Fills in the fields of a schedule that are left open, but for `warps`. */
rf_status rf__embedding_bag_complete(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                     rf_embedding_bag_schedule *schedule);

/* Lowers and runs a call with checked params. */
rf_status rf__embedding_bag_run(const rf__cuda_device *device, const rf_embedding_bag_params *params,
                                const rf_embedding_bag_schedule *schedule, void *stream);

/* Lowers a call that is known only by its sizes and types, and by whether it has sample_weights. `alignment`:
 * bytes that rows and output are aligned to, 16 for torch's tensors. *complete: the schedule with the GPU's
 * defaults. Requires rf__launches_init before. RF_ERR_VALUE. */
RF__SHARED rf_status rf__embedding_bag_lower_described(const rf__gpu *gpu,
                                                       const rf_embedding_bag_params *params,
                                                       const rf_embedding_bag_schedule *schedule,
                                                       int32_t alignment, rf__launches *launches,
                                                       rf_embedding_bag_schedule *complete);

#endif
