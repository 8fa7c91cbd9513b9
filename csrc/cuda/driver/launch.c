#include "cuda/driver/launch.h"

static uint32_t or_1(uint32_t size) { return size > 0 ? size : 1; }

rf_status rf__launch(const rf__cuda_device *device, const rf__launch_config *config, const void *arguments) {
    enum { HOPPER = 9 };
    const uint32_t *grid = config->grid, *block = config->block, *cluster = config->cluster;
    const bool clusters = (cluster[0] | cluster[1] | cluster[2]) != 0;
    rf__cu_launch_attribute attributes[3] = {0};
    uint32_t count = 0;
    RF_FAIL_IF(clusters && device->cc_major < HOPPER, RF_ERR_UNSUPPORTED,
               "clusters of blocks need a GPU of compute capability 9.0 or more, this is a %s", device->arch);
    if (clusters) {
        for (int i = 0; i < 3; i++) attributes[count].value.cluster[i] = or_1(cluster[i]);
        attributes[count++].id = RF__CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    }
    if (config->cooperative) {
        attributes[count].value.cooperative = 1;
        attributes[count++].id = RF__CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    }
    if (config->programmatic && device->cc_major >= HOPPER) {
        attributes[count].value.programmatic_stream_serialization = 1;
        attributes[count++].id = RF__CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    }
    const rf__cu_launch_config all = {.grid = {grid[0], or_1(grid[1]), or_1(grid[2])},
                                      .block = {block[0], or_1(block[1]), or_1(block[2])},
                                      .shared_bytes = config->shared_bytes,
                                      .stream = config->stream,
                                      .attributes = attributes,
                                      .n_attributes = count};
    void *parameters[] = {(void *)(uintptr_t)arguments};
    return rf__cuda_status(device->driver->cuLaunchKernelEx(&all, config->function, parameters, NULL),
                           "cuLaunchKernelEx");
}
