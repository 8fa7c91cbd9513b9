/* Kernels compiled at run time: sources next to this library, a cache on disk, modules on a device. */
#ifndef RECFUSE_CUDA_JIT_H
#define RECFUSE_CUDA_JIT_H

#include <stddef.h>

#include "gpu/driver/device.h"
#include "gpu/driver/launch.h"

/* A kernel of a file in kernels/, a folder next to this library, as is include/ with the headers of codes. */
typedef struct rf__kernel_source {
    const char *file; /* "families/X/X.cu" */
    const char *entry; /* "rf_X", extern "C" */
} rf__kernel_source;

/* The specialisation of a kernel. */
typedef struct rf__kernel_options {
    char defines[8192]; /* "-DRF_DIM=128 -DRF_BLOCK=256": options of the compiler between spaces */
    int32_t dynamic_shared; /* bytes a block at launch; does not change the code */
} rf__kernel_options;

/* A kernel that is loaded on a device; lives as long as the process. */
typedef struct rf__kernel {
    rf__cu_function function;
    int32_t registers, static_shared, dynamic_shared; /* a thread; bytes a block */
    int32_t clusters; /* atomic: number that the device runs at once, 0: not queried yet */
} rf__kernel;

/* Returns the clusters of a launch of the kernel that the device runs at once; queried once. In the device's
 * context. */
rf_status rf__kernel_clusters(const rf__cuda_device *device, const rf__kernel *kernel,
                              const rf__launch_config *config, int32_t *clusters);

/* The compiler's report of a GPU kernel, and the kernel's origin. -1: not reported. */
typedef struct rf__kernel_info {
    int32_t registers; /* a thread */
    int32_t spill_bytes; /* a thread, stores and loads together */
    int32_t stack_bytes; /* a thread */
    int32_t shared_bytes; /* a block */
    int64_t cubin_bytes;
    double seconds; /* that this call took */
    bool cached; /* taken from the cache on disk */
    char path[512]; /* of the entry there; "": it could not be written, or is longer than this */
} rf__kernel_info;

/* Compiles for `arch` ("sm_90a"), which takes seconds, or reads the cache on disk; needs no GPU. The caller
 * frees *cubin [*cubin_bytes]; `cubin` and `info` may be NULL. RF_ERR_UNSUPPORTED: it is not in the cache,
 * and there is no compiler or RECFUSE_JIT=off forbids it; RF_ERR_COMPILE: it does not compile, with the
 * compiler's text. */
RF__SHARED rf_status rf__jit_compile(const rf__kernel_source *source, const rf__kernel_options *options,
                                     const char *arch, void **cubin, int64_t *cubin_bytes,
                                     rf__kernel_info *info);

/* As above, but only from the cache: false if it is missing. */
RF__SHARED bool rf__jit_is_cached(const rf__kernel_source *source, const rf__kernel_options *options,
                                  const char *arch, rf__kernel_info *info);

/* Turns a key into options, which are zeros; called at a miss only. */
typedef rf_status (*rf__kernel_describe)(const void *key, rf__kernel_options *options);

/* Returns the kernel for `key`, a small struct that is compared bytewise, so its padding must be zero;
 * `source` and `device` are compared by address. If many threads request a kernel at once, one thread creates
 * it and the others wait; other kernels do not wait. A failure is not remembered. A loaded kernel is found
 * without a lock; otherwise this compiles, which takes seconds, and loads, which may wait for the device. */
rf_status rf__jit_kernel(const rf__cuda_device *device, const rf__kernel_source *source, const void *key,
                         size_t key_size, rf__kernel_describe describe, const rf__kernel **kernel);

/* An integer type's name in kernels. */
const char *rf__kernel_integer(int32_t int_type);

/* False when RECFUSE_JIT=off forbids compiling. */
RF__SHARED bool rf__jit_allowed(void);

#endif
