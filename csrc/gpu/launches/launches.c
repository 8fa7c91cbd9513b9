/* Building launches: kernels, keys, arguments, bindings. */
#include "gpu/launches/launches.h"

#include <stdlib.h>
#include <string.h>

enum { KEY_ALIGNMENT = 16 };

void rf__launches_init(rf__launches *launches, const char *name) {
    launches->name = name;
    launches->count = launches->n_bindings = launches->n_maps = 0;
    launches->workspace_bytes = 0;
    launches->owner = NULL;
    launches->shape = 0;
    launches->checks = false;
    launches->n_bytes = 0;
    launches->capacity = RF__INLINE_BYTES;
    launches->bytes = launches->inline_bytes;
}

void rf__launches_free(rf__launches *launches) {
    if (launches->bytes != launches->inline_bytes) free(launches->bytes);
    launches->bytes = launches->inline_bytes;
}

static rf_status bytes_reserve(rf__launches *launches, size_t extra) {
    uint32_t capacity = launches->capacity;
    if (extra <= capacity - launches->n_bytes) return RF_OK;
    while (capacity - launches->n_bytes < extra) capacity *= 2;
    unsigned char *bytes = aligned_alloc(RF__ARGUMENTS_ALIGNMENT, capacity);
    RF_FAIL_IF(bytes == NULL, RF_ERR_MEMORY, "%s: no memory for the arguments of %d kernels", launches->name,
               (int)launches->count + 1);
    memcpy(bytes, launches->bytes, launches->n_bytes);
    rf__launches_free(launches);
    launches->bytes = bytes;
    launches->capacity = capacity;
    return RF_OK;
}

static uint32_t bytes_add(rf__launches *launches, const void *from, size_t bytes, uint32_t alignment) {
    const uint32_t at = (launches->n_bytes + alignment - 1) / alignment * alignment;
    if (bytes > 0) memcpy(launches->bytes + at, from, bytes);
    launches->n_bytes = at + (uint32_t)bytes;
    return at;
}

/* Adds a launch with a copy of its key, and room for a copy of its arguments. */
static rf_status launch_add(rf__launches *launches, const rf__kernel_launch *launch, const void *key,
                            size_t key_bytes, size_t argument_bytes) {
    RF_FAIL_IF(launches->count == RF__MOST_LAUNCHES, RF_ERR_INTERNAL, "%s: more than %d launches",
               launches->name, (int)RF__MOST_LAUNCHES);
    RF_CHECK(bytes_reserve(launches, key_bytes + argument_bytes + KEY_ALIGNMENT + RF__ARGUMENTS_ALIGNMENT));
    rf__kernel_launch *added = &launches->launches[launches->count++];
    *added = *launch;
    added->key_bytes = (uint32_t)key_bytes;
    added->key = bytes_add(launches, key, key_bytes, KEY_ALIGNMENT);
    return RF_OK;
}

rf_status rf__launches_add(rf__launches *launches, const rf__kernel_launch *launch, const void *key,
                           size_t key_bytes, const void *arguments, size_t argument_bytes) {
    RF_CHECK(launch_add(launches, launch, key, key_bytes, argument_bytes));
    rf__kernel_launch *added = &launches->launches[launches->count - 1];
    added->argument_bytes = (uint32_t)argument_bytes;
    added->arguments = bytes_add(launches, arguments, argument_bytes, RF__ARGUMENTS_ALIGNMENT);
    return RF_OK;
}

rf_status rf__launches_add_alike(rf__launches *launches, const rf__kernel_launch *launch, const void *key,
                                 size_t key_bytes) {
    RF_CHECK(launch_add(launches, launch, key, key_bytes, 0));
    rf__kernel_launch *added = &launches->launches[launches->count - 1];
    added->argument_bytes = added[-1].argument_bytes;
    added->arguments = added[-1].arguments;
    return RF_OK;
}

/* Bindings beyond the most are counted, and refused when the launches run. */
static void bind(rf__launches *launches, int32_t bound, size_t at) {
    const uint32_t arguments = launches->launches[launches->count - 1].arguments;
    if (launches->n_bindings < RF__MOST_BINDINGS)
        launches->bindings[launches->n_bindings] =
            (rf__binding){.at = arguments + (uint32_t)at, .bound = (uint16_t)bound};
    launches->n_bindings++;
}

void rf__launches_bind_workspace(rf__launches *launches, size_t at) {
    bind(launches, RF__BOUND_WORKSPACE, at);
}

void rf__launches_bind_errors(rf__launches *launches, size_t at) { bind(launches, RF__BOUND_ERRORS, at); }

void rf__launches_bind_upload(rf__launches *launches, int32_t number, size_t at) {
    bind(launches, RF__BOUND_UPLOAD + number, at);
}

void rf__launches_bind_map(rf__launches *launches, size_t at, const rf__tensor_map_params *params) {
    const uint32_t arguments = launches->launches[launches->count - 1].arguments;
    if (launches->n_maps < RF__MOST_TENSOR_MAPS) {
        launches->maps[launches->n_maps].at = arguments + (uint32_t)at;
        launches->maps[launches->n_maps].params = *params;
    }
    launches->n_maps++;
}

rf_status rf__launches_fill(rf__launches *launches, uint64_t address, bool in_workspace, int64_t bytes) {
    const rf__kernel_launch fill = {.fill_bytes = bytes, .written_bytes = bytes};
    if (bytes == 0) return RF_OK;
    RF_CHECK(rf__launches_add(launches, &fill, NULL, 0, &address, sizeof address));
    if (in_workspace) rf__launches_bind_workspace(launches, 0);
    return RF_OK;
}
