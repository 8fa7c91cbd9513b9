/* rf__check_fused_call, rf__check_fused_features. */
#include "families/fused_embedding_bag/check_fused.h"

#include <stddef.h>

#include "families/fused_embedding_bag/feature_rows.h"

static const char operator_name[] = "fused_embedding_bag";

static rf_status check_quantized_feature(const rf_fused_embedding_bag_params *params, int64_t at) {
    const rf_feature *feature = &params->features[at];
    const rf_buffer *buffer = &params->buffers[feature->buffer];
    const int64_t bytes = rf__feature_row(params->buffers, feature).bytes;
    RF__REFUSE_IF(!rf__is_multiple(feature->weight_offset, feature->dim), RF_ERR_VALUE,
                  "features[" RF__I64 "] begins at element " RF__I64 "; expected a multiple of its " RF__I64
                  " columns, because weights[" RF__I64 "] is quantised",
                  at, feature->weight_offset, feature->dim, feature->buffer);
    RF__REFUSE_IF(rf__elements_in(buffer->dtype, bytes) != feature->dim, RF_ERR_VALUE,
                  "features[" RF__I64 "] has " RF__I64
                  " columns of int4; expected whole bytes, so an even number",
                  at, feature->dim);
    RF__REFUSE_IF(feature->rows > 1 && buffer->pitch < bytes, RF_ERR_VALUE,
                  "weights[" RF__I64 "] has a pitch of " RF__I64 " bytes; expected at least the " RF__I64
                  " bytes of codes of a row, as in a contiguous tensor",
                  feature->buffer, buffer->pitch, bytes);
    return RF_OK;
}

/* Buffers of the C API are the operator's `weights`. */
static rf_status check_fused_feature(const rf_fused_embedding_bag_params *params, int64_t at,
                                     int64_t column) {
    const rf_feature *feature = &params->features[at];
    RF_CHECK(rf__check_table(operator_name, feature, at, params->buffers, params->n_buffers));
    if (rf_is_quantized((int)params->buffers[feature->buffer].dtype))
        RF_CHECK(check_quantized_feature(params, at));
    RF__REFUSE_IF(feature->output_column != column, RF_ERR_VALUE,
                  "features[" RF__I64 "] has output_column " RF__I64 "; expected " RF__I64
                  ", the end of the feature before",
                  at, feature->output_column, column);
    RF__REFUSE_IF(feature->dim > params->output_dim - column, RF_ERR_VALUE,
                  "output_dim is " RF__I64 ", but features[" RF__I64 "] writes " RF__I64
                  " columns from column " RF__I64,
                  params->output_dim, at, feature->dim, column);
    return rf__check_pooling(operator_name, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

rf_status rf__check_fused_call(const rf_fused_embedding_bag_params *params) {
    int64_t bags;
    RF__REFUSE_IF(params->n_features < 0 || params->n_buffers < 0 ||
                      __builtin_mul_overflow(params->n_features, params->bags, &bags),
                  RF_ERR_VALUE,
                  "n_features is " RF__I64 ", n_buffers " RF__I64 " and bags " RF__I64
                  "; expected 0 or more, and a product that fits int64",
                  params->n_features, params->n_buffers, params->bags);
    return rf__check_lookups(operator_name, &(rf__lookup_arrays){RF__LOOKUPS_OF(params)},
                             params->prefetch_distance);
}

rf_status rf__check_fused_rows(const rf_fused_embedding_bag_params *params, const int64_t *columns) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        if (feature->buffer < 0 || feature->buffer >= params->n_buffers || columns[feature->buffer] < 0)
            continue;
        const int64_t dim = columns[feature->buffer];
        RF__REFUSE_IF(feature->dim != dim || !rf__is_multiple(feature->weight_offset, dim), RF_ERR_VALUE,
                      "features[" RF__I64 "] has " RF__I64 " columns and begins at element " RF__I64
                      "; expected whole rows of weights[" RF__I64 "], which has " RF__I64 " columns",
                      f, feature->dim, feature->weight_offset, feature->buffer, dim);
    }
    return RF_OK;
}

