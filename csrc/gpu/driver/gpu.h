/* A GPU as a plain struct: the facts that launches are decided by. Needs no driver. */
#ifndef RECFUSE_CUDA_DRIVER_GPU_H
#define RECFUSE_CUDA_DRIVER_GPU_H

#include "core/status.h"

typedef struct rf__gpu {
    char name[96]; /* "H100", or the driver's name of a device */
    char arch[16]; /* of its kernels: "sm_80", "sm_90a" */
    int32_t sms, cc_major, cc_minor;
    int32_t threads_per_sm, blocks_per_sm;
    int64_t registers_per_sm, shared_per_sm, shared_per_block_optin, reserved_shared_per_block;
    int64_t l2_bytes;
    /* Rates; 0: unknown. */
    double clock; /* Hz, of the SMs under load */
    double bytes_per_second; /* of device memory */
    double flops_per_clock; /* per SM, float32 outside of tensor cores */
    double tensor_flops_per_clock; /* per SM, float16 with float32 sums, dense */
} rf__gpu;

/* Returns the known GPUs [count]; those of one architecture are adjacent, the typical one first. */
RF__SHARED const rf__gpu *rf__gpus(int32_t *count);

/* Describes a GPU by its name ("H100", in any case), or by its architecture: "sm_90a" is the typical GPU,
 * "sm_90a:114:50" a GPU with that many SMs and MiB of L2. An architecture that is not in the table is
 * described by the nearest previous known GPU. RF_ERR_VALUE: neither; the message has the names. */
RF__SHARED rf_status rf__gpu_find(const char *name, rf__gpu *gpu);

/* Adds the rates of the most similar known GPU to a GPU of the driver. */
void rf__gpu_add_rates(rf__gpu *gpu);

#endif
