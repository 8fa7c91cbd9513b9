/* Puts launches into a stream: the only file that launches kernels. */
#include <string.h>

#include "gpu/driver/error_check.h"
#include "gpu/driver/memory.h"
#include "gpu/launches/explain.h"
#include "gpu/launches/launches.h"
#include "gpu/tune/occupancy.h"

/* Writes addresses, the error word and tensor maps into the arguments. */
static rf_status bind_all(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                          uint64_t workspace) {
    RF_FAIL_IF(launches->n_bindings > RF__MOST_BINDINGS || launches->n_maps > RF__MOST_TENSOR_MAPS,
               RF_ERR_INTERNAL, "%s: %d bindings and %d tensor maps, at most %d and %d are supported",
               launches->name, (int)launches->n_bindings, (int)launches->n_maps, (int)RF__MOST_BINDINGS,
               (int)RF__MOST_TENSOR_MAPS);
    rf_error_word word = {0};
    bool has_word = false;
    for (int32_t i = 0; i < launches->n_bindings; i++) {
        unsigned char *at = launches->bytes + launches->bindings[i].at;
        const int32_t bound = launches->bindings[i].bound;
        if (bound == RF__BOUND_ERRORS) {
            if (!has_word)
                word = rf__cuda_error_word_of(&device->errors, launches->owner, launches->shape).on_device;
            has_word = true;
            memcpy(at, &word, sizeof word);
            continue;
        }
        uint64_t address;
        memcpy(&address, at, sizeof address);
        address += bound == RF__BOUND_WORKSPACE ? workspace : uploads[bound - RF__BOUND_UPLOAD];
        memcpy(at, &address, sizeof address);
    }
    for (int32_t i = 0; i < launches->n_maps; i++) {
        rf_tensor_map *map = (rf_tensor_map *)(void *)(launches->bytes + launches->maps[i].at);
        RF_CHECK(rf__tensor_map_encode(device->driver, &launches->maps[i].params, map));
    }
    return RF_OK;
}

/* Returns true if the blocks of two overlapping launches would load the SMs evenly. Blocks of the second take
 * the room that the first leaves, so this holds only if each replaces a block of the first, or has an SM to
 * itself. Overlap hides the start of the second, .7 us on an H200. */
static bool is_even(const rf__gpu *gpu, const rf__kernel_launch *launch, const rf__kernel *kernel) {
    const int64_t y = launch->grid[1] > 0 ? launch->grid[1] : 1;
    const int64_t waves = (launch->grid[0] * y + gpu->sms - 1) / gpu->sms;
    return waves == 1 || waves >= rf__occupancy(gpu, kernel->registers, (int32_t)launch->block[0],
                                                kernel->static_shared + kernel->dynamic_shared);
}

/* Shared memory that limits blocks is taken from L1: 0 if registers limit them already. */
static uint32_t shared_bytes_of(const rf__gpu *gpu, const rf__kernel_launch *launch,
                                const rf__kernel *kernel) {
    if (launch->limiting_shared_bytes == 0) return launch->shared_bytes;
    const int64_t by_registers =
        rf__occupancy_by_registers(gpu, kernel->registers, (int32_t)launch->block[0]);
    return by_registers <= launch->most_blocks ? launch->shared_bytes : launch->limiting_shared_bytes;
}

/* Cuts a grid of clusters to those that the GPU runs at once: all SMs, unless those of a GPC are not whole
 * clusters. */
static rf_status grid_cut(const rf__cuda_device *device, const char *name, const rf__kernel *kernel,
                          rf__launch_config *config) {
    int32_t clusters = 0;
    if (config->cluster[0] <= 1) return RF_OK;
    RF_CHECK(rf__kernel_clusters(device, kernel, config, &clusters));
    RF_FAIL_IF(clusters < 1, RF_ERR_UNSUPPORTED,
               "%s: this GPU runs no cluster of %d blocks with %d bytes of shared memory each", name,
               (int)config->cluster[0], (int)config->shared_bytes);
    const uint32_t resident_blocks = (uint32_t)clusters * config->cluster[0];
    if (config->grid[0] > resident_blocks) config->grid[0] = resident_blocks;
    return RF_OK;
}

