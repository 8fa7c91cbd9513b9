/* What the measuring code needs of rf_embedding_bag_cuda: a launch without its checks. */
#ifndef RECFUSE_CUDA_EMBEDDING_BAG_H
#define RECFUSE_CUDA_EMBEDDING_BAG_H

#include "cuda/driver/device.h"

/* Launches; the device's context is current and params are checked. */
rf_status rf__embedding_bag_launch(const rf__cuda_device *device, const rf_embedding_bag_params *params,
                                   const rf_embedding_bag_schedule *schedule, void *stream);

/* rf_embedding_bag_compile for a GPU of so many SMs and so much L2, on which defaults depend; sms 0: a typical one.
 * arch NULL: checks and completes the schedule alone, and leaves info as it is. */
RF__SHARED rf_status rf__embedding_bag_compile_for(const rf_embedding_bag_params *params,
                                                   const rf_embedding_bag_schedule *schedule,
                                                   int32_t alignment, const char *arch, int32_t sms,
                                                   int64_t l2_bytes, rf_kernel_info *info,
                                                   rf_embedding_bag_schedule *complete);

/* Raises what earlier calls with this table left. */
rf_status rf__embedding_bag_pending(const rf__cuda_device *device, const rf_embedding_bag_params *params,
                                    void *stream);

#endif
