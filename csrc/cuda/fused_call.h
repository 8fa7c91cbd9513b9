/* Fused calls that are prepared once and launched often: their features on the device, their kernels, and their
 * mappings by number of bags. */
#ifndef RECFUSE_CUDA_FUSED_CALL_H
#define RECFUSE_CUDA_FUSED_CALL_H

#include "cuda/fused_map_device.h"

/* A mapping that is on the device. */
typedef struct rf__fused_mapped {
    struct rf__fused_mapped *next;
    rf__fused_mapping head;
    rf__fused_staged staged; /* depth 0: no tables are */
    int64_t bags; /* it is for at most so many */
    bool may_stage; /* as the batch that it was made for */
    rf__cu_pointer on_device;
} rf__fused_mapped;

typedef struct rf__fused_call rf__fused_call;

/* The call for these features, buffers and schedules, made where it is new: RF_ERR_VALUE and so on where an argument
 * is bad. In the device's context. To be released when its launch is in the stream. */
rf_status rf__fused_call_acquire(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_plan *plan, void *stream, rf__fused_call **call);
void rf__fused_call_release(rf__fused_call *call);

/* All that a launch needs to know. */
typedef struct rf__fused_ready {
    const rf__kernel *kernel;
    int32_t shared_bytes;
    rf__cu_pointer features;
    rf__fused_mapping mapping;
    rf__cu_pointer mapping_on_device;
    rf__fused_staged staged;
    const rf__kernel *staged_kernel; /* if there are such tables */
    rf__fused_device_map map; /* with a kernel: it makes the mapping, in the workspace */
    int64_t workspace_bytes;
} rf__fused_ready;

/* Finds or makes the kernel and the mapping of a call. */
rf_status rf__fused_call_ready(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               const rf_fused_plan *plan, rf__fused_ready *ready);
/* The same with the kernel that times its blocks and has these classes; without a mapping. */
rf_status rf__fused_call_timed(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               int32_t warps, const rf__fused_classes *classes, rf__fused_ready *ready);
/* Bytes of workspace that a mapping needs. */
int64_t rf__fused_workspace(const rf__fused_mapping *mapping);
/* Puts the work into the stream. `cycles`: uint64_t [n_features] on the device, if blocks are timed. */
rf_status rf__fused_launch(const rf__cuda_device *device, const rf__fused_ready *ready,
                           const rf_fused_embedding_bag_params *params, void *workspace,
                           rf__cu_pointer cycles, void *stream);

#endif
