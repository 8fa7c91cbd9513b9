/* Arguments that the operators of fused calls share. */
#include "torch/ops.h"

#include <stdlib.h>

rf_status rf__features_read(AtenTensorHandle handle, AtenTensorHandle *copy, const rf_feature **features,
                            int64_t *n_features) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    const rf__place cpu = rf__place_of_cpu();
    RF_TRY(rf__tensor_read("features", handle, 2, &cpu, &tensor));
    if (tensor.dtype != aoti_torch_dtype_int64() || tensor.sizes[1] != RF__FEATURE_FIELDS) {
        return rf__fail(tensor.dtype != aoti_torch_dtype_int64() ? RF_ERR_TYPE : RF_ERR_VALUE,
                        "features is %s [%lld, %lld], must be int64 [features, %d]: weight, weight_offset, "
                        "rows, dim, pooling, padding_idx, output_column",
                        rf__torch_dtype_name(tensor.dtype), (long long)tensor.sizes[0],
                        (long long)tensor.sizes[1], RF__FEATURE_FIELDS);
    }
    RF_TRY(rf__tensor_make_contiguous(&tensor, tensor.dtype, copy));
    *features = tensor.data;
    *n_features = tensor.sizes[0];
out:
    return status;
}

/* Weights are whole models: a copy at each call would cost more than it helps, so none is made. *dim: columns, -1 for a
 * weight of one dimension. */
static rf_status weight_read(AtenTensorHandle handle, const rf__place *place, rf_buffer *buffer,
                             int64_t *dim) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    int64_t dims = 0;
    RF__TORCH_TRY(aoti_torch_get_dim(handle, &dims));
    RF_TRY(rf__tensor_read("weights", handle, dims == 1 ? 1 : 2, place, &tensor));
    RF_TRY(rf__tensor_dtype(&tensor, &buffer->dtype));
    if (!rf__tensor_is_contiguous(&tensor)) {
        return rf__fail(RF_ERR_VALUE,
                        "a tensor of weights has stride %lld, must be contiguous: pass "
                        "tensor.contiguous()",
                        (long long)tensor.strides[0]);
    }
    buffer->data = tensor.data;
    buffer->numel = tensor.sizes[0] * (dims == 1 ? 1 : tensor.sizes[1]);
    *dim = dims == 1 ? -1 : tensor.sizes[1];
out:
    return status;
}

rf_status rf__weights_read(StableListHandle list, const rf__place *place, rf_buffer **buffers,
                           const int64_t **columns, rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    size_t count = 0;
    int64_t *dims; /* behind the buffers */
    RF__TORCH_TRY(torch_list_size(list, &count));
    *buffers = calloc(count + 1, sizeof **buffers + sizeof *dims);
    if (*buffers == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for %zu weights", count);
    dims = (int64_t *)(*buffers + count);
    params->output_dtype = RF_FLOAT32;
    for (size_t i = 0; i < count; i++) {
        StableIValue item = 0;
        RF__TORCH_TRY(torch_list_get_item(list, i, &item));
        RF_TRY(weight_read((AtenTensorHandle)(uintptr_t)item, place, &(*buffers)[i], &dims[i]));
        if (i == 0) params->output_dtype = (*buffers)[0].dtype;
        if ((*buffers)[i].dtype != params->output_dtype) params->output_dtype = RF_FLOAT32;
    }
    params->buffers = *buffers;
    params->n_buffers = (int64_t)count;
    *columns = dims;
out:
    return status;
}

rf_status rf__bags_count(int64_t offsets, int64_t n_features, int64_t *bags) {
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

rf_status rf__lookups_read(AtenTensorHandle indices, AtenTensorHandle offsets, const rf__place *place,
                           AtenTensorHandle *copies, rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    RF_TRY(rf__integers_read("indices", indices, place, &copies[0], &tensor, &params->index_type));
    params->indices = tensor.data;
    params->lookups = tensor.sizes[0];
    RF_TRY(rf__integers_read("offsets", offsets, place, &copies[1], &tensor, &params->offset_type));
    params->offsets = tensor.data;
    RF_TRY(rf__bags_count(tensor.sizes[0], params->n_features, &params->bags));
out:
    return status;
}
