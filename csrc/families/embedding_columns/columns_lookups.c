/* rf_embedding_columns_lookups_cuda: counts, their prefix sums, then the lookups. */
#include <stddef.h>
#include <stdio.h>

#include "core/validate.h"
#include "gpu/driver/memory.h"
#include "families/embedding_columns/embedding_columns.h"

static const rf__kernel_source lookups_source = {"families/embedding_columns/lookups.cu",
                                                 "rf_columns_lookups"};
static const rf__kernel_source scan_source = {"families/embedding_columns/scan.cu", "rf_columns_scan"};

/* All of it int32_t: compared bytewise. */
typedef struct lookups_variant {
    int32_t units, write, check;
} lookups_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const lookups_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_UNITS=%d -DRF_WRITE=%d -DRF_CHECK=%d",
             (int)variant->units, (int)variant->write, (int)variant->check);
    return RF_OK;
}

static rf_status describe_scan(const void *key, rf__kernel_options *options) {
    snprintf(options->defines, sizeof options->defines, "-DRF_SUMS=%d", (int)*(const int32_t *)key);
    return RF_OK;
}

static rf_status look_up_add(const rf__columns_launch *columns, const rf_columns_lookups_args *args,
                             bool write, bool check, rf__launches *launches) {
    const lookups_variant variant = {columns->units, write, check};
    const rf__kernel_launch launch = {
        .source = &lookups_source,
        .describe = describe,
        .grid = {columns->blocks},
        .block = {RF_COLUMNS_BLOCK},
        .shared_bytes = (uint32_t)columns->shared_bytes,
        .read_bytes = columns->read_bytes,
        .written_bytes =
            columns->n_tables * args->call.batch * (int64_t)sizeof(rf_i64) +
            (write ? args->capacity * (int64_t)(sizeof(rf_i64) + (args->factors != NULL ? 4 : 0)) : 0)};
    const size_t head = offsetof(rf_columns_lookups_args, call);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, args,
                              head + RF_COLUMNS_ARGS_BYTES(columns->units)));
    rf__launches_bind_errors(launches, head + offsetof(rf_columns_args, errors));
    return RF_OK;
}

static rf_status scan_add(int64_t *values, int64_t count, rf__launches *launches) {
    const int64_t blocks = (count + RF_COLUMNS_SCAN_VALUES - 1) / RF_COLUMNS_SCAN_VALUES;
    const rf_columns_scan_args args = {.values = values, .count = count}; /* sums begin the workspace */
    launches->workspace_bytes = blocks * (int64_t)sizeof(rf_i64);
    for (int32_t sums = 1; sums >= 0; sums--) {
        const rf__kernel_launch launch = {.source = &scan_source,
                                          .describe = describe_scan,
                                          .grid = {(uint32_t)blocks},
                                          .block = {RF_COLUMNS_SCAN_BLOCK},
                                          .read_bytes = count * (int64_t)sizeof(rf_i64),
                                          .written_bytes = sums ? 0 : count * (int64_t)sizeof(rf_i64)};
        RF_CHECK(rf__launches_add(launches, &launch, &sums, sizeof sums, &args, sizeof args));
        rf__launches_bind_workspace(launches, offsetof(rf_columns_scan_args, sums));
    }
    return RF_OK;
}

rf_status rf__columns_lookups_lower(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                                    const int64_t *program_on_device,
                                    const rf_embedding_columns_lookups *lookups, rf__launches *launches) {
    static const char operator_name[] = "embedding_columns";
    rf__columns_launch columns;
    rf_columns_lookups_args args;
    RF__REFUSE_IF(lookups->offsets == NULL, RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements",
                  "offsets");
    RF_CHECK(rf__columns_prepare(gpu, params, program_on_device, false, launches, &columns, &args.call));
    const int64_t bags = columns.n_tables * params->batch;
    if (bags == 0 || columns.blocks == 0)
        return rf__launches_fill(launches, (uintptr_t)lookups->offsets, false, sizeof *lookups->offsets);
    args.offsets = (rf_i64 *)lookups->offsets;
    args.indices = (rf_i64 *)lookups->indices;
    args.factors = lookups->factors;
    args.capacity = lookups->capacity;
    RF_CHECK(look_up_add(&columns, &args, false, params->check_bounds, launches));
    RF_CHECK(scan_add(lookups->offsets + 1, bags, launches));
    if (lookups->indices == NULL) return RF_OK;
    return look_up_add(&columns, &args, true, params->check_bounds, launches);
}

rf_status rf_embedding_columns_lookups_cuda(const rf_embedding_columns_params *params,
                                            const int64_t *program_on_device,
                                            const rf_embedding_columns_lookups *lookups,
                                            const rf_cuda_allocator *allocator,
                                            const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, "embedding_columns_lookups");
    return rf__launches_finish(
        rf__columns_lookups_lower(&device->gpu, params, program_on_device, lookups, &launches), device,
        &launches, allocator, stream->stream);
}

rf_status rf__columns_lookups_count(const rf_cuda_stream *stream, const int64_t *last_offset,
                                    int64_t *count) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    bool captured = false;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    *count = 0;
    if (device->driver == NULL) return RF_OK;
    RF_CHECK(rf__cuda_is_capturing(device, stream->stream, &captured));
    RF_FAIL_IF(captured, RF_ERR_UNSUPPORTED,
               "a cross of two jagged sources has gradients that need as many rows as there are lookups, "
               "which a CUDA graph cannot wait for. Compute them outside of it.");
    RF_CHECK(rf__cuda_enter(device));
    RF__CUDA_TRY(device->driver->cuMemcpyDtoHAsync_v2(count, (uintptr_t)last_offset, sizeof *count,
                                                      (rf__cu_stream)stream->stream));
    RF__CUDA_TRY(device->driver->cuStreamSynchronize((rf__cu_stream)stream->stream));
out:
    return rf__cuda_leave_with(status);
}
