/* A record of the launches of calls: of calls that run on a GPU, or of calls on the CPU's tensors that are
 * lowered for a described GPU instead of run. */
#ifndef RECFUSE_CUDA_EXPLAIN_H
#define RECFUSE_CUDA_EXPLAIN_H

#include "gpu/launches/launches.h"

/* A launch. `launch.key`, `arguments` and `describe` are no longer valid. */
typedef struct rf__explained {
    const char *name; /* of the operator; static */
    rf__gpu gpu;
    rf__kernel_launch launch;
    int64_t workspace_bytes; /* of the call */
    int32_t dynamic_shared; /* with which the kernel is loaded, at least that of the launch */
    int32_t call; /* the calls' number, from 0: launches of one call have one number */
    char *defines; /* "" of a fill */
} rf__explained;

/* Begins a record; only one may be active. With a GPU, calls of this thread on the CPU's tensors are lowered
 * for it and return undefined results; calls of other threads run. RF_ERR_VALUE: a record is active already.
 * RF_ERR_MEMORY. */
RF__SHARED rf_status rf__explain_begin(const rf__gpu *gpu);
/* Ends it, on the thread that began it. *launches [*count] is the caller's: rf__explained_free. */
RF__SHARED void rf__explain_end(rf__explained **launches, int32_t *count);
RF__SHARED void rf__explained_free(rf__explained *launches, int32_t count);

/* Sets *explained [launches->count] to the caller's descriptions of launches, which need no record.
 * RF_ERR_MEMORY. */
RF__SHARED rf_status rf__explained_of(const rf__gpu *gpu, const rf__launches *launches,
                                      rf__explained **explained);

/* Returns true if a record is active. */
bool rf__explains(void);
/* Adds launches to it. */
rf_status rf__explain_record(const rf__gpu *gpu, const rf__launches *launches);

#endif
