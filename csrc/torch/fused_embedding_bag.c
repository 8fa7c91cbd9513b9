/* recfuse::fused_embedding_bag on the CPU: tensors -> rf_fused_embedding_bag_params. */
#include "torch/ops.h"

#include <stdlib.h>

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
    BOUNDS_CHECK
};

enum { FEATURE_FIELDS = sizeof(rf_feature) / sizeof(int64_t) };

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

static rf_status features_read(AtenTensorHandle handle, const rf__place *place, AtenTensorHandle *copy,
                               rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    rf__tensor features;
    RF_TRY(rf__tensor_read("features", handle, 2, place, &features));
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

rf_status rf__torch_fused_embedding_bag(const rf__value *values, AtenTensorHandle *output) {
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params params = {0};
    rf_buffer *buffers = NULL;
    rf_executor executor;
    rf__tensor indices, offsets;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    rf__place place;
    RF_TRY(rf__tensor_place(values[INDICES].tensor, &place));
    if (!rf__place_is_cpu(&place)) {
        return rf__fail(
            RF_ERR_UNSUPPORTED,
            "no CUDA kernel in this version; move the tensors to the CPU, or pool the tables one by "
            "one with recfuse.embedding_bag");
    }
    RF_TRY(buffers_read(values[BUFFERS].list, &place, &buffers, &params));
    RF_TRY(features_read(values[FEATURES].tensor, &place, &copies[0], &params));

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
    RF_TRY(rf__torch_executor(&executor));
    RF_TRY(rf__tensor_new(params.bags, params.output_dim, rf__torch_dtype(params.output_dtype), &place,
                          output, &params.output));
    RF_TRY(rf_fused_embedding_bag_cpu(&params, &executor));
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    free(buffers);
    return status;
}