rf_status rf__check_fused_floats(const char *operator_name, const rf_fused_embedding_bag_params *params) {
    for (int64_t i = 0; i < params->n_buffers; i++)
        RF__REFUSE_IF(rf_is_quantized((int)params->buffers[i].dtype), RF_ERR_UNSUPPORTED,
                      "weights[" RF__I64 "] is quantised; expected floats, of which gradients exist", i);
    return RF_OK;
}

rf_status rf__check_fused_warps(int32_t warps) {
    RF__REFUSE_IF(warps != 0 && (warps < 2 || warps > 64), RF_ERR_VALUE,
                  "warps is %d; expected 2 to 64, or 0 for a good default", (int)warps);
    return RF_OK;
}

/* Codes: rows and parameters must not overlap with those of the next row. */
static rf_status check_quantized_buffer(int64_t at, const rf_buffer *buffer) {
    RF__REFUSE_IF(buffer->parameters_dtype != RF_FLOAT16 && buffer->parameters_dtype != RF_FLOAT32,
                  RF_ERR_TYPE,
                  "parameters_dtype of weights[" RF__I64 "] is %d; expected RF_FLOAT16 or RF_FLOAT32", at,
                  (int)buffer->parameters_dtype);
    RF__REFUSE_IF(buffer->parameters == NULL && buffer->numel > 0, RF_ERR_VALUE,
                  "parameters of weights[" RF__I64 "] is NULL, for " RF__I64 " codes", at, buffer->numel);
    RF__REFUSE_IF(buffer->pitch < 0 ||
                      buffer->parameters_pitch < rf__parameters_bytes(buffer->parameters_dtype),
                  RF_ERR_VALUE,
                  "weights[" RF__I64 "] has a pitch of " RF__I64 " bytes, and its parameters of " RF__I64
                  "; expected at least the bytes of a row and of its parameters, as in contiguous tensors",
                  at, buffer->pitch, buffer->parameters_pitch);
    return RF_OK;
}

static rf_status check_buffer(int64_t at, const rf_buffer *buffer) {
    const bool is_quantized = rf_is_quantized((int)buffer->dtype);
    if (!is_quantized) RF_CHECK(rf__check_dtype(operator_name, "dtype of weights", buffer->dtype));
    RF__REFUSE_IF(buffer->data == NULL && buffer->numel > 0, RF_ERR_VALUE,
                  "weights[" RF__I64 "] is NULL, for " RF__I64 " elements", at, buffer->numel);
    return is_quantized ? check_quantized_buffer(at, buffer) : RF_OK;
}

rf_status rf__check_fused_features(const rf_fused_embedding_bag_params *params) {
    int64_t column = 0;
    RF_CHECK(rf__check_dtype(operator_name, "output_dtype", params->output_dtype));
    for (int64_t i = 0; i < params->n_buffers; i++) RF_CHECK(check_buffer(i, &params->buffers[i]));
    for (int64_t i = 0; i < params->n_features; i++) {
        RF_CHECK(check_fused_feature(params, i, column));
        column += params->features[i].dim;
    }
    RF__REFUSE_IF(column != params->output_dim, RF_ERR_VALUE,
                  "output_dim is " RF__I64 "; expected the " RF__I64 " columns of all features",
                  params->output_dim, column);
    RF__REFUSE_IF(params->output_stride < params->output_dim, RF_ERR_VALUE,
                  "output_stride is " RF__I64 "; expected output_dim, " RF__I64 ", or more",
                  params->output_stride, params->output_dim);
    RF__REFUSE_IF(params->output == NULL && params->bags > 0 && column > 0, RF_ERR_VALUE,
                  "output is NULL; expected a pointer to " RF__I64 " columns a bag", column);
    return RF_OK;
}
