/* Arguments of the operators of embedding columns. */
#include <stdlib.h>

#include "families/embedding_columns/tensors/columns_tensors.h"
#include "torch/arguments.h"
#include "families/embedding_columns/torch/columns_torch.h"

/* The lists of a call; NULL if absent. */
typedef struct tensor_lists {
    StableListHandle weights, dense, values, offsets, value_weights;
    size_t n_weights, n_dense, n_values, n_offsets, n_value_weights;
} tensor_lists;

static rf_status list_of(const rf__call *call, int argument, StableListHandle *list, size_t *count) {
    if (argument < 0) return RF_OK;
    *list = call->values[argument].list;
    RF__TORCH_CHECK(torch_list_size(*list, count));
    return RF_OK;
}

static rf_status item_of(StableListHandle list, size_t at, AtenTensorHandle *handle) {
    rf__value item = {0};
    RF__TORCH_CHECK(torch_list_get_item(list, at, &item.bits));
    *handle = item.tensor;
    return RF_OK;
}

static rf_status lists_read(const rf__call *call, const rf__columns_arguments *at, tensor_lists *lists) {
    RF_CHECK(list_of(call, at->weights, &lists->weights, &lists->n_weights));
    RF_CHECK(list_of(call, at->dense, &lists->dense, &lists->n_dense));
    RF_CHECK(list_of(call, at->values, &lists->values, &lists->n_values));
    RF_CHECK(list_of(call, at->offsets, &lists->offsets, &lists->n_offsets));
    RF_CHECK(list_of(call, at->value_weights, &lists->value_weights, &lists->n_value_weights));
    RF_FAIL_IF(lists->n_offsets != lists->n_values ||
                   (lists->n_value_weights != 0 && lists->n_value_weights != lists->n_values),
               RF_ERR_VALUE,
               "values has %zu tensors, offsets %zu and value_weights %zu; expected offsets for each, and "
               "weights for each or no weights",
               lists->n_values, lists->n_offsets, lists->n_value_weights);
    return RF_OK;
}

static rf_status first_device(StableListHandle list, rf__torch_device *device) {
    AtenTensorHandle first = NULL;
    RF_CHECK(item_of(list, 0, &first));
    return rf__tensor_device(first, device);
}

/* Sets the device to the GPU of the first dense or jagged input on a GPU, because the last dense input may be
 * on the host. Without inputs it is the device of the first weight: weights may be elsewhere. */
static rf_status device_find(rf__call *call, const tensor_lists *lists) {
    call->device = rf__device_cpu();
    if (lists->n_dense > 0) RF_CHECK(first_device(lists->dense, &call->device));
    if (lists->n_values > 0 && rf__device_is_cpu(call->device))
        RF_CHECK(first_device(lists->values, &call->device));
    if (lists->n_dense == 0 && lists->n_values == 0 && lists->n_weights > 0)
        RF_CHECK(first_device(lists->weights, &call->device));
    return RF_OK;
}

/* Replaces a tensor on the host by the call's own copy on its GPU. */
static rf_status host_tensor_copy(rf__call *call, AtenTensorHandle *handle) {
    const rf__cuda_device *device = NULL;
    rf_cuda_stream stream;
    rf__cuda_store store;
    rf__tensor tensor;
    void *data = NULL;
    RF_CHECK(rf__tensor_read("dense", *handle, RF__ANY_DIM, rf__device_cpu(), &tensor));
    int64_t bytes = (int64_t)aoti_torch_dtype_element_size(tensor.dtype);
    for (int64_t d = 0; d < tensor.dim; d++) bytes *= tensor.sizes[d];
    RF_CHECK(rf__columns_contiguous_check(&tensor));
    RF_CHECK(rf__call_stream(call, &stream));
    RF_CHECK(rf__cuda_device_get(stream.device, &device));
    RF_CHECK(rf__cuda_store_of(device, stream.stream, NULL, &store));
    RF_FAIL_IF(store.resident, RF_ERR_UNSUPPORTED,
               "%s is on the CPU, other arguments are on a GPU whose work is captured, and a CUDA graph "
               "would copy its present contents. Move it to the GPU.",
               tensor.argument);
    RF_CHECK(rf__call_temporary(call, tensor.dim, tensor.sizes, tensor.dtype, handle, &data));
    return rf__cuda_copy(&store, tensor.data, (size_t)bytes, (uintptr_t)data);
}

