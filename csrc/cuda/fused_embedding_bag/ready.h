/* What the launch of a call needs: found, or made. */
#ifndef RECFUSE_CUDA_FUSED_READY_H
#define RECFUSE_CUDA_FUSED_READY_H

#include "cuda/fused_embedding_bag/call.h"

/* All that a launch needs to know; zeros are nothing. */
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
    /* What must not be dropped before the launch is in the stream. */
    rf__fused_call *call;
    rf__fused_mapped *mapped;
} rf__fused_ready;

/* Finds or makes the description, the kernels and the mapping of a call: RF_ERR_VALUE and so on where an argument is
 * bad. To be released, also where it fails. */
rf_status rf__fused_prepare(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                            const rf_fused_plan *plan, rf__fused_ready *ready);
/* The same with the kernel that times its blocks and has these classes; without a mapping. */
rf_status rf__fused_prepare_timed(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                  const rf_fused_plan *plan, const rf__fused_classes *classes,
                                  rf__fused_ready *ready);
/* When the launch is in the stream. Zeros are fine, and left. */
void rf__fused_release(rf__fused_ready *ready);

/* rf__check_fused_rows for the features of `ready`, which it remembers: the same columns are not checked again. */
rf_status rf__fused_check_rows(const rf__fused_ready *ready, const rf_fused_embedding_bag_params *params,
                               const int64_t *columns);

/* Bytes of workspace that a mapping needs. */
int64_t rf__fused_workspace(const rf__fused_mapping *mapping);

#endif
