/* Gradients of fused calls on the CPU: tensors -> rf_fused_backward_params and rf_fused_embedding_bag_params. */
#include "torch/ops.h"

#include <stdlib.h>

#include "base/validate.h"

/* Positions in the schemas of the dense and the sparse gradient. */
enum {
    GRAD,
    FEATURES,
    INDICES,
    OFFSETS,
    GROUP,
    ROWS,
    DIM,
    DTYPE,
    SAMPLE_WEIGHTS,
    WINNERS,
    SCALE_GRAD_BY_FREQ
};

enum { COPIES = 6 };

typedef struct gradient_arguments {
    rf_fused_backward_params params;
    rf_executor executor;
    rf__place place;
    AtenTensorHandle copies[COPIES];
} gradient_arguments;

static void arguments_free(gradient_arguments *arguments) {
    for (int i = COPIES - 1; i >= 0; i--) rf__tensor_free(arguments->copies[i]);
}

/* grad: [bags, output_dim] of any float type, contiguous. */
static rf_status grad_read(AtenTensorHandle handle, const rf__place *place, int64_t bags,
                           AtenTensorHandle *copy, rf__tensor *grad, rf_dtype *dtype) {
    rf_status status = RF_OK;
    RF_TRY(rf__tensor_read("grad", handle, 2, place, grad));
    RF_TRY(rf__tensor_dtype(grad, dtype));
    if (grad->sizes[0] != bags) {
        return rf__fail(RF_ERR_VALUE,
                        "grad has %lld rows, must have one for each of the %lld bags of a feature",
                        (long long)grad->sizes[0], (long long)bags);
    }
    RF_TRY(rf__tensor_make_contiguous(grad, grad->dtype, copy));
out:
    return status;
}

static rf_status winners_read(AtenTensorHandle handle, const rf__place *place, const rf__tensor *grad,
                              AtenTensorHandle *copy, const int64_t **winners) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    if (handle == NULL) return RF_OK;
    RF_TRY(rf__tensor_read("winners", handle, 2, place, &tensor));
    if (tensor.dtype != aoti_torch_dtype_int64() || tensor.sizes[0] != grad->sizes[0] ||
        tensor.sizes[1] != grad->sizes[1]) {
        return rf__fail(RF_ERR_VALUE, "winners is %s [%lld, %lld], must be int64 [%lld, %lld], as grad is",
                        rf__torch_dtype_name(tensor.dtype), (long long)tensor.sizes[0],
                        (long long)tensor.sizes[1], (long long)grad->sizes[0], (long long)grad->sizes[1]);
    }
    RF_TRY(rf__tensor_make_contiguous(&tensor, tensor.dtype, copy));
    *winners = tensor.data;
out:
    return status;
}

static rf_status dtype_parse(int64_t code, rf_dtype *dtype) {
    if (code < RF_FLOAT32 || code > RF_BFLOAT16) {
        return rf__fail(RF_ERR_TYPE, "dtype is %lld, must be 0 (float32), 1 (float16) or 2 (bfloat16)",
                        (long long)code);
    }
    *dtype = (rf_dtype)code;
    return RF_OK;
}

static rf_status arguments_read(const rf__value *values, gradient_arguments *arguments) {
    rf_status status = RF_OK;
    rf_fused_backward_params *params = &arguments->params;
    rf_fused_embedding_bag_params lookups = {0};
    rf__tensor grad;
    RF_TRY(rf__tensor_place(values[GRAD].tensor, &arguments->place));
    RF_TRY(rf__features_read(values[FEATURES].tensor, &arguments->copies[0], &params->features,
                             &params->n_features));
    lookups.n_features = params->n_features;
    RF_TRY(rf__lookups_read(values[INDICES].tensor, values[OFFSETS].tensor, &arguments->place,
                            &arguments->copies[1], &lookups));
    params->indices = lookups.indices;
    params->lookups = lookups.lookups;
    params->offsets = lookups.offsets;
    params->bags = lookups.bags;
    params->index_type = lookups.index_type;
    params->offset_type = lookups.offset_type;
    RF_TRY(rf__sample_weights_read(values[SAMPLE_WEIGHTS].tensor, params->lookups, &arguments->place,
                                   &arguments->copies[3], &params->sample_weights));
    RF_TRY(grad_read(values[GRAD].tensor, &arguments->place, params->bags, &arguments->copies[4], &grad,
                     &params->grad_dtype));
    params->grad = grad.data;
    params->output_dim = grad.sizes[1];
    RF_TRY(winners_read(values[WINNERS].tensor, &arguments->place, &grad, &arguments->copies[5],
                        &params->winners));
    params->group = values[GROUP].integer;
    params->rows = values[ROWS].integer;
    params->dim = values[DIM].integer;
    RF_TRY(dtype_parse(values[DTYPE].integer, &params->dtype));
    params->scale_grad_by_freq = values[SCALE_GRAD_BY_FREQ].boolean;
    RF_TRY(rf__check_fused_backward("fused_embedding_bag_backward", params)); /* before memory is asked for */
    RF_TRY(rf__torch_executor(&arguments->executor));
out:
    return status;
}

rf_status rf__torch_fused_embedding_bag_backward(const rf__value *values, AtenTensorHandle *outputs) {
    rf_status status = RF_OK;
    gradient_arguments arguments = {0};
    const rf_fused_backward_params *params = &arguments.params;
    void *output = NULL;
    RF_TRY(arguments_read(values, &arguments));
    RF_TRY(rf__tensor_new(params->rows, params->dim, rf__torch_dtype(params->dtype), &arguments.place,
                          &outputs[0], &output));
    RF_TRY(rf_fused_embedding_bag_backward_cpu(params, output, &arguments.executor));
out:
    arguments_free(&arguments);
    return status;
}

