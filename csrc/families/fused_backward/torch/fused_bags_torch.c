/* The other gradients of fused calls: winners of maxima, and the sample weights' gradient. */
#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/operators.h"

/* Indices and offsets from argument `indices` on, and the columns of all features; weights are read. */
static rf_status lookups_read(rf__call *call, int indices, const int64_t *columns,
                              rf_fused_embedding_bag_params *params) {
    RF_CHECK(rf__check_fused_rows(params, columns));
    RF_CHECK(rf__fused_lookups_read(call, indices, indices + 1, -1, params));
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t dim = params->features[f].dim;
        RF_FAIL_IF(__builtin_add_overflow(params->output_dim, dim, &params->output_dim), RF_ERR_VALUE,
                   "features[%lld] has %lld columns, too many", (long long)f, (long long)dim);
    }
    RF_FAIL_IF(params->output_dim < 0, RF_ERR_VALUE, "a feature has fewer than 0 columns");
    params->output_stride = params->output_dim;
    return RF_OK;
}

/* weights, features, indices and offsets from argument `first` on. */
static rf_status call_read(rf__call *call, int first, rf_fused_embedding_bag_params *params) {
    const int64_t *columns = NULL;
    RF_CHECK(rf__fused_features_read(call, first + 1, &params->features, &params->n_features));
    RF_CHECK(rf__fused_weights_read(call, first, &columns, params));
    return lookups_read(call, first + 2, columns, params);
}

static rf_status winners_run(rf__call *call) {
    enum { WEIGHTS, INDICES = 2, OUTPUT_DIM = 4 };
    rf_fused_embedding_bag_params params = {0};
    rf_executor executor;
    rf_cuda_stream stream;
    void *winners = NULL;
    RF_CHECK(rf__call_device(call, INDICES));
    RF_CHECK(call_read(call, WEIGHTS, &params));
    RF_FAIL_IF(call->values[OUTPUT_DIM].integer != params.output_dim, RF_ERR_VALUE,
               "output_dim is %lld; expected the %lld columns of the features",
               (long long)call->values[OUTPUT_DIM].integer, (long long)params.output_dim);
    const int64_t sizes[2] = {params.bags, params.output_dim};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, aoti_torch_dtype_int64(), &winners));
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_winners_cpu(&params, winners, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_winners_cuda(&params, winners, &allocator, &stream);
}

enum { GRAD }; /* of both operators below */

/* Runs a call that is read, but for grad. */
static rf_status sample_weights_write(rf__call *call, const rf_fused_embedding_bag_params *params) {
    rf_executor executor;
    rf_cuda_stream stream;
    rf__tensor grad;
    rf_dtype grad_dtype;
    void *output = NULL;
    RF_CHECK(rf__fused_grad_read(call, GRAD, params->bags, &grad, &grad_dtype));
    RF_FAIL_IF(grad.sizes[1] != params->output_dim, RF_ERR_VALUE,
               "grad has %lld columns; expected the %lld of the features", (long long)grad.sizes[1],
               (long long)params->output_dim);
    RF_CHECK(rf__call_output(call, 0, 1, &params->lookups, aoti_torch_dtype_float32(), &output));
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_sample_weights_backward_cpu(params, grad.data, grad_dtype, output,
                                                                  &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_sample_weights_backward_cuda(params, grad.data, grad_dtype, output,
                                                               &allocator, &stream);
}

static rf_status sample_weights_run(rf__call *call) {
    enum { WEIGHTS = GRAD + 1 };
    rf_fused_embedding_bag_params params = {0};
    RF_CHECK(rf__call_device(call, GRAD));
    RF_CHECK(call_read(call, WEIGHTS, &params));
    return sample_weights_write(call, &params);
}

static rf_status quantized_sample_weights_run(rf__call *call) {
    enum { WEIGHTS = GRAD + 1, PARAMETERS, FEATURES, INDICES, OFFSETS, STORED };
    rf_fused_embedding_bag_params params = {.output_dtype = RF_FLOAT32};
    const int64_t *columns = NULL;
    RF_CHECK(rf__call_device(call, GRAD));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &params.features, &params.n_features));
    RF_CHECK(rf__fused_quantized_weights_read(call, WEIGHTS, STORED, &columns, &params));
    RF_CHECK(lookups_read(call, INDICES, columns, &params));
    return sample_weights_write(call, &params);
}

const rf__operator rf__torch_fused_embedding_bag_winners = {
    "(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim) -> Tensor",
    RF__CPU | RF__CUDA, winners_run};
const rf__operator rf__torch_fused_embedding_bag_sample_weights_backward = {
    "(Tensor grad, Tensor[] weights, Tensor features, Tensor indices, Tensor offsets) -> Tensor",
    RF__CPU | RF__CUDA, sample_weights_run};
const rf__operator rf__torch_fused_embedding_bag_quantized_sample_weights_backward = {
    "(Tensor grad, Tensor[] weights, Tensor[] parameters, Tensor features, Tensor indices, Tensor offsets, "
    "Tensor? stored=None) -> Tensor",
    RF__CPU | RF__CUDA, quantized_sample_weights_run};
