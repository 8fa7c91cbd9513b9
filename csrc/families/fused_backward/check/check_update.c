/* rf__check_fused_update, rf__check_rows_update. */
#include <stddef.h>
#include <stdio.h>

#include "families/fused_backward/check/check_backward.h"
#include "families/fused_backward/device/optimizer_steps.h"

rf_fused_backward_params rf__fused_update_gradient(const rf_fused_update_params *params, int64_t matrix) {
    return (rf_fused_backward_params){.features = params->features,
                                      .n_features = params->n_features,
                                      RF__LOOKUPS_OF(params),
                                      .grad = params->grad,
                                      .output_dim = params->output_dim,
                                      .grad_dtype = params->grad_dtype,
                                      .winners = params->winners,
                                      .group = matrix,
                                      .rows = params->matrices[matrix].rows,
                                      .dim = params->matrices[matrix].dim,
                                      .dtype = RF_FLOAT32};
}

rf_status rf__check_optimizer(const char *operator_name, int64_t optimizer) {
    if (optimizer >= 0 && optimizer < RF_OPTIMIZERS) return RF_OK;
#define NAME(code, name, ...) name,
    static const char *const names[] = {RF_OPTIMIZER_LIST(NAME)};
#undef NAME
    char allowed[256] = "";
    size_t length = 0;
    for (int32_t i = 0; i < RF_OPTIMIZERS; i++)
        length += (size_t)snprintf(allowed + length, sizeof allowed - length, "%s%d (%s)",
                                   i == 0                   ? ""
                                   : i == RF_OPTIMIZERS - 1 ? " or "
                                                            : ", ",
                                   (int)i, names[i]);
    return rf__fail(RF_ERR_VALUE, "recfuse.%s: optimizer is " RF__I64 "; expected %s", operator_name,
                    optimizer, allowed);
}

static rf_status check_update(const char *operator_name, const rf_update *update) {
    RF_CHECK(rf__check_optimizer(operator_name, (int64_t)update->optimizer));
    RF__REFUSE_IF(update->numbers == NULL, RF_ERR_VALUE,
                  "numbers is NULL; expected a pointer to its %d elements", RF_UPDATE_NUMBERS);
    return RF_OK;
}

/* `at`: its number among those of the call. */
static rf_status check_matrix(const char *operator_name, rf_optimizer optimizer,
                              const rf_update_matrix *matrix, int64_t at) {
    const int32_t states = rf_optimizer_column_states(optimizer) + rf_optimizer_row_states(optimizer);
    int64_t size;
    RF__REFUSE_IF(matrix->rows < 0 || matrix->dim < 0 ||
                      __builtin_mul_overflow(matrix->rows, matrix->dim, &size) ||
                      __builtin_mul_overflow(size, 4, &size),
                  RF_ERR_VALUE,
                  "weight " RF__I64 " is " RF__I64 " x " RF__I64
                  "; expected sizes of 0 or more whose product fits int64",
                  at, matrix->rows, matrix->dim);
    RF_CHECK(rf__check_dtype(operator_name, "dtype", matrix->dtype));
    for (int32_t i = 0; i < states; i++)
        RF__REFUSE_IF(matrix->states[i] == NULL && matrix->weight != NULL && size > 0, RF_ERR_VALUE,
                      "state %d of weight " RF__I64 " is NULL; expected a pointer to its elements", (int)i,
                      at);
    return RF_OK;
}

rf_status rf__check_fused_update(const char *operator_name, const rf_fused_update_params *params) {
    RF__REFUSE_IF(params->n_matrices < 0, RF_ERR_VALUE, "n_matrices is " RF__I64 "; expected 0 or more",
                  params->n_matrices);
    RF_CHECK(check_update(operator_name, &params->update));
    for (int64_t i = 0; i < params->n_matrices; i++) {
        const rf_update_matrix *matrix = &params->matrices[i];
        RF_CHECK(check_matrix(operator_name, params->update.optimizer, matrix, i));
        if (matrix->weight == NULL) continue;
        const rf_fused_backward_params gradient = rf__fused_update_gradient(params, i);
        RF_CHECK(rf__check_backward_sizes(operator_name, &gradient));
    }
    rf_fused_backward_params gradient = {0};
    if (params->n_matrices > 0) gradient = rf__fused_update_gradient(params, 0);
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t buffer = params->features[f].buffer;
        RF__REFUSE_IF(buffer < -1 || buffer >= params->n_matrices, RF_ERR_VALUE,
                      "features[" RF__I64 "] is in weight " RF__I64 "; expected one of " RF__I64
                      " weights, or -1 for no weight",
                      f, buffer, params->n_matrices);
        if (buffer < 0 || params->matrices[buffer].weight == NULL) continue;
        gradient.rows = params->matrices[buffer].rows;
        gradient.dim = params->matrices[buffer].dim;
        RF_CHECK(rf__check_backward_feature(operator_name, &gradient, f));
    }
    return RF_OK;
}

rf_status rf__check_rows_update(const char *operator_name, const rf_rows_update_params *params) {
    int64_t size;
    RF_CHECK(check_update(operator_name, &params->update));
    RF_CHECK(check_matrix(operator_name, params->update.optimizer, &params->matrix, 0));
    RF_CHECK(rf__check_dtype(operator_name, "sums_dtype", params->sums_dtype));
    RF__REFUSE_IF(params->count < 0 || __builtin_mul_overflow(params->count, params->matrix.dim, &size) ||
                      __builtin_mul_overflow(size, 4, &size),
                  RF_ERR_VALUE,
                  "count is " RF__I64 ", of rows of " RF__I64
                  " columns; expected sizes of 0 or more that fit int64",
                  params->count, params->matrix.dim);
    RF__REFUSE_IF(params->count > 0 && params->rows == NULL, RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", "rows");
    RF__REFUSE_IF(size > 0 && params->sums == NULL, RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", "sums");
    return RF_OK;
}
