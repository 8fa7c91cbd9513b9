#include "base/validate.h"

#include <stddef.h>

rf_status rf__check_ikbo_add(const rf_ikbo_add_params *params) {
    const char *operator_name = params->map < 0 ? "ikbo_linear" : "ikbo_linear_chain";
    int64_t item, elements, bytes;
    RF__REFUSE_IF(params->dtype < RF_FLOAT32 || params->dtype > RF_FLOAT64, RF_ERR_TYPE,
                  "dtype is %d; allowed are RF_FLOAT32, RF_FLOAT16, RF_BFLOAT16 and RF_FLOAT64",
                  (int)params->dtype);
    RF__REFUSE_IF(params->parent_type != RF_INT32 && params->parent_type != RF_INT64, RF_ERR_TYPE,
                  "parent_type is %d; allowed are RF_INT32 and RF_INT64", (int)params->parent_type);
    RF__REFUSE_IF(params->activation < RF_ACTIVATION_NONE || params->activation > RF_ACTIVATION_SILU,
                  RF_ERR_VALUE, "activation is %d; allowed is 0 (none) to 3 (silu)", (int)params->activation);
    RF__REFUSE_IF(params->count < 0 || params->parents < 0 || params->m < 0 || params->n < 0, RF_ERR_VALUE,
                  RF__I64 " items of " RF__I64 " x " RF__I64 " and " RF__I64 " parents; sizes are 0 or more",
                  params->count, params->m, params->n, params->parents);
    RF__REFUSE_IF(
        __builtin_mul_overflow(params->m, params->n, &item) || item > INT32_MAX ||
            __builtin_mul_overflow(item, params->count > params->parents ? params->count : params->parents,
                                   &elements) ||
            __builtin_mul_overflow(elements, rf__dtype_bytes(params->dtype), &bytes),
        RF_ERR_VALUE,
        RF__I64 " items of " RF__I64 " x " RF__I64 " and " RF__I64
                " parents; an item must have less than 2^31 elements, and all of them "
                "less than 2^63 bytes",
        params->count, params->m, params->n, params->parents);
    RF__REFUSE_IF(params->bias_on_n && params->m != 1, RF_ERR_VALUE,
                  "bias_on_n with m = " RF__I64 "; it is for items of one row, m = 1", params->m);
    RF__REFUSE_IF(elements > 0 && params->count > 0 &&
                      (params->out == NULL || (params->base == NULL && params->parents > 0)),
                  RF_ERR_VALUE, "%s is NULL; it must point to its elements",
                  params->out == NULL ? "out" : "base");
    RF__REFUSE_IF(params->parent == NULL && params->count > 0 && params->parents != params->count,
                  RF_ERR_VALUE,
                  "parent is NULL with " RF__I64 " items and " RF__I64 " parents; they must be as many",
                  params->count, params->parents);
    return RF_OK;
}
