/* recfuse::_embedding_bag_gradient: the sparse gradient of a plain bag on the CPU, as one tensor. A step of a
 * small bag takes as long as its overhead, so the tensor is created here, and the operator has no argument
 * that such a bag lacks. The index and value tensors are created as for other sparse gradients. */

#include "core/validate.h"
#include "families/fused_backward/torch/gradient_list.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/dispatch.h"
#include "torch/operators.h"

enum { GRAD, INDICES, OFFSETS, POOLING, INCLUDE_LAST_OFFSET, PADDING_IDX, ROWS, DIM, DTYPE };

/* `feature` receives the feature of params. */
static rf_status params_read(rf__call *call, rf_feature *feature, rf_fused_backward_params *params) {
    const rf__value *values = call->values;
    const int64_t dtype = values[DTYPE].integer;
    rf__tensor grad;
    *feature = (rf_feature){.rows = values[ROWS].integer,
                            .dim = values[DIM].integer,
                            .pooling = values[POOLING].integer,
                            .padding_idx = values[PADDING_IDX].integer};
    *params = (rf_fused_backward_params){
        .features = feature, .n_features = 1, .rows = feature->rows, .dim = feature->dim};
    RF_CHECK(rf__call_device(call, GRAD));
    RF_FAIL_IF(dtype < RF_FLOAT32 || dtype > RF_BFLOAT16, RF_ERR_TYPE,
               "dtype is %lld; expected 0 (float32), 1 (float16) or 2 (bfloat16)", (long long)dtype);
    params->dtype = (rf_dtype)dtype;
    RF_CHECK(rf__call_integers(call, INDICES, &params->indices, &params->lookups, &params->index_type));
    RF_CHECK(rf__call_integers(call, OFFSETS, &params->offsets, &params->bags, &params->offset_type));
    if (values[INCLUDE_LAST_OFFSET].boolean) {
        RF_FAIL_IF(params->bags == 0, RF_ERR_VALUE,
                   "offsets is empty; expected at least one element with include_last_offset");
        params->bags--;
    } else {
        RF_CHECK(rf__call_offsets_complete(call, params->bags, params->lookups, &params->offsets,
                                           &params->offset_type));
    }
    RF_CHECK(rf__fused_grad_read(call, GRAD, params->bags, &grad, &params->grad_dtype));
    params->grad = grad.data;
    params->output_dim = grad.sizes[1];
    return RF_OK;
}

/* Takes the tensors in all cases. */
static rf_status coalesced_return(rf__call *call, rf__gradient_list *gradients) {
    rf_status status = RF_OK;
    const int64_t sizes[2] = {gradients->params->rows, gradients->params->dim};
    rf__dispatch dispatch = rf__dispatch_of("aten::_sparse_coo_tensor_unsafe", "");
    rf__pass_tensor(&dispatch, gradients->rows);
    rf__pass_tensor(&dispatch, gradients->values);
    gradients->rows = gradients->values = NULL;
    RF_TRY(rf__pass_integers(&dispatch, sizes, 2));
    for (int i = 0; i < 4; i++)
        rf__pass_null(&dispatch); /* dtype, layout, device, pin_memory: those of the values */
    rf__pass_optional_boolean(&dispatch, true); /* is_coalesced */
    RF_TRY(rf__dispatch_run(&dispatch, 1));
    call->outputs[0] = (rf__value){.is_present = true, .tensor = dispatch.results[0]};
    dispatch.results[0] = NULL;
out:
    rf__dispatch_free(&dispatch);
    return status;
}

static rf_status run(rf__call *call) {
    rf_status status = RF_OK;
    rf_feature feature;
    rf_fused_backward_params params;
    rf_executor executor;
    rf_cuda_stream stream;
    rf__gradient_list gradients = {.call = call, .params = &params, .row_dims = 2};
    const rf_sparse_output output = {rf__gradient_list_new, &gradients};
    RF_TRY(params_read(call, &feature, &params));
    if (rf__call_on_cpu(call)) {
        RF_TRY(rf__call_executor(&executor));
        RF_TRY(rf_fused_embedding_bag_sparse_backward_cpu(&params, &output, &executor));
    } else { /* it is explained */
        RF_TRY(rf__call_stream(call, &stream));
        RF_TRY(rf_fused_embedding_bag_sparse_backward_cuda(&params, &output, NULL, &stream));
    }
    RF_TRY(coalesced_return(call, &gradients));
out:
    rf__gradient_list_free(&gradients);
    return status;
}

const rf__operator rf__torch__embedding_bag_gradient = {
    "(Tensor grad, Tensor indices, Tensor offsets, int pooling, bool include_last_offset, int padding_idx, "
    "int rows, int dim, int dtype) -> Tensor",
    RF__CPU, run};
