/* recfuse::fused_embedding_bag on CPU and GPU: tensors -> rf_fused_embedding_bag_params. */
#include "torch/ops.h"

#include <stdlib.h>

#include "fused_pool.h"

/* Positions in the schema. */
enum {
    BUFFERS,
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
    MAPPING
};

enum {
    FEATURE_FIELDS = sizeof(rf_feature) / sizeof(int64_t),
    SCHEDULE_FIELDS = sizeof(rf_fused_schedule) / sizeof(int32_t),
    MAPPING_FIELDS = 8
};

/* Buffers are whole models: a copy at each call would cost more than it helps, so none is made. */
static rf_status buffer_read(AtenTensorHandle handle, const rf__place *place, rf_buffer *buffer) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    RF_TRY(rf__tensor_read("buffers", handle, 1, place, &tensor));
    RF_TRY(rf__tensor_dtype(&tensor, &buffer->dtype));
    if (tensor.sizes[0] > 1 && tensor.strides[0] != 1) {
        return rf__fail(RF_ERR_VALUE,
                        "a tensor of buffers has stride %lld, must be contiguous: pass "
                        "tensor.contiguous()",
                        (long long)tensor.strides[0]);
    }
    buffer->data = tensor.data;
    buffer->numel = tensor.sizes[0];
out:
    return status;
}

/* Also the output's type: the buffers' own where they agree, else float32. */
static rf_status buffers_read(StableListHandle list, const rf__place *place, rf_buffer **buffers,
                              rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    size_t count = 0;
    RF__TORCH_TRY(torch_list_size(list, &count));
    *buffers = calloc(count > 0 ? count : 1, sizeof **buffers);
    if (*buffers == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for %zu buffers", count);
    params->output_dtype = RF_FLOAT32;
    for (size_t i = 0; i < count; i++) {
        StableIValue item = 0;
        RF__TORCH_TRY(torch_list_get_item(list, i, &item));
        RF_TRY(buffer_read((AtenTensorHandle)(uintptr_t)item, place, &(*buffers)[i]));
        if (i == 0) params->output_dtype = (*buffers)[0].dtype;
        if ((*buffers)[i].dtype != params->output_dtype) params->output_dtype = RF_FLOAT32;
    }
    params->buffers = *buffers;
    params->n_buffers = (int64_t)count;
out:
    return status;
}

/* On the CPU, whichever device pools: the host plans by them. */
static rf_status features_read(AtenTensorHandle handle, AtenTensorHandle *copy,
                               rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    rf__tensor features;
    const rf__place cpu = rf__place_of_cpu();
    RF_TRY(rf__tensor_read("features", handle, 2, &cpu, &features));
    if (features.dtype != aoti_torch_dtype_int64() || features.sizes[1] != FEATURE_FIELDS) {
        return rf__fail(features.dtype != aoti_torch_dtype_int64() ? RF_ERR_TYPE : RF_ERR_VALUE,
                        "features is %s [%lld, %lld], must be int64 [features, %d]: buffer, weight_offset, "
                        "rows, dim, pooling, padding_idx, output_column",
                        rf__torch_dtype_name(features.dtype), (long long)features.sizes[0],
                        (long long)features.sizes[1], FEATURE_FIELDS);
    }
    RF_TRY(rf__tensor_make_contiguous(&features, features.dtype, copy));
    params->features = features.data;
    params->n_features = features.sizes[0];
out:
    return status;
}

static rf_status bags_count(int64_t offsets, int64_t n_features, int64_t *bags) {
    const bool fits = offsets > 0 && (n_features > 0 ? (offsets - 1) % n_features == 0 : offsets == 1);
    if (!fits) {
        return rf__fail(RF_ERR_VALUE,
                        "offsets has %lld elements, must have features * bags + 1 with %lld "
                        "features",
                        (long long)offsets, (long long)n_features);
    }
    *bags = n_features > 0 ? (offsets - 1) / n_features : 0;
    return RF_OK;
}

/* schedules: int32 [features, 6] on the CPU, an array of rf_fused_schedule; may be NULL. */
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
            "distance, station, split, expected lookups of a bag times 16",
            rf__torch_dtype_name(schedules.dtype), (long long)schedules.sizes[0],
            (long long)schedules.sizes[1], (long long)n_features, SCHEDULE_FIELDS);
    }
    RF_TRY(rf__tensor_make_contiguous(&schedules, schedules.dtype, copy));
    plan->schedules = schedules.data;
