#include "families/ikbo_linear/check_ikbo_linear.h"

#include <stddef.h>

/* The common fields of both params structs. */
static rf_status check_result(const char *operator_name, rf_dtype dtype, rf_activation activation) {
    RF__REFUSE_IF(dtype < RF_FLOAT32 || dtype > RF_FLOAT64, RF_ERR_TYPE,
                  "dtype is %d; expected RF_FLOAT32, RF_FLOAT16, RF_BFLOAT16 or RF_FLOAT64", (int)dtype);
    RF__REFUSE_IF(activation < RF_ACTIVATION_NONE || activation > RF_ACTIVATION_SILU, RF_ERR_VALUE,
                  "activation is %d; expected 0 (none) to 3 (silu)", (int)activation);
    return RF_OK;
}

rf_status rf__check_ikbo_add(const rf_ikbo_add_params *params) {
    const char *operator_name = params->map < 0 ? "ikbo_linear" : "ikbo_linear_chain";
    const int64_t most = params->count > params->parents ? params->count : params->parents;
    int64_t item;
    RF_CHECK(check_result(operator_name, params->dtype, params->activation));
    RF__REFUSE_IF(params->parent_type != RF_INT32 && params->parent_type != RF_INT64, RF_ERR_TYPE,
                  "parent_type is %d; expected RF_INT32 or RF_INT64", (int)params->parent_type);
    RF__REFUSE_IF(params->count < 0 || params->parents < 0 || params->m < 0 || params->n < 0, RF_ERR_VALUE,
                  "the call has " RF__I64 " items of " RF__I64 " x " RF__I64 " and " RF__I64
                  " parents; expected sizes of 0 or more",
                  params->count, params->m, params->n, params->parents);
    RF__REFUSE_IF(__builtin_mul_overflow(params->m, params->n, &item) || item > INT32_MAX ||
                      !rf__rows_fit(params->dtype, most, item),
                  RF_ERR_VALUE,
                  "the call has " RF__I64 " items of " RF__I64 " x " RF__I64 " and " RF__I64
                  " parents; expected less than 2^31 elements an item, and less than 2^63 bytes in all",
                  params->count, params->m, params->n, params->parents);
    RF__REFUSE_IF(params->bias_on_n && params->m != 1, RF_ERR_VALUE,
                  "bias_on_n is given with m = " RF__I64 "; expected m = 1, items of one row", params->m);
    RF__REFUSE_IF(item > 0 && params->count > 0 &&
                      (params->out == NULL || (params->base == NULL && params->parents > 0)),
                  RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements",
                  params->out == NULL ? "out" : "base");
    RF__REFUSE_IF(params->parent == NULL && params->count > 0 && params->parents != params->count,
                  RF_ERR_VALUE,
                  "parent is NULL with " RF__I64 " items and " RF__I64 " parents; expected equal numbers",
                  params->count, params->parents);
    return RF_OK;
}

static rf_status check_level(const rf_ikbo_linear_params *params, int32_t l, const char *operator_name) {
    const rf_ikbo_level *level = &params->levels[l];
    RF__REFUSE_IF(level->count < 0 || level->k < 0, RF_ERR_VALUE,
                  "level %d has " RF__I64 " items of " RF__I64 " rows; expected sizes of 0 or more", (int)l,
                  level->count, level->k);
    RF__REFUSE_IF(params->m > 0 && level->k > 0 && level->weight == NULL, RF_ERR_VALUE,
                  "weight of level %d is NULL; expected a pointer to [m, k]", (int)l);
    RF__REFUSE_IF(level->count > 0 && level->k > 0 && params->n > 0 && level->x == NULL, RF_ERR_VALUE,
                  "x of level %d is NULL; expected a pointer to [count, k, n]", (int)l);
    if (l == 0) return RF_OK;
    RF__REFUSE_IF(level->parent_type != RF_INT32 && level->parent_type != RF_INT64, RF_ERR_TYPE,
                  "parent_type of level %d is %d; expected RF_INT32 or RF_INT64", (int)l,
                  (int)level->parent_type);
    RF__REFUSE_IF(level->count > 0 && level->parent == NULL, RF_ERR_VALUE,
                  "parent of level %d is NULL; expected a pointer to [count]", (int)l);
    return RF_OK;
}

rf_status rf__check_ikbo_linear(const rf_ikbo_linear_params *params) {
    const char *operator_name = params->chain ? "ikbo_linear_chain" : "ikbo_linear";
    RF__REFUSE_IF(params->n_levels < 2 || params->n_levels > RF_IKBO_MOST_LEVELS, RF_ERR_VALUE,
                  "n_levels is %d; expected 2 to %d", (int)params->n_levels, (int)RF_IKBO_MOST_LEVELS);
    RF_CHECK(check_result(operator_name, params->dtype, params->activation));
    RF__REFUSE_IF(params->m < 0 || params->n < 0, RF_ERR_VALUE,
                  "m is " RF__I64 " and n " RF__I64 "; expected sizes of 0 or more", params->m, params->n);
    for (int32_t l = 0; l < params->n_levels; l++) RF_CHECK(check_level(params, l, operator_name));
    return RF_OK;
}