/* Reads a dense input; the last one may be on the host if the others are on a GPU. */
static rf_status dense_read(rf__call *call, const tensor_lists *lists, size_t at) {
    AtenTensorHandle handle = NULL;
    rf__torch_device device = call->device;
    RF_CHECK(item_of(lists->dense, at, &handle));
    if (at == lists->n_dense - 1) RF_CHECK(rf__tensor_device(handle, &device));
    if (rf__device_is_cpu(device) && !rf__device_is_cpu(call->device))
        RF_CHECK(host_tensor_copy(call, &handle));
    return rf__columns_dense_read(rf__columns_inputs_of(call), (int64_t)at, handle);
}

static rf_status jagged_read(rf__call *call, const tensor_lists *lists, size_t at, int64_t input) {
    AtenTensorHandle values = NULL, offsets = NULL, weights = NULL;
    RF_CHECK(item_of(lists->values, at, &values));
    RF_CHECK(item_of(lists->offsets, at, &offsets));
    if (lists->n_value_weights > 0) RF_CHECK(item_of(lists->value_weights, at, &weights));
    return rf__columns_jagged_read(rf__columns_inputs_of(call), input, values, offsets, weights);
}

/* Finds the GPU's address of page-locked memory of the host. */
static rf_status host_weight_find(const rf__call *call, const rf__tensor *tensor, const void **data) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(call->device.index, &device));
    const rf__cu_pointer address = rf__cuda_host_pointer(device, tensor->data);
    RF_FAIL_IF(address == 0 && tensor->data != NULL, RF_ERR_VALUE,
               "%s is on the CPU, other arguments are on a GPU, which reads page-locked memory alone. Pass "
               "%s.pin_memory(), or move all tensors to one device.",
               tensor->argument, tensor->argument);
    *data = (const void *)(uintptr_t)address;
    return RF_OK;
}

/* Weights are whole models, so they are not copied either. A GPU reads those in the host's memory. */
static rf_status weight_read(const rf__call *call, const tensor_lists *lists, size_t at, rf_buffer *buffer) {
    AtenTensorHandle handle = NULL;
    rf__tensor tensor;
    rf__torch_device device;
    RF_CHECK(item_of(lists->weights, at, &handle));
    RF_CHECK(rf__tensor_device(handle, &device));
    const bool by_gpu = rf__device_is_cpu(device) && !rf__device_is_cpu(call->device);
    RF_CHECK(
        rf__tensor_read("weights", handle, RF__ANY_DIM, by_gpu ? rf__device_cpu() : call->device, &tensor));
    RF_CHECK(rf__tensor_dtype(&tensor, &buffer->dtype));
    RF_CHECK(rf__columns_contiguous_check(&tensor));
    buffer->data = tensor.data;
    if (by_gpu) RF_CHECK(host_weight_find(call, &tensor, &buffer->data));
    buffer->numel = 1;
    for (int64_t d = 0; d < tensor.dim; d++) buffer->numel *= tensor.sizes[d];
    return RF_OK;
}

static rf_status program_read(rf__call *call, int argument, rf_embedding_columns_params *params) {
    rf__tensor program;
    RF_CHECK(rf__call_host_tensor(call, argument, 1, &program));
    if (program.dtype != aoti_torch_dtype_int64() || !rf__tensor_is_contiguous(&program))
        return rf__tensor_refuse(&program, RF_ERR_TYPE, "contiguous int64, as made from columns");
    params->program = program.data;
    params->program_words = program.sizes[0];
    return RF_OK;
}

static void inputs_drop(void *inputs) { rf__columns_inputs_drop(inputs); }

/* Gives the call a reference to its inputs, and returns them. */
static rf__columns_inputs *inputs_set(rf__call *call, rf__columns_inputs *inputs) {
    call->reference = inputs;
    call->drop = inputs_drop;
    return inputs;
}

