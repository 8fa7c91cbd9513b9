/* Updates by fused optimizers: tensors -> rf_fused_update_params, rf_rows_update_params.
 *
 * The schema of fused_embedding_bag_update hides that weights and states change: it runs in backward passes,
 * and a compiled backward pass must not change inputs of the gradient. It returns an empty tensor, for the
 * graph to require. `after` is not read: tensors that must be computed before, from the old weights.
 */
#include <stdlib.h>

#include "families/fused_backward/check/check_backward.h"
#include "families/fused_backward/device/optimizer_steps.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/operators.h"

/* A tensor that is written: no copy of it would do. */
static rf_status output_read(rf__call *call, const char *argument, AtenTensorHandle handle, int64_t dim,
                             rf__tensor *tensor) {
    RF_CHECK(rf__tensor_read(argument, handle, dim, call->device, tensor));
    if (!rf__tensor_is_contiguous(tensor))
        return rf__tensor_refuse(tensor, RF_ERR_VALUE, "a contiguous tensor. Pass tensor.contiguous().");
    return RF_OK;
}

static rf_status weight_read(rf__call *call, const char *argument, AtenTensorHandle handle,
                             rf_update_matrix *matrix) {
    rf__tensor tensor;
    RF_CHECK(output_read(call, argument, handle, 2, &tensor));
    RF_CHECK(rf__tensor_dtype(&tensor, &matrix->dtype));
    matrix->rows = tensor.sizes[0];
    matrix->dim = tensor.sizes[1];
    matrix->weight = matrix->rows * matrix->dim > 0 ? (void *)tensor.data : NULL;
    return RF_OK;
}

static int64_t states_of(int64_t optimizer) {
    return rf_optimizer_column_states((int)optimizer) + rf_optimizer_row_states((int)optimizer);
}

/* Those of one matrix, from element `at` of the list on. */
static rf_status states_read(rf__call *call, int argument, int64_t at, int64_t optimizer,
                             rf_update_matrix *matrix) {
    const rf__value *list = &call->values[argument];
    const char *name = call->registered->signature.names[argument];
    const bool of_rows = rf_optimizer_row_states((int)optimizer) > 0;
    for (int64_t i = 0; matrix->weight != NULL && i < states_of(optimizer); i++) {
        rf__value item = {0};
        rf__tensor tensor;
        RF__TORCH_CHECK(torch_list_get_item(list->list, (size_t)(at + i), &item.bits));
        RF_CHECK(output_read(call, name, item.tensor, RF__ANY_DIM, &tensor));
        if (tensor.dtype != aoti_torch_dtype_float32() || tensor.dim != 2 - of_rows ||
            tensor.sizes[0] != matrix->rows || (!of_rows && tensor.sizes[1] != matrix->dim))
            return of_rows
                       ? rf__tensor_refuse(&tensor, RF_ERR_VALUE, "float32 [%lld]", (long long)matrix->rows)
                       : rf__tensor_refuse(&tensor, RF_ERR_VALUE, "float32 [%lld, %lld]",
                                           (long long)matrix->rows, (long long)matrix->dim);
        matrix->states[i] = (float *)tensor.data;
    }
    return RF_OK;
}

/* weights and states, as the call's scratch. */
static rf_status matrices_read(rf__call *call, int weights, int states, int64_t optimizer,
                               const rf_update_matrix **matrices, int64_t *n_matrices) {
    const rf__value *values = call->values;
    size_t count = 0, n_states = 0;
    RF__TORCH_CHECK(torch_list_size(values[weights].list, &count));
    RF__TORCH_CHECK(torch_list_size(values[states].list, &n_states));
    RF_FAIL_IF((int64_t)n_states != (int64_t)count * states_of(optimizer), RF_ERR_VALUE,
               "states has %zu tensors; expected %lld for each of the %zu weights", n_states,
               (long long)states_of(optimizer), count);
    rf_update_matrix *read_matrices = calloc(count + 1, sizeof *read_matrices);
    RF_FAIL_IF(read_matrices == NULL, RF_ERR_MEMORY, "no memory for %zu weights", count);
    call->scratch = read_matrices;
    for (size_t i = 0; i < count; i++) {
        rf__value item = {0};
        RF__TORCH_CHECK(torch_list_get_item(values[weights].list, i, &item.bits));
        RF_CHECK(
            weight_read(call, call->registered->signature.names[weights], item.tensor, &read_matrices[i]));
        RF_CHECK(states_read(call, states, (int64_t)i * states_of(optimizer), optimizer, &read_matrices[i]));
    }
    *matrices = read_matrices;
    *n_matrices = (int64_t)count;
    return RF_OK;
}

