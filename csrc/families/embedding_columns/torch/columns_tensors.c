/* Tensors of torch -> inputs of embedding columns. */
#include "families/embedding_columns/tensors/columns_tensors.h"
#include "families/embedding_columns/torch/columns_torch.h"

/* Reads a tensor on the device of the list; the first tensor determines an unknown device. */
static rf_status tensor_read(rf__columns_inputs *inputs, const char *argument, AtenTensorHandle handle,
                             int64_t dim, rf__tensor *tensor) {
    rf__torch_device device = rf__device_cpu();
    if (inputs->on_gpu < 0) {
        RF_CHECK(rf__tensor_device(handle, &device));
        RF_FAIL_IF(!rf__device_is_cpu(device) && device.type != aoti_torch_device_type_cuda(), RF_ERR_VALUE,
                   "%s is neither on the CPU nor on a GPU of CUDA", argument);
        inputs->on_gpu = !rf__device_is_cpu(device);
        inputs->device = device.index;
    }
    if (inputs->on_gpu) device = (rf__torch_device){aoti_torch_device_type_cuda(), inputs->device};
    return rf__tensor_read(argument, handle, dim, device, tensor);
}

static rf_status type_read(const rf__tensor *tensor, rf_column_type *type) {
    const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_int32(), aoti_torch_dtype_int64()};
    for (*type = RF_COLUMN_FLOAT32; *type <= RF_COLUMN_INT64; ++*type)
        if (tensor->dtype == codes[*type]) return RF_OK;
    return rf__fail(RF_ERR_TYPE, "%s is %s; expected float32, int32 or int64", tensor->argument,
                    rf__torch_dtype_name(tensor->dtype));
}

rf_status rf__columns_contiguous_check(const rf__tensor *tensor) {
    RF_FAIL_IF(!rf__tensor_is_contiguous(tensor), RF_ERR_VALUE,
               "%s has stride %lld; expected a contiguous tensor. Pass tensor.contiguous().",
               tensor->argument, (long long)tensor->strides[0]);
    return RF_OK;
}

rf_status rf__columns_dense_read(rf__columns_inputs *inputs, int64_t at, void *handle) {
    rf_column_input *input = &inputs->rows[at];
    rf__tensor tensor;
    RF_CHECK(tensor_read(inputs, "dense", handle, RF__ANY_DIM, &tensor));
    if (inputs->batch < 0 && tensor.dim > 0) inputs->batch = tensor.sizes[0];
    if (tensor.dim < 1 || tensor.dim > 2 || tensor.sizes[0] != inputs->batch ||
        (tensor.dim == 2 && tensor.sizes[1] == 0))
        return rf__tensor_refuse(&tensor, RF_ERR_VALUE, "[%lld] or [%lld, values a sample]",
                                 (long long)inputs->batch, (long long)inputs->batch);
    RF_CHECK(type_read(&tensor, &input->type));
    input->values = tensor.data;
    input->width = tensor.dim == 2 ? tensor.sizes[1] : 1;
    input->sample_stride = tensor.strides[0];
    input->value_stride = tensor.dim == 2 ? tensor.strides[1] : 1;
    return RF_OK;
}

static rf_status offsets_read(rf__columns_inputs *inputs, AtenTensorHandle handle, rf_column_input *input) {
    rf__tensor tensor;
    RF_CHECK(tensor_read(inputs, "offsets", handle, 1, &tensor));
    input->offset_type = tensor.dtype == aoti_torch_dtype_int64() ? RF_INT64 : RF_INT32;
    RF_FAIL_IF(input->offset_type == RF_INT32 && tensor.dtype != aoti_torch_dtype_int32(), RF_ERR_TYPE,
               "%s is %s; expected int32 or int64", tensor.argument, rf__torch_dtype_name(tensor.dtype));
    RF_CHECK(rf__columns_contiguous_check(&tensor));
    const int64_t bags = tensor.sizes[0] - 1;
    if (inputs->batch < 0 && bags >= 0) inputs->batch = bags;
    const int64_t batch = inputs->batch;
    RF_FAIL_IF(bags < 0 || (batch > 0 ? bags % batch != 0 : bags != 0), RF_ERR_VALUE,
               "%s has %lld elements; expected features * batch + 1 with a batch of %lld", tensor.argument,
               (long long)bags + 1, (long long)batch);
    input->offsets = tensor.data;
    input->features = batch > 0 ? bags / batch : INT32_MAX; /* without samples: as many as columns read */
    return RF_OK;
}

rf_status rf__columns_jagged_read(rf__columns_inputs *inputs, int64_t at, void *values, void *offsets,
                                  void *weights) {
    rf_column_input *input = &inputs->rows[at];
    rf__tensor tensor;
    RF_CHECK(tensor_read(inputs, "values", values, 1, &tensor));
    RF_CHECK(type_read(&tensor, &input->type));
    RF_CHECK(rf__columns_contiguous_check(&tensor));
    input->values = tensor.data;
    input->lookups = tensor.sizes[0];
    RF_CHECK(offsets_read(inputs, offsets, input));
    if (weights == NULL) return RF_OK;
    RF_CHECK(tensor_read(inputs, "value_weights", weights, 1, &tensor));
    if (tensor.sizes[0] == 0) return RF_OK;
    if (tensor.dtype != aoti_torch_dtype_float32() || tensor.sizes[0] != input->lookups)
        return rf__tensor_refuse(&tensor, RF_ERR_VALUE,
                                 "float32 [%lld], a weight for each value, or an empty tensor",
                                 (long long)input->lookups);
    RF_CHECK(rf__columns_contiguous_check(&tensor));
    input->weights = tensor.data;
    return RF_OK;
}
