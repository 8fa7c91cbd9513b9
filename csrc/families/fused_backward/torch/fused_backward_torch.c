/* Gradients of weights of fused calls, dense and sparse: tensors -> rf_fused_backward_params. */
#include <stdlib.h>

#include "families/fused_backward/check/check_backward.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "families/fused_backward/torch/gradient_list.h"
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

/* Reads everything except the fields of a single weight's gradient. */
static rf_status call_read(rf__call *call, rf_fused_backward_params *params) {
    rf_fused_embedding_bag_params lookups = {0};
    rf__tensor grad;
    RF_CHECK(rf__call_device(call, GRAD));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &lookups.features, &lookups.n_features));
    RF_CHECK(rf__call_tensor(call, GRAD, 2, &grad));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, grad.sizes[0], &lookups));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, lookups.lookups, &lookups.sample_weights));
    *params = (rf_fused_backward_params){
        .features = lookups.features, .n_features = lookups.n_features, RF__LOOKUPS_OF(&lookups)};
    RF_CHECK(rf__fused_grad_read(call, GRAD, params->bags, &grad, &params->grad_dtype));
    params->grad = grad.data;
    params->output_dim = grad.sizes[1];
    return rf__call_winners(call, WINNERS, &grad, &params->winners);
}

/* Sets the fields of a weight. Checked before memory is allocated. */
static rf_status weight_set(rf_fused_backward_params *params, int64_t group, int64_t rows, int64_t dim,
                            int64_t dtype) {
    RF_FAIL_IF(dtype < RF_FLOAT32 || dtype > RF_BFLOAT16, RF_ERR_TYPE,
               "dtype is %lld; expected 0 (float32), 1 (float16) or 2 (bfloat16)", (long long)dtype);
    params->group = group;
    params->rows = rows;
    params->dim = dim;
    params->dtype = (rf_dtype)dtype;
    return rf__check_fused_backward("fused_embedding_bag_backward", params);
}

static rf_status params_read(rf__call *call, rf_fused_backward_params *params) {
    const rf__value *values = call->values;
    RF_CHECK(call_read(call, params));
    params->scale_grad_by_freq = values[SCALE_GRAD_BY_FREQ].boolean;
    return weight_set(params, values[GROUP].integer, values[ROWS].integer, values[DIM].integer,
                      values[DTYPE].integer);
}

static rf_status dense_run(rf__call *call) {
    rf_fused_backward_params params;
    rf_executor executor;
    rf_cuda_stream stream;
    void *output = NULL;
    RF_CHECK(params_read(call, &params));
    const int64_t sizes[2] = {params.rows, params.dim};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, rf__torch_dtype(params.dtype), &output));
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_backward_cpu(&params, output, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_backward_cuda(&params, output, &allocator, &stream);
}