/* `options`: the argument optimizer, followed by stochastic_rounding and seed. */
static rf_status update_read(rf__call *call, int numbers_argument, int options, rf_update *update) {
    const rf__value *values = call->values + options;
    rf__tensor numbers;
    RF_CHECK(rf__call_tensor(call, numbers_argument, 1, &numbers));
    if (numbers.dtype != aoti_torch_dtype_float32() || numbers.sizes[0] != RF_UPDATE_NUMBERS)
        return rf__tensor_refuse(&numbers, RF_ERR_VALUE, "float32 [%d]", RF_UPDATE_NUMBERS);
    RF_CHECK(rf__call_contiguous(call, &numbers, numbers.dtype));
    RF_CHECK(rf__check_optimizer(call->registered->public_name, values[0].integer));
    *update = (rf_update){.optimizer = (rf_optimizer)values[0].integer,
                          .numbers = numbers.data,
                          .stochastic_rounding = values[1].boolean,
                          .seed = (uint64_t)values[2].integer};
    return RF_OK;
}

static rf_status fused_run(rf__call *call) {
    enum {
        GRAD,
        WEIGHTS,
        STATES,
        FEATURES,
        INDICES,
        OFFSETS,
        SAMPLE_WEIGHTS,
        WINNERS,
        NUMBERS,
        OPTIONS = 10
    };
    static const int64_t zero = 0;
    rf_fused_embedding_bag_params lookups = {0};
    rf_fused_update_params params = {0};
    rf_executor executor;
    rf_cuda_stream stream;
    rf__tensor grad;
    void *unused = NULL;
    RF_CHECK(rf__call_device(call, GRAD));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &lookups.features, &lookups.n_features));
    RF_CHECK(rf__call_tensor(call, GRAD, 2, &grad));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, grad.sizes[0], &lookups));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, lookups.lookups, &lookups.sample_weights));
    params = (rf_fused_update_params){
        .features = lookups.features, .n_features = lookups.n_features, RF__LOOKUPS_OF(&lookups)};
    RF_CHECK(update_read(call, NUMBERS, OPTIONS, &params.update));
    RF_CHECK(
        matrices_read(call, WEIGHTS, STATES, params.update.optimizer, &params.matrices, &params.n_matrices));
    RF_CHECK(rf__fused_grad_read(call, GRAD, params.bags, &grad, &params.grad_dtype));
    params.grad = grad.data;
    params.output_dim = grad.sizes[1];
    RF_CHECK(rf__call_winners(call, WINNERS, &grad, &params.winners));
    RF_CHECK(rf__call_output(call, 0, 1, &zero, aoti_torch_dtype_float32(), &unused));
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_bag_update_cpu(&params, &executor);
    }
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_bag_update_cuda(&params, &allocator, &stream);
}

static rf_status rows_run(rf__call *call) {
    enum { WEIGHT, STATES, ROWS, SUMS, NUMBERS, OPTIONS };
    rf_rows_update_params params = {0};
    rf_int_type row_type;
    rf_executor executor;
    rf_cuda_stream stream;
    rf__tensor sums;
    size_t n_states = 0;
    const void *rows = NULL;
    RF_CHECK(rf__call_device(call, WEIGHT));
    RF_CHECK(update_read(call, NUMBERS, OPTIONS, &params.update));
    RF_CHECK(weight_read(call, "weight", call->values[WEIGHT].tensor, &params.matrix));
    const int64_t optimizer = params.update.optimizer;
    RF__TORCH_CHECK(torch_list_size(call->values[STATES].list, &n_states));
    RF_FAIL_IF((int64_t)n_states != states_of(optimizer), RF_ERR_VALUE,
               "states has %zu tensors; expected %lld", n_states, (long long)states_of(optimizer));
    RF_CHECK(states_read(call, STATES, 0, optimizer, &params.matrix));
    RF_CHECK(rf__call_integers(call, ROWS, &rows, &params.count, &row_type));
    RF_FAIL_IF(row_type != RF_INT64, RF_ERR_TYPE, "rows is %s; expected int64", "int32");
    params.rows = rows;
    RF_CHECK(rf__call_tensor(call, SUMS, 2, &sums));
    RF_CHECK(rf__tensor_dtype(&sums, &params.sums_dtype));
    if (sums.sizes[0] != params.count || sums.sizes[1] != params.matrix.dim)
        return rf__tensor_refuse(&sums, RF_ERR_VALUE,
                                 "[%lld, %lld], a row for each of rows with the columns of weight",
                                 (long long)params.count, (long long)params.matrix.dim);
    RF_CHECK(rf__call_contiguous(call, &sums, sums.dtype));
    params.sums = sums.data;
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_rows_update_cpu(&params, &executor);
    }
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_rows_update_cuda(&params, &stream);
}

#define SETTINGS "int optimizer, bool stochastic_rounding=False, int seed=0) -> "
const rf__operator rf__torch_fused_embedding_bag_update = {
    "(Tensor grad, Tensor[] weights, Tensor[] states, Tensor features, Tensor indices, Tensor offsets, "
    "Tensor? per_sample_weights, Tensor? winners, Tensor numbers, Tensor[] after, " SETTINGS "Tensor",
    RF__CPU | RF__CUDA, fused_run};
const rf__operator rf__torch_rows_update = {
    "(Tensor(a!) weight, Tensor(b!)[] states, Tensor rows, Tensor sums, Tensor numbers, " SETTINGS "()",
    RF__CPU | RF__CUDA, rows_run};
