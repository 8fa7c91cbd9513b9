/* The launch of every kernel. */
#ifndef RECFUSE_CUDA_DRIVER_LAUNCH_H
#define RECFUSE_CUDA_DRIVER_LAUNCH_H

#include "gpu/driver/device.h"

/* Dimensions y and z may be left 0, which counts as 1; of a cluster all. */
typedef struct rf__launch_config {
    rf__cu_function function;
    uint32_t grid[3], block[3]; /* blocks, threads */
    uint32_t cluster[3];        /* blocks that run together on one GPC; all 0: no clusters */
    uint32_t shared_bytes; /* dynamic; at most that with which the kernel was loaded: rf__kernel_options */
    bool cooperative; /* all blocks run at once, or the launch fails */
    /* Begins before the stream's last kernel has ended, if the GPU supports it:
     * rf_wait_for_previous_kernel. */
    bool programmatic;
    void *stream;
} rf__launch_config;

/* Launches a kernel whose only parameter is the struct `arguments`, which is copied. In the device's context;
 * never waits. RF_ERR_UNSUPPORTED: clusters before compute capability 9.0. RF_ERR_CUDA: the driver refuses,
 * for example a grid beyond 2^31 - 1, 65,535 and 65,535 blocks, or one that is not whole clusters. */
rf_status rf__launch(const rf__cuda_device *device, const rf__launch_config *config, const void *arguments);

/* Returns how many of a launch's clusters the device runs at once. In its context; the same errors. */
rf_status rf__launch_clusters(const rf__cuda_device *device, const rf__launch_config *config,
                              int32_t *clusters);

#endif