/* Where the outputs of the sparse gradient are made. */
typedef struct sparse_outputs {
    const gradient_arguments *arguments;
    AtenTensorHandle *outputs; /* [2] */
} sparse_outputs;

static rf_status sparse_allocate(void *context, int64_t count, int64_t **rows, void **values) {
    rf_status status = RF_OK;
    const sparse_outputs *outputs = context;
    const gradient_arguments *arguments = outputs->arguments;
    void *data = NULL;
    RF_TRY(
        rf__tensor_new_list(count, aoti_torch_dtype_int64(), &arguments->place, &outputs->outputs[0], &data));
    *rows = data;
    RF_TRY(rf__tensor_new(count, arguments->params.dim, rf__torch_dtype(arguments->params.dtype),
                          &arguments->place, &outputs->outputs[1], values));
out:
    return status;
}

rf_status rf__torch_fused_embedding_bag_sparse_backward(const rf__value *values, AtenTensorHandle *outputs) {
    rf_status status = RF_OK;
    gradient_arguments arguments = {0};
    sparse_outputs context = {&arguments, outputs};
    const rf_sparse_output output = {sparse_allocate, &context};
    RF_TRY(arguments_read(values, &arguments));
    RF_TRY(rf_fused_embedding_bag_sparse_backward_cpu(&arguments.params, &output, &arguments.executor));
out:
    arguments_free(&arguments);
    return status;
}

/* weights, features, indices and offsets from values[0] on. */
static rf_status call_read(const rf__value *values, const rf__place *place, rf_buffer **buffers,
                           AtenTensorHandle *copies, rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    const int64_t *columns = NULL;
    RF_TRY(rf__features_read(values[1].tensor, &copies[0], &params->features, &params->n_features));
    RF_TRY(rf__weights_read(values[0].list, place, buffers, &columns, params));
    RF_TRY(rf__check_fused_rows(params, columns));
    RF_TRY(rf__lookups_read(values[2].tensor, values[3].tensor, place, &copies[1], params));
    for (int64_t f = 0; f < params->n_features; f++) {
        if (__builtin_add_overflow(params->output_dim, params->features[f].dim, &params->output_dim)) {
            return rf__fail(RF_ERR_VALUE, "features[%lld] has %lld columns, too many", (long long)f,
                            (long long)params->features[f].dim);
        }
    }
    params->output_stride = params->output_dim;
    if (params->output_dim < 0) status = rf__fail(RF_ERR_VALUE, "a feature has fewer than 0 columns");
out:
    return status;
}

rf_status rf__torch_fused_embedding_bag_winners(const rf__value *values, AtenTensorHandle *outputs) {
    enum { WEIGHTS, LOOKUPS = 2, OUTPUT_DIM = 4 };
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params params = {0};
    rf_executor executor;
    rf_buffer *buffers = NULL;
    rf__place place;
    AtenTensorHandle copies[3] = {NULL, NULL, NULL};
    void *winners = NULL;
    RF_TRY(rf__tensor_place(values[LOOKUPS].tensor, &place));
    RF_TRY(call_read(values + WEIGHTS, &place, &buffers, copies, &params));
    if (values[OUTPUT_DIM].integer != params.output_dim) {
        status = rf__fail(RF_ERR_VALUE, "output_dim is %lld, must be the %lld columns of the features",
                          (long long)values[OUTPUT_DIM].integer, (long long)params.output_dim);
        goto out;
    }
    RF_TRY(rf__tensor_new(params.bags, params.output_dim, aoti_torch_dtype_int64(), &place, &outputs[0],
                          &winners));
    RF_TRY(rf__torch_executor(&executor));
    RF_TRY(rf_fused_embedding_bag_winners_cpu(&params, winners, &executor));
out:
    for (int i = 2; i >= 0; i--) rf__tensor_free(copies[i]);
    free(buffers);
    return status;
}

rf_status rf__torch_fused_embedding_bag_sample_weights_backward(const rf__value *values,
                                                                AtenTensorHandle *outputs) {
    enum { WEIGHTS = 1 };
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params params = {0};
    rf_executor executor;
    rf_buffer *buffers = NULL;
    rf__place place;
    rf__tensor grad;
    rf_dtype grad_dtype;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    void *output = NULL;
    RF_TRY(rf__tensor_place(values[GRAD].tensor, &place));
    RF_TRY(call_read(values + WEIGHTS, &place, &buffers, copies, &params));
    RF_TRY(grad_read(values[GRAD].tensor, &place, params.bags, &copies[3], &grad, &grad_dtype));
    if (grad.sizes[1] != params.output_dim) {
        status = rf__fail(RF_ERR_VALUE, "grad has %lld columns, must have the %lld of the features",
                          (long long)grad.sizes[1], (long long)params.output_dim);
        goto out;
    }
    RF_TRY(rf__tensor_new_list(params.lookups, aoti_torch_dtype_float32(), &place, &outputs[0], &output));
    RF_TRY(rf__torch_executor(&executor));
    RF_TRY(rf_fused_embedding_bag_sample_weights_backward_cpu(&params, grad.data, grad_dtype, output,
                                                              &executor));
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    free(buffers);
    return status;
}
