/* rf_embedding_columns_lookups_cuda: counts, their sums, and then what is looked up. */
#include <stdio.h>

#include "base/validate.h"
#include "cuda/driver/memory.h"
#include "cuda/embedding_columns/embedding_columns.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source lookups_source = {"embedding_columns/lookups.cu", "rf_columns_lookups"};
static const rf__kernel_source scan_source = {"embedding_columns/scan.cu", "rf_columns_scan"};

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

static rf_status look_up(const rf__cuda_device *device, const rf__columns_launch *launch,
                         const rf_columns_lookups_args *args, bool write, bool check, void *stream) {
    const rf__kernel *kernel = NULL;
    const lookups_variant variant = {launch->units, write, check};
    RF_CHECK(rf__jit_kernel(device, &lookups_source, &variant, sizeof variant, describe, &kernel));
    const rf__launch_config config = {.function = kernel->function,
                                      .grid = {launch->blocks},
                                      .block = {RF_COLUMNS_BLOCK},
                                      .shared_bytes = (uint32_t)launch->shared_bytes,
                                      .stream = stream};
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(rf__launch(device, &config, args));
}

static rf_status scan(const rf__cuda_device *device, const rf_columns_scan_args *args, void *stream) {
    const int64_t blocks = (args->count + RF_COLUMNS_SCAN_VALUES - 1) / RF_COLUMNS_SCAN_VALUES;
    for (int32_t sums = 1; sums >= 0; sums--) {
        const rf__kernel *kernel = NULL;
        RF_CHECK(rf__jit_kernel(device, &scan_source, &sums, sizeof sums, describe_scan, &kernel));
        const rf__launch_config config = {.function = kernel->function,
                                          .grid = {(uint32_t)blocks},
                                          .block = {RF_COLUMNS_SCAN_BLOCK},
                                          .stream = stream};
        RF_CHECK(rf__cuda_enter(device));
        RF_CHECK(rf__cuda_leave_with(rf__launch(device, &config, args)));
    }
    return RF_OK;
}

static rf_status write_zero(const rf__cuda_device *device, int64_t *offsets, void *stream) {
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(RF__CUDA_CALL(
        device->driver->cuMemsetD8Async((uintptr_t)offsets, 0, sizeof *offsets, (rf__cu_stream)stream)));
}

rf_status rf_embedding_columns_lookups_cuda(const rf_embedding_columns_params *params,
                                            const int64_t *program_on_device,
                                            const rf_embedding_columns_lookups *lookups,
                                            const rf_cuda_allocator *allocator,
                                            const rf_cuda_stream *stream) {
    static const char operator_name[] = "embedding_columns";
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__columns_launch launch;
    rf_columns_lookups_args args;
    rf__cuda_store store;
    rf__cuda_block sums = {0};
    RF__REFUSE_IF(lookups->offsets == NULL, RF_ERR_VALUE, "%s is NULL; it must point to its elements",
                  "offsets");
    RF_CHECK(rf__columns_prepare(params, program_on_device, false, stream, &device, &launch, &args.call));
    const int64_t bags = launch.columns.header->n_tables * params->batch;
    if (bags == 0 || launch.blocks == 0) return write_zero(device, lookups->offsets, stream->stream);
    args.offsets = lookups->offsets;
    args.indices = lookups->indices;
    args.factors = lookups->factors;
    args.capacity = lookups->capacity;
    const int64_t blocks = (bags + RF_COLUMNS_SCAN_VALUES - 1) / RF_COLUMNS_SCAN_VALUES;
    RF_CHECK(rf__cuda_store_of(device, stream->stream, allocator, &store));
    RF_TRY(rf__cuda_room_new(&store, (size_t)blocks * sizeof(rf_i64), &sums));
    RF_TRY(look_up(device, &launch, &args, false, params->check_bounds, stream->stream));
    const rf_columns_scan_args scanned = {lookups->offsets + 1, (rf_i64 *)(uintptr_t)sums.memory, bags};
    RF_TRY(scan(device, &scanned, stream->stream));
    if (lookups->indices != NULL)
        RF_TRY(look_up(device, &launch, &args, true, params->check_bounds, stream->stream));
out:
    rf__cuda_room_free(&store, &sums);
    return status;
}

rf_status rf__columns_lookups_count(const rf_cuda_stream *stream, const int64_t *last_offset,
                                    int64_t *count) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    bool captured = false;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_is_capturing(device, stream->stream, &captured));
    RF_FAIL_IF(captured, RF_ERR_UNSUPPORTED,
               "a cross of two jagged sources has gradients that need as many rows as there are lookups, "
               "which a CUDA graph cannot wait for; compute them outside of it");
    RF_CHECK(rf__cuda_enter(device));
    RF__CUDA_TRY(device->driver->cuMemcpyDtoHAsync_v2(count, (uintptr_t)last_offset, sizeof *count,
                                                      (rf__cu_stream)stream->stream));
    RF__CUDA_TRY(device->driver->cuStreamSynchronize((rf__cu_stream)stream->stream));
out:
    return rf__cuda_leave_with(status);
}

rf_status rf__columns_lookups_compile(const char *arch) {
    const lookups_variant variants[] = {{RF_COLUMNS_FEW_UNITS, 0, 1}, {RF_COLUMNS_FEW_UNITS, 1, 1}};
    const int32_t sums[] = {1, 0};
    RF_CHECK(rf__jit_compile_each(&lookups_source, variants, sizeof variants[0], 2, describe, arch));
    return rf__jit_compile_each(&scan_source, sums, sizeof sums[0], 2, describe_scan, arch);
}