out:
    return status;
}

/* mapping: int32 [rows, 8] on the CPU, copied to the device here; may be NULL. Page-locked memory is copied behind
 * the program's back, and kept by torch for so long. */
static rf_status mapping_read(AtenTensorHandle handle, int64_t bags, const rf__place *place,
                              AtenTensorHandle *copy, AtenTensorHandle *on_device, rf_fused_plan *plan) {
    rf_status status = RF_OK;
    rf__tensor mapping;
    const rf__place cpu = rf__place_of_cpu();
    void *data = NULL;
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
    RF_TRY(rf__tensor_new(mapping.sizes[0], MAPPING_FIELDS, mapping.dtype, place, on_device, &data));
    RF__TORCH_TRY(aoti_torch_copy_(*on_device, mapping.handle, true));
    plan->mapping = mapping.data;
    plan->mapping_rows = mapping.sizes[0];
    plan->mapping_on_device = data;
out:
    return status;
}

/* Where the memory that a call works in is made. */
typedef struct work_memory {
    const rf__place *place;
    AtenTensorHandle *tensor;
} work_memory;

static rf_status work_memory_new(void *context, int64_t bytes, void **memory) {
    const work_memory *my = context;
    return rf__tensor_new(1, bytes, aoti_torch_dtype_uint8(), my->place, my->tensor, memory);
}

static rf_status pool_on_gpu(const rf__value *values, const rf__place *place,
                             const rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    rf_fused_plan plan = {0};
    rf_cuda_stream stream;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    work_memory memory = {place, &copies[3]};
    const rf__allocator allocator = {work_memory_new, &memory};
    const int64_t warps = values[WARPS].integer;
    if (warps != 0 && (warps < 2 || warps > 64)) {
        return rf__fail(RF_ERR_VALUE, "warps is %lld, must be 2 to 64, or 0 for a good default",
                        (long long)warps);
    }
    plan.warps = (int32_t)warps;
    RF_TRY(schedules_read(values[SCHEDULES].tensor, params->n_features, &copies[0], &plan));
    RF_TRY(mapping_read(values[MAPPING].tensor, params->bags, place, &copies[1], &copies[2], &plan));
    RF_TRY(rf__torch_stream(place, &stream));
    RF_TRY(rf__fused_pool(params, &plan, &allocator, &stream));
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    return status;
}

rf_status rf__torch_fused_embedding_bag(const rf__value *values, AtenTensorHandle *output) {
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params params = {0};
    rf_buffer *buffers = NULL;
    rf_executor executor;
    rf__tensor indices, offsets;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    rf__place place;
    RF_TRY(rf__tensor_place(values[INDICES].tensor, &place));
    RF_TRY(buffers_read(values[BUFFERS].list, &place, &buffers, &params));
    RF_TRY(features_read(values[FEATURES].tensor, &copies[0], &params));

    RF_TRY(rf__integers_read("indices", values[INDICES].tensor, &place, &copies[1], &indices,
                             &params.index_type));
    params.indices = indices.data;
    params.lookups = indices.sizes[0];

    RF_TRY(rf__integers_read("offsets", values[OFFSETS].tensor, &place, &copies[2], &offsets,
                             &params.offset_type));
    params.offsets = offsets.data;
    RF_TRY(bags_count(offsets.sizes[0], params.n_features, &params.bags));

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
        RF_TRY(rf__torch_executor(&executor));
        RF_TRY(rf_fused_embedding_bag_cpu(&params, &executor));
    } else {
        RF_TRY(pool_on_gpu(values, &place, &params));
    }
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    free(buffers);
    return status;
}