/* Takes a list of inputs by its number. */
static rf_status inputs_take(rf__call *call, int argument, int64_t batch) {
    const rf__columns_inputs *inputs =
        inputs_set(call, rf__columns_inputs_take(call->values[argument].integer));
    RF_FAIL_IF(inputs == NULL, RF_ERR_VALUE,
               "inputs is %lld, which is no batch that is being read. Call recfuse.nn.EmbeddingColumns.",
               (long long)call->values[argument].integer);
    const bool on_gpu = !rf__device_is_cpu(call->device);
    RF_FAIL_IF(inputs->batch != batch || (inputs->on_gpu != 0) != on_gpu ||
                   (on_gpu && inputs->device != call->device.index),
               RF_ERR_VALUE,
               "inputs is a batch of %lld samples on %s %d; expected %lld on the device of weights",
               (long long)inputs->batch, inputs->on_gpu ? "GPU" : "the CPU, device", (int)inputs->device,
               (long long)batch);
    return RF_OK;
}

/* Adds the number of a tensor in its list to a failure. Formatting a name for each tensor would take longer
 * than reading it. */
static rf_status numbered(rf_status status, size_t at) {
    return status == RF_OK ? RF_OK : rf__fail(status, "%s (tensor %zu of its list)", rf_last_error(), at);
}

/* Reads the inputs of the lists. */
static rf_status inputs_read(rf__call *call, const tensor_lists *lists, int64_t gap, int64_t batch) {
    const int64_t first_jagged = (int64_t)lists->n_dense + gap;
    rf__columns_inputs *inputs =
        inputs_set(call, rf__columns_inputs_new(first_jagged + (int64_t)lists->n_values));
    RF_FAIL_IF(inputs == NULL, RF_ERR_MEMORY, "no memory for %zu tensors", lists->n_dense + lists->n_values);
    inputs->batch = batch;
    inputs->on_gpu = !rf__device_is_cpu(call->device);
    inputs->device = call->device.index;
    for (size_t i = 0; i < lists->n_dense; i++) RF_CHECK(numbered(dense_read(call, lists, i), i));
    for (size_t i = 0; i < lists->n_values; i++)
        RF_CHECK(numbered(jagged_read(call, lists, i, first_jagged + (int64_t)i), i));
    return RF_OK;
}

static rf_status weights_read(rf__call *call, const tensor_lists *lists,
                              rf_embedding_columns_params *params) {
    rf_buffer *buffers = calloc(lists->n_weights + 1, sizeof *buffers);
    RF_FAIL_IF(buffers == NULL, RF_ERR_MEMORY, "no memory for %zu tensors", lists->n_weights);
    call->scratch = buffers;
    params->output_dtype = RF_FLOAT32;
    for (size_t i = 0; i < lists->n_weights; i++) {
        RF_CHECK(numbered(weight_read(call, lists, i, &buffers[i]), i));
        if (i == 0) params->output_dtype = buffers[0].dtype;
        if (buffers[i].dtype != params->output_dtype) params->output_dtype = RF_FLOAT32;
    }
    params->buffers = buffers;
    params->n_buffers = (int64_t)lists->n_weights;
    return RF_OK;
}

rf_status rf__columns_read(rf__call *call, const rf__columns_arguments *at,
                           rf_embedding_columns_params *params) {
    tensor_lists lists = {0};
    const int64_t batch = params->batch = call->values[at->batch].integer;
    RF_FAIL_IF(batch < 0, RF_ERR_VALUE, "batch is %lld; expected >= 0", (long long)batch);
    RF_CHECK(lists_read(call, at, &lists));
    RF_CHECK(device_find(call, &lists));
    RF_CHECK(program_read(call, at->program, params));
    RF_CHECK(at->inputs >= 0 ? inputs_take(call, at->inputs, batch)
                             : inputs_read(call, &lists, at->gap, batch));
    params->inputs = rf__columns_inputs_of(call)->rows;
    params->n_inputs = rf__columns_inputs_of(call)->count;
    RF_CHECK(weights_read(call, &lists, params));
    return rf__call_bounds_check(call, at->bounds_check, &params->check_bounds);
}

rf_status rf__columns_read_with_output(rf__call *call, const rf__columns_arguments *at, int output_dim,
                                       rf_embedding_columns_params *params) {
    params->output_dim = params->output_stride = call->values[output_dim].integer;
    RF_CHECK(rf__columns_read(call, at, params));
    RF_FAIL_IF(params->output_dim < 0, RF_ERR_VALUE, "output_dim is %lld; expected >= 0",
               (long long)params->output_dim);
    const int64_t sizes[2] = {params->batch, params->output_dim};
    return rf__call_output(call, 0, 2, sizes, rf__torch_dtype(params->output_dtype), &params->output);
}