static rf_status sparse_compute(rf__call *call, const rf_fused_backward_params *params,
                                const rf_sparse_output *output) {
    rf_executor executor;
    rf_cuda_stream stream;
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_sparse_backward_cpu(params, output, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_sparse_backward_cuda(params, output, &allocator, &stream);
}

static rf_status sparse_run(rf__call *call) {
    rf_fused_backward_params params;
    rf__gradient_list gradients = {.call = call, .params = &params, .row_dims = 1};
    const rf_sparse_output output = {rf__gradient_list_new, &gradients};
    RF_CHECK(params_read(call, &params));
    const rf_status status = sparse_compute(call, &params, &output);
    /* The call's now, which frees them if it has failed. */
    call->outputs[0] = (rf__value){.is_present = gradients.rows != NULL, .tensor = gradients.rows};
    call->outputs[1] = (rf__value){.is_present = gradients.values != NULL, .tensor = gradients.values};
    return status;
}

static rf_status integer_read(rf__call *call, int argument, size_t at, int64_t *integer) {
    rf__value item = {0};
    RF__TORCH_CHECK(torch_list_get_item(call->values[argument].list, at, &item.bits));
    *integer = item.integer;
    return RF_OK;
}

static rf_status several_compute(rf__call *call, const rf_fused_backward_params *params,
                                 const rf_sparse_output *outputs, int64_t n) {
    rf_executor executor;
    rf_cuda_stream stream;
    if (!rf__call_on_cpu(call)) {
        const rf_cuda_allocator allocator = rf__call_allocator(call);
        RF_CHECK(rf__call_stream(call, &stream));
        return rf_fused_embedding_bag_sparse_gradients_cuda(params, outputs, n, &allocator, &stream);
    }
    RF_CHECK(rf__call_executor(&executor));
    for (int64_t i = 0; i < n; i++)
        RF_CHECK(rf_fused_embedding_bag_sparse_backward_cpu(&params[i], &outputs[i], &executor));
    return RF_OK;
}

/* Makes row-sparse gradients the output, in the order of the weights. */
static rf_status list_return(rf__call *call, rf__gradient_list *gradients, size_t n) {
    rf__value *output = &call->outputs[0];
    RF__TORCH_CHECK(torch_new_list_reserve_size(2 * n, &output->list));
    output->is_present = true;
    for (size_t i = 0; i < n; i++) {
        AtenTensorHandle *const tensors[2] = {&gradients[i].rows, &gradients[i].values};
        for (int which = 0; which < 2; which++) {
            const rf__value item = {.tensor = *tensors[which]};
            RF__TORCH_CHECK(torch_list_push_back(output->list, item.bits));
            *tensors[which] = NULL; /* the list's now */
        }
    }
    return RF_OK;
}

static rf_status several_run(rf__call *call) {
    enum { LISTS = 4 };
    rf_status status = RF_OK;
    rf_fused_backward_params common;
    size_t n = 0;
    RF_CHECK(call_read(call, &common));
    RF__TORCH_CHECK(torch_list_size(call->values[GROUP].list, &n));
    for (int list = GROUP + 1; list < GROUP + LISTS; list++) {
        size_t size = 0;
        RF__TORCH_CHECK(torch_list_size(call->values[list].list, &size));
        RF_FAIL_IF(size != n, RF_ERR_VALUE, "%s has %zu items; expected %zu, as groups",
                   call->registered->signature.names[list], size, n);
    }
    rf_fused_backward_params *params =
        calloc(n + 1, sizeof *params + sizeof(rf_sparse_output) + sizeof(rf__gradient_list));
    RF_FAIL_IF(params == NULL, RF_ERR_MEMORY, "no memory for %zu weights", n);
    call->scratch = params;
    rf_sparse_output *outputs = (rf_sparse_output *)(params + n);
    rf__gradient_list *gradients = (rf__gradient_list *)(outputs + n);
    for (size_t i = 0; i < n; i++) {
        int64_t of[LISTS];
        for (int list = 0; list < LISTS; list++) RF_CHECK(integer_read(call, GROUP + list, i, &of[list]));
        params[i] = common;
        RF_CHECK(weight_set(&params[i], of[0], of[1], of[2], of[3]));
        gradients[i] = (rf__gradient_list){.call = call, .params = &params[i], .row_dims = 1};
        outputs[i] = (rf_sparse_output){rf__gradient_list_new, &gradients[i]};
    }
    RF_TRY(several_compute(call, params, outputs, (int64_t)n));
    RF_TRY(list_return(call, gradients, n));
out:
    for (size_t i = 0; i < n; i++) rf__gradient_list_free(&gradients[i]);
    return status;
}

#define ARGUMENTS                                                                             \
    "(Tensor grad, Tensor features, Tensor indices, Tensor offsets, int group, SymInt rows, " \
    "SymInt dim, int dtype, Tensor? per_sample_weights, Tensor? winners, "                    \
    "bool scale_grad_by_freq=False) -> "
const rf__operator rf__torch_fused_embedding_bag_backward = {ARGUMENTS "Tensor", RF__CPU | RF__CUDA,
                                                             dense_run};
const rf__operator rf__torch_fused_embedding_bag_sparse_backward = {ARGUMENTS "(Tensor, Tensor)",
                                                                    RF__CPU | RF__CUDA, sparse_run};
/* Rows and values of each weight in turn. */
const rf__operator rf__torch_fused_embedding_bag_sparse_gradients = {
    "(Tensor grad, Tensor features, Tensor indices, Tensor offsets, int[] groups, SymInt[] row_counts, "
    "SymInt[] dims, int[] dtypes, Tensor? per_sample_weights, Tensor? winners) -> Tensor[]",
    RF__CPU | RF__CUDA, several_run};
