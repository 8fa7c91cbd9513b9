/* rf__check_fused_backward. */
#include <stddef.h>

#include "families/fused_backward/check/check_backward.h"

rf_status rf__check_backward_feature(const char *operator_name, const rf_fused_backward_params *params,
                                     int64_t at) {
    const rf_feature *feature = &params->features[at];
    const int64_t dim = params->dim;
    /* The product fits: rows x dim does, and here are fewer. */
    RF__REFUSE_IF(feature->dim != dim || feature->rows < 0 || feature->weight_offset < 0 ||
                      (dim > 0 && (feature->rows > params->rows ||
                                   feature->weight_offset > (params->rows - feature->rows) * dim ||
                                   !rf__is_multiple(feature->weight_offset, dim))),
                  RF_ERR_VALUE,
                  "features[" RF__I64 "] is a table of " RF__I64 " x " RF__I64 " at element " RF__I64
                  "; expected whole rows of its weight, " RF__I64 " x " RF__I64,
                  at, feature->rows, feature->dim, feature->weight_offset, params->rows, dim);
    RF__REFUSE_IF(feature->output_column < 0 || feature->output_column > params->output_dim - dim,
                  RF_ERR_VALUE,
                  "features[" RF__I64 "] has " RF__I64 " columns from column " RF__I64
                  "; expected a part of the " RF__I64 " of grad",
                  at, dim, feature->output_column, params->output_dim);
    RF__REFUSE_IF(feature->pooling == RF_MAX && params->winners == NULL && params->bags > 0 && dim > 0,
                  RF_ERR_VALUE,
                  "features[" RF__I64
                  "] pools by max and winners is not given; expected that of fused_embedding_bag_winners",
                  at);
    return rf__check_pooling(operator_name, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

rf_status rf__check_backward_sizes(const char *operator_name, const rf_fused_backward_params *params) {
    int64_t size;
    RF__REFUSE_IF(params->n_features < 0 || params->n_features > UINT32_MAX || params->rows < 0 ||
                      params->dim < 0 || params->output_dim < 0 || params->bags < 0 ||
                      __builtin_mul_overflow(params->n_features, params->bags, &size) ||
                      __builtin_mul_overflow(params->bags, params->output_dim, &size) ||
                      __builtin_mul_overflow(params->rows, params->dim, &size) ||
                      __builtin_mul_overflow(size, 4, &size),
                  RF_ERR_VALUE,
                  "the call has " RF__I64 " features, " RF__I64 " bags a feature, " RF__I64
                  " columns of grad and a weight of " RF__I64 " x " RF__I64
                  "; expected sizes of 0 or more, and products that fit int64",
                  params->n_features, params->bags, params->output_dim, params->rows, params->dim);
    RF_CHECK(rf__check_lookups(operator_name, &(rf__lookup_arrays){RF__LOOKUPS_OF(params)}, 0));
    RF_CHECK(rf__check_dtype(operator_name, "grad_dtype", params->grad_dtype));
    RF_CHECK(rf__check_dtype(operator_name, "dtype", params->dtype));
    RF__REFUSE_IF(params->grad == NULL && params->bags > 0 && params->output_dim > 0, RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", "grad");
    return RF_OK;
}

rf_status rf__check_fused_backward(const char *operator_name, const rf_fused_backward_params *params) {
    RF_CHECK(rf__check_backward_sizes(operator_name, params));
    for (int64_t i = 0; i < params->n_features; i++)
        if (params->features[i].buffer == params->group)
            RF_CHECK(rf__check_backward_feature(operator_name, params, i));
    return RF_OK;
}
