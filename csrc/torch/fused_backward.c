/* Gradients of a weight of fused calls, dense and sparse: tensors -> rf_fused_backward_params. */
#include "base/validate.h"
#include "torch/arguments.h"
#include "torch/operators.h"

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

static rf_status params_read(rf__call *call, rf_fused_backward_params *params) {
    const rf__value *values = call->values;
    rf_fused_embedding_bag_params lookups = {0};
    rf__tensor grad;
    RF_CHECK(rf__call_device(call, GRAD));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &lookups.features, &lookups.n_features));
    RF_CHECK(rf__call_tensor(call, GRAD, 2, &grad));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, grad.sizes[0], &lookups));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, lookups.lookups, &lookups.sample_weights));
    *params = (rf_fused_backward_params){.features = lookups.features,
                                         .n_features = lookups.n_features,
                                         RF__LOOKUPS_OF(&lookups),
                                         .group = values[GROUP].integer,
                                         .rows = values[ROWS].integer,
                                         .dim = values[DIM].integer,
                                         .scale_grad_by_freq = values[SCALE_GRAD_BY_FREQ].boolean};
    RF_CHECK(rf__fused_grad_read(call, GRAD, params->bags, &grad, &params->grad_dtype));
    params->grad = grad.data;
    params->output_dim = grad.sizes[1];
    RF_CHECK(rf__call_winners(call, WINNERS, &grad, &params->winners));
    const int64_t dtype = values[DTYPE].integer;
    RF_FAIL_IF(dtype < RF_FLOAT32 || dtype > RF_BFLOAT16, RF_ERR_TYPE,
               "dtype is %lld, must be 0 (float32), 1 (float16) or 2 (bfloat16)", (long long)dtype);
    params->dtype = (rf_dtype)dtype;
    /* Before memory is asked for. */
    return rf__check_fused_backward("fused_embedding_bag_backward", params);
}

static rf_status dense_run(rf__call *call) {
    rf_fused_backward_params params;
    rf_executor executor;
    rf_cuda_stream stream;
    void *output = NULL;
    RF_CHECK(params_read(call, &params));
    const int64_t sizes[2] = {params.rows, params.dim};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, rf__torch_dtype(params.dtype), &output));
    if (rf__device_is_cpu(call->device)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_backward_cpu(&params, output, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_backward_cuda(&params, output, &allocator, &stream);
}

/* Where the outputs of the sparse gradient are made. */
typedef struct sparse_context {
    rf__call *call;
    const rf_fused_backward_params *params;
} sparse_context;

static rf_status sparse_allocate(void *context, int64_t count, int64_t **rows, void **values) {
    const sparse_context *sparse = context;
    const int64_t sizes[2] = {count, sparse->params->dim};
    void *data = NULL;
    RF_CHECK(rf__call_output(sparse->call, 0, 1, sizes, aoti_torch_dtype_int64(), &data));
    *rows = data;
    return rf__call_output(sparse->call, 1, 2, sizes, rf__torch_dtype(sparse->params->dtype), values);
}

static rf_status sparse_run(rf__call *call) {
    rf_fused_backward_params params;
    rf_executor executor;
    rf_cuda_stream stream;
    sparse_context context = {call, &params};
    const rf_sparse_output output = {sparse_allocate, &context};
    RF_CHECK(params_read(call, &params));
    if (rf__device_is_cpu(call->device)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_sparse_backward_cpu(&params, &output, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_sparse_backward_cuda(&params, &output, &allocator, &stream);
}

#define ARGUMENTS                                                                             \
    "(Tensor grad, Tensor features, Tensor indices, Tensor offsets, int group, SymInt rows, " \
    "SymInt dim, int dtype, Tensor? per_sample_weights, Tensor? winners, "                    \
    "bool scale_grad_by_freq=False) -> "
const rf__operator rf__torch_fused_embedding_bag_backward = {ARGUMENTS "Tensor", RF__CPU | RF__CUDA,
                                                             dense_run};
const rf__operator rf__torch_fused_embedding_bag_sparse_backward = {ARGUMENTS "(Tensor, Tensor)",
                                                                    RF__CPU | RF__CUDA, sparse_run};