static rf_status launch_kernel(const rf__cuda_device *device, rf__launches *launches, int32_t number,
                               const rf__kernel *kernel, void *stream) {
    const rf__kernel_launch *launch = &launches->launches[number];
    void *arguments = rf__launches_arguments(launches, number);
    rf__launch_config config = {
        .function = kernel->function,
        .shared_bytes = shared_bytes_of(&device->gpu, launch, kernel),
        .cooperative = launch->cooperative,
        .programmatic = launch->overlap == RF__OVERLAP_ALWAYS ||
                        (launch->overlap == RF__OVERLAP_EVEN && is_even(&device->gpu, launch, kernel)),
        .stream = stream};
    memcpy(config.grid, launch->grid, sizeof config.grid);
    memcpy(config.block, launch->block, sizeof config.block);
    memcpy(config.cluster, launch->cluster, sizeof config.cluster);
    if (launch->resident) RF_CHECK(grid_cut(device, launches->name, kernel, &config));
    if (launch->uncooperative_at == 0 || !config.cooperative) return rf__launch(device, &config, arguments);
    if (rf__launch(device, &config, arguments) == RF_OK) return RF_OK;
    const int32_t yes = 1; /* the stream may have fewer SMs than the device, which only the driver knows */
    memcpy((unsigned char *)arguments + launch->uncooperative_at, &yes, sizeof yes);
    config.cooperative = false;
    return rf__launch(device, &config, arguments);
}

static rf_status fill(const rf__cuda_device *device, const rf__kernel_launch *launch, const void *arguments,
                      void *stream) {
    uint64_t address;
    memcpy(&address, arguments, sizeof address);
    const rf__cuda_driver *driver = device->driver;
    const size_t bytes = (size_t)launch->fill_bytes;
    if (address % 4 == 0 && bytes % 4 == 0)
        return RF__CUDA_CALL(driver->cuMemsetD32Async(address, 0, bytes / 4, stream));
    return RF__CUDA_CALL(driver->cuMemsetD8Async(address, 0, bytes, stream));
}

/* In the device's context. */
static rf_status launch_all(const rf__cuda_device *device, rf__launches *launches,
                            const rf__kernel *const *kernels, void *stream) {
    for (int32_t i = 0; i < launches->count; i++) {
        const rf__kernel_launch *launch = &launches->launches[i];
        if (launch->source != NULL)
            RF_CHECK(launch_kernel(device, launches, i, kernels[i], stream));
        else
            RF_CHECK(fill(device, launch, rf__launches_arguments(launches, i), stream));
    }
    return RF_OK;
}

/* Compiles if necessary, which takes seconds: before anything is in the stream. */
static rf_status kernels_find(const rf__cuda_device *device, const rf__launches *launches,
                              const rf__kernel **kernels) {
    for (int32_t i = 0; i < launches->count; i++) {
        const rf__kernel_launch *launch = &launches->launches[i];
        if (launch->source == NULL) continue;
        RF_CHECK(rf__jit_kernel(device, launch->source, rf__launches_key(launches, i), launch->key_bytes,
                                launch->describe, &kernels[i]));
    }
    return RF_OK;
}

rf_status rf__launches_run_in(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                              uint64_t workspace, void *stream) {
    const rf__kernel *kernels[RF__MOST_LAUNCHES] = {NULL};
    if (launches->count == 0) return RF_OK;
    if (rf__explains()) RF_CHECK(rf__explain_record(&device->gpu, launches));
    if (device->driver == NULL) return RF_OK;
    RF_CHECK(kernels_find(device, launches, kernels));
    RF_CHECK(rf__cuda_enter(device)); /* also for tensor maps: a thread may have no context yet */
    rf_status status = bind_all(device, launches, uploads, workspace);
    if (status == RF_OK) status = launch_all(device, launches, kernels, stream);
    return rf__cuda_leave_with(status);
}

rf_status rf__launches_pending(const rf__cuda_device *device, const rf__launches *launches, void *stream) {
    if (device->driver == NULL) return RF_OK;
    return rf__cuda_check_word(
        device, rf__cuda_error_word_of(&device->errors, launches->owner, launches->shape), stream);
}

rf_status rf__launches_run(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                           const rf_cuda_allocator *allocator, void *stream) {
    const bool has_workspace = device->driver != NULL && launches->workspace_bytes > 0;
    rf_status status = RF_OK;
    rf__cuda_store store;
    rf__cuda_block workspace = {0};
    if (launches->checks) RF_CHECK(rf__launches_pending(device, launches, stream));
    if (has_workspace) {
        if (allocator != NULL) /* the allocator knows of captures, so no driver call is needed */
            store = (rf__cuda_store){.device = device, .stream = stream, .allocator = *allocator};
        else
            RF_CHECK(rf__cuda_store_of(device, stream, NULL, &store));
        RF_CHECK(rf__cuda_room_new(&store, (size_t)launches->workspace_bytes, &workspace));
    }
    status = rf__launches_run_in(device, launches, uploads, workspace.memory, stream);
    if (has_workspace) rf__cuda_room_free(&store, &workspace);
    return status;
}

rf_status rf__launches_finish(rf_status lowered, const rf__cuda_device *device, rf__launches *launches,
                              const rf_cuda_allocator *allocator, void *stream) {
    rf_status status = lowered;
    if (status == RF_OK) status = rf__launches_run(device, launches, NULL, allocator, stream);
    rf__launches_free(launches);
    return status;
}
