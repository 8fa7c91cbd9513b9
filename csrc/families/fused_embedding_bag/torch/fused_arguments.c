/* Arguments that the operators of fused calls share. */
#include "families/fused_embedding_bag/torch/fused_arguments.h"

#include <stdlib.h>

#include "core/validate.h"

rf_status rf__fused_features_read(rf__call *call, int argument, const rf_feature **features,
                                  int64_t *n_features) {
    enum { FIELDS = sizeof(rf_feature) / sizeof(int64_t) };
    rf__tensor tensor;
    RF_CHECK(rf__call_host_tensor(call, argument, 2, &tensor));
    const bool right_dtype = tensor.dtype == aoti_torch_dtype_int64();
    if (!right_dtype || tensor.sizes[1] != FIELDS)
        return rf__tensor_refuse(
            &tensor, right_dtype ? RF_ERR_VALUE : RF_ERR_TYPE,
            "int64 [features, %d] with weight, weight_offset, rows, dim, pooling, padding_idx, output_column",
            FIELDS);
    RF_CHECK(rf__call_contiguous(call, &tensor, tensor.dtype));
    *features = tensor.data;
    *n_features = tensor.sizes[0];
    return RF_OK;
}

/* Weights are whole models: a copy per call would cost more than it helps, so they are not copied. */
rf_status rf__fused_weight_read(const char *argument, AtenTensorHandle handle, rf__torch_device device,
                                rf_buffer *buffer, int64_t *dim) {
    rf__tensor tensor;
    RF_CHECK(rf__tensor_read(argument, handle, RF__ANY_DIM, device, &tensor));
    const int64_t dims = tensor.dim;
    RF_FAIL_IF(dims != 1 && dims != 2, RF_ERR_VALUE, "%s has %lld dimensions; expected 2", argument,
               (long long)dims);
    RF_CHECK(rf__tensor_dtype(&tensor, &buffer->dtype));
    RF_FAIL_IF(!rf__tensor_is_contiguous(&tensor), RF_ERR_VALUE,
               "a tensor of weights has stride %lld; expected a contiguous tensor. Pass tensor.contiguous().",
               (long long)tensor.strides[0]);
    buffer->data = tensor.data;
    buffer->numel = tensor.sizes[0] * (dims == 1 ? 1 : tensor.sizes[1]);
    *dim = dims == 1 ? -1 : tensor.sizes[1];
    return RF_OK;
}

rf_status rf__fused_weights_read(rf__call *call, int argument, const int64_t **columns,
                                 rf_fused_embedding_bag_params *params) {
    const StableListHandle list = call->values[argument].list;
    size_t count = 0;
    RF__TORCH_CHECK(torch_list_size(list, &count));
    rf_buffer *buffers = calloc(count + 1, sizeof *buffers + sizeof **columns);
    RF_FAIL_IF(buffers == NULL, RF_ERR_MEMORY, "no memory for %zu weights", count);
    call->scratch = buffers;
    int64_t *dims = (int64_t *)(buffers + count);
    params->output_dtype = RF_FLOAT32;
    for (size_t i = 0; i < count; i++) {
        rf__value item = {0};
        RF__TORCH_CHECK(torch_list_get_item(list, i, &item.bits));
        RF_CHECK(rf__fused_weight_read(call->registered->signature.names[argument], item.tensor, call->device,
                                       &buffers[i], &dims[i]));
        if (i == 0) params->output_dtype = buffers[0].dtype;
        if (buffers[i].dtype != params->output_dtype) params->output_dtype = RF_FLOAT32;
    }
    params->buffers = buffers;
    params->n_buffers = (int64_t)count;
    *columns = dims;
    return RF_OK;
}

rf_status rf__fused_lookups_read(rf__call *call, int indices, int offsets, int64_t known_bags,
                                 rf_fused_embedding_bag_params *params) {
    int64_t n_offsets;
    RF_CHECK(rf__call_integers(call, indices, &params->indices, &params->lookups, &params->index_type));
    RF_CHECK(rf__call_integers(call, offsets, &params->offsets, &n_offsets, &params->offset_type));
    const int64_t features = params->n_features;
    if (features == 1 && n_offsets == known_bags && rf__device_is_cpu(call->device))
        RF_CHECK(rf__call_offsets_complete(call, n_offsets++, params->lookups, &params->offsets,
                                           &params->offset_type));
    const int64_t bags = n_offsets - 1; /* of all features */
    RF_FAIL_IF(bags < 0 || (features > 0 ? bags % features != 0 : bags != 0), RF_ERR_VALUE,
               "offsets has %lld elements; expected features * bags + 1 with %lld features",
               (long long)n_offsets, (long long)features);
    params->bags = features > 0 ? bags / features : 0;
    return RF_OK;
}

rf_status rf__fused_grad_read(rf__call *call, int argument, int64_t bags, rf__tensor *grad, rf_dtype *dtype) {
    RF_CHECK(rf__call_tensor(call, argument, 2, grad));
    RF_CHECK(rf__tensor_dtype(grad, dtype));
    RF_FAIL_IF(grad->sizes[0] != bags, RF_ERR_VALUE,
               "grad has %lld rows; expected a row for each of the %lld bags of a feature",
               (long long)grad->sizes[0], (long long)bags);
    return rf__call_contiguous(call, grad, grad->dtype);
}

rf_status rf__call_winners(rf__call *call, int argument, const rf__tensor *grad, const int64_t **winners) {
    rf__tensor tensor;
    *winners = NULL;
    if (!call->values[argument].is_present) return RF_OK;
    RF_CHECK(rf__call_tensor(call, argument, 2, &tensor));
    if (tensor.dtype != aoti_torch_dtype_int64() || tensor.sizes[0] != grad->sizes[0] ||
        tensor.sizes[1] != grad->sizes[1])
        return rf__tensor_refuse(&tensor, RF_ERR_VALUE, "int64 [%lld, %lld], as grad is",
                                 (long long)grad->sizes[0], (long long)grad->sizes[1]);
    RF_CHECK(rf__call_contiguous(call, &tensor, tensor.dtype));
    *winners = tensor.data;
    return RF_OK;
}
