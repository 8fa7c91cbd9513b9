#include "gpu/driver/launch.h"

static uint32_t or_1(uint32_t size) { return size > 0 ? size : 1; }

enum { MOST_ATTRIBUTES = 3 };

/* Converts a launch to the driver's form. `attributes` [MOST_ATTRIBUTES] must live as long as *all. */
static rf_status config_of(const rf__cuda_device *device, const rf__launch_config *config,
                           rf__cu_launch_attribute *attributes, rf__cu_launch_config *cuda_config) {
    enum { HOPPER = 9 };
    const uint32_t *grid = config->grid, *block = config->block, *cluster = config->cluster;
    const bool clusters = (cluster[0] | cluster[1] | cluster[2]) != 0;
    uint32_t count = 0;
    RF_FAIL_IF(clusters && device->gpu.cc_major < HOPPER, RF_ERR_UNSUPPORTED,
               "clusters of blocks need a GPU of compute capability 9.0 or more, this is a %s",
               device->gpu.arch);
    if (clusters) {
        attributes[count++] = (rf__cu_launch_attribute){
            .id = RF__CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            .value.cluster = {or_1(cluster[0]), or_1(cluster[1]), or_1(cluster[2])}};
    }
    if (config->cooperative) {
        attributes[count++] =
            (rf__cu_launch_attribute){.id = RF__CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    }
    if (config->programmatic && device->gpu.cc_major >= HOPPER) {
        attributes[count++] =
            (rf__cu_launch_attribute){.id = RF__CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                      .value.programmatic_stream_serialization = 1};
    }
    *cuda_config = (rf__cu_launch_config){.grid = {grid[0], or_1(grid[1]), or_1(grid[2])},
                                          .block = {block[0], or_1(block[1]), or_1(block[2])},
                                          .shared_bytes = config->shared_bytes,
                                          .stream = config->stream,
                                          .attributes = count > 0 ? attributes : NULL,
                                          .n_attributes = count};
    return RF_OK;
}

rf_status rf__launch(const rf__cuda_device *device, const rf__launch_config *config, const void *arguments) {
    rf__cu_launch_attribute attributes[MOST_ATTRIBUTES];
    rf__cu_launch_config cuda_config;
    void *parameters[] = {(void *)(uintptr_t)arguments};
    RF_CHECK(config_of(device, config, attributes, &cuda_config));
    return RF__CUDA_CALL(device->driver->cuLaunchKernelEx(&cuda_config, config->function, parameters, NULL));
}

rf_status rf__launch_clusters(const rf__cuda_device *device, const rf__launch_config *config,
                              int32_t *clusters) {
    rf__cu_launch_attribute attributes[MOST_ATTRIBUTES];
    rf__cu_launch_config cuda_config;
    RF_CHECK(config_of(device, config, attributes, &cuda_config));
    return RF__CUDA_CALL(
        device->driver->cuOccupancyMaxActiveClusters(clusters, config->function, &cuda_config));
}
