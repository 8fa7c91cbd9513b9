/* recfuse::fused_embedding_bag on CPU and GPU: tensors -> rf_fused_embedding_bag_params. */
#include "torch/ops.h"

#include <stdlib.h>

#include "cuda/fused_embedding_bag/fused.h"
#include "cuda/driver/memory.h"
#include "base/validate.h"

/* Positions in the schema. */
enum {
    WEIGHTS,
    FEATURES,
    INDICES,
    OFFSETS,
    OUTPUT_DIM,
    SAMPLE_WEIGHTS,
    SPARSE,
    PREFETCH_DISTANCE,
    BOUNDS_CHECK,
    SCHEDULES,
    WARPS,
    MAPPING,
    ANY_MAX /* of the gradients alone */
};

enum { SCHEDULE_FIELDS = sizeof(rf_fused_schedule) / sizeof(int32_t), MAPPING_FIELDS = 8 };

/* schedules: int32 [features, 5] on the CPU, an array of rf_fused_schedule; may be NULL. */
static rf_status schedules_read(AtenTensorHandle handle, int64_t n_features, AtenTensorHandle *copy,
                                rf_fused_plan *plan) {
    rf_status status = RF_OK;
    rf__tensor schedules;
    const rf__place cpu = rf__place_of_cpu();
    if (handle == NULL) return RF_OK;
    RF_TRY(rf__tensor_read("schedules", handle, 2, &cpu, &schedules));
    if (schedules.dtype != aoti_torch_dtype_int32() || schedules.sizes[0] != n_features ||
        schedules.sizes[1] != SCHEDULE_FIELDS) {
        return rf__fail(
            RF_ERR_VALUE,
            "schedules is %s [%lld, %lld], must be int32 [%lld, %d], a row a feature: kind, threads, "
            "distance, split, expected lookups of a bag times 16",
            rf__torch_dtype_name(schedules.dtype), (long long)schedules.sizes[0],
            (long long)schedules.sizes[1], (long long)n_features, SCHEDULE_FIELDS);
    }
    RF_TRY(rf__tensor_make_contiguous(&schedules, schedules.dtype, copy));
    plan->schedules = schedules.data;
out:
    return status;
}

/* mapping: int32 [rows, 8] on the CPU, may be NULL. From page-locked memory it is copied to the device here,
 * asynchronously; torch keeps the memory for so long. From other memory torch's copy may wait for the stream, and one that
 * is captured would be made again by each replay, from memory that may have another mapping by then, or none: there the
 * call makes its own. */
static rf_status mapping_read(AtenTensorHandle handle, int64_t bags, const rf__place *place,
                              const rf_cuda_stream *stream, AtenTensorHandle *copy,
                              AtenTensorHandle *on_device, rf_fused_plan *plan) {
    rf_status status = RF_OK;
    rf__tensor mapping;
    const rf__place cpu = rf__place_of_cpu();
    const rf__cuda_device *device = NULL;
    void *data = NULL;
    bool captured = false;
    if (handle == NULL) return RF_OK;
    RF_TRY(rf__tensor_read("mapping", handle, 2, &cpu, &mapping));
    if (mapping.dtype != aoti_torch_dtype_int32() || mapping.sizes[1] != MAPPING_FIELDS ||
        (mapping.sizes[0] == 0 && bags > 0)) {
        return rf__fail(RF_ERR_VALUE,
                        "mapping is %s [%lld, %lld], must be int32 [rows, %d], as the module's map() makes",
                        rf__torch_dtype_name(mapping.dtype), (long long)mapping.sizes[0],
                        (long long)mapping.sizes[1], MAPPING_FIELDS);
    }
    RF_TRY(rf__tensor_make_contiguous(&mapping, mapping.dtype, copy));
    plan->mapping = mapping.data;
    plan->mapping_rows = mapping.sizes[0];
    if (mapping.sizes[0] == 0) return RF_OK;
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_is_capturing(device, stream->stream, &captured));
    if (captured || !rf__cuda_is_page_locked(device, mapping.data)) return RF_OK;
    RF_TRY(rf__tensor_new(mapping.sizes[0], MAPPING_FIELDS, mapping.dtype, place, on_device, &data));
    RF__TORCH_TRY(aoti_torch_copy_(*on_device, mapping.handle, true));
    plan->mapping_on_device = data;
out:
    return status;
}

static rf_status pool_on_gpu(const rf__value *values, const rf__place *place,
                             const rf_fused_embedding_bag_params *params, const int64_t *columns) {
    rf_status status = RF_OK;
    const rf_cuda_allocator allocator = rf__torch_allocator(place);
    rf_fused_plan plan = {.allocator = &allocator};
    rf_cuda_stream stream;
    AtenTensorHandle copies[3] = {NULL, NULL, NULL};
    const int64_t warps = values[WARPS].integer;
    if (warps != 0 && (warps < 2 || warps > 64)) {
        return rf__fail(RF_ERR_VALUE, "warps is %lld, must be 2 to 64, or 0 for a good default",
                        (long long)warps);
    }
    plan.warps = (int32_t)warps;
    RF_TRY(rf__torch_stream(place, &stream));
    RF_TRY(schedules_read(values[SCHEDULES].tensor, params->n_features, &copies[0], &plan));
    RF_TRY(mapping_read(values[MAPPING].tensor, params->bags, place, &stream, &copies[1], &copies[2], &plan));
    RF_TRY(rf__fused_run_call(params, columns, &plan, &stream));
out:
    for (int i = 2; i >= 0; i--) rf__tensor_free(copies[i]);
    return status;
}

rf_status rf__torch_fused_embedding_bag(const rf__value *values, AtenTensorHandle *output) {
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params params = {0};
    rf_buffer *buffers = NULL;
    const int64_t *columns = NULL;
    rf_executor executor;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    rf__place place;
    RF_TRY(rf__tensor_place(values[INDICES].tensor, &place));
    RF_TRY(rf__features_read(values[FEATURES].tensor, &copies[0], &params.features, &params.n_features));
    RF_TRY(rf__weights_read(values[WEIGHTS].list, &place, &buffers, &columns, &params));
    RF_TRY(rf__lookups_read(values[INDICES].tensor, values[OFFSETS].tensor, &place, &copies[1], &params));

    RF_TRY(rf__bounds_check_parse(values[BOUNDS_CHECK].string, &params.check_bounds));
    RF_TRY(rf__prefetch_distance_parse(values[PREFETCH_DISTANCE].integer, &params.prefetch_distance));
    RF_TRY(rf__sample_weights_read(values[SAMPLE_WEIGHTS].tensor, params.lookups, &place, &copies[3],
                                   &params.sample_weights));
    params.output_dim = params.output_stride = values[OUTPUT_DIM].integer;
    if (params.output_dim < 0) {
        status = rf__fail(RF_ERR_VALUE, "output_dim is %lld, must be >= 0", (long long)params.output_dim);
        goto out;
    }
    RF_TRY(rf__tensor_new(params.bags, params.output_dim, rf__torch_dtype(params.output_dtype), &place,
                          output, &params.output));
    if (rf__place_is_cpu(&place)) {
        RF_TRY(rf__check_fused_rows(&params, columns));
        RF_TRY(rf__torch_executor(&executor));
        RF_TRY(rf_fused_embedding_bag_cpu(&params, &executor));
    } else {
        RF_TRY(pool_on_gpu(values, &place, &params, columns));
    }
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    free(buffers);
    return status;
}
