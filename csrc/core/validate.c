#include "core/validate.h"

#include <stddef.h>

rf_status rf__check_call(const char *operator_name, int64_t lookups, int64_t bags, rf_int_type index_type,
                         rf_int_type offset_type, int32_t prefetch_distance, const void *indices,
                         const void *offsets) {
    RF__REFUSE_IF(lookups < 0 || bags < 0, RF_ERR_VALUE,
                  "lookups is " RF__I64 " and bags " RF__I64 "; expected 0 or more", lookups, bags);
    RF__REFUSE_IF((index_type != RF_INT32 && index_type != RF_INT64) ||
                      (offset_type != RF_INT32 && offset_type != RF_INT64),
                  RF_ERR_TYPE, "index_type is %d and offset_type %d; expected RF_INT32 or RF_INT64",
                  (int)index_type, (int)offset_type);
    RF__REFUSE_IF(prefetch_distance < -1, RF_ERR_VALUE,
                  "prefetch_distance is %d; expected 0 (none) or more lookups, or -1 (the default)",
                  (int)prefetch_distance);
    RF__REFUSE_IF((indices == NULL && lookups > 0) || offsets == NULL, RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", offsets == NULL ? "offsets" : "indices");
    return RF_OK;
}

rf_status rf__check_dtype(const char *operator_name, const char *argument, rf_dtype dtype) {
    RF__REFUSE_IF(dtype != RF_FLOAT32 && dtype != RF_FLOAT16 && dtype != RF_BFLOAT16, RF_ERR_TYPE,
                  "%s is %d; expected RF_FLOAT32, RF_FLOAT16 or RF_BFLOAT16", argument, (int)dtype);
    return RF_OK;
}

rf_status rf__check_pooling(const char *operator_name, int64_t feature, int64_t pooling, int64_t padding_idx,
                            int64_t rows, bool weighted) {
    if (feature < 0) feature = 0;
    RF__REFUSE_IF(pooling != RF_SUM && pooling != RF_MEAN && pooling != RF_MAX, RF_ERR_VALUE,
                  "feature " RF__I64 " has pooling " RF__I64 "; expected 0 (sum), 1 (mean), 2 (max)", feature,
                  pooling);
    RF__REFUSE_IF(weighted && pooling != RF_SUM, RF_ERR_UNSUPPORTED,
                  "per-sample weights are given with %s pooling (feature " RF__I64 "); expected sum pooling",
                  pooling == RF_MEAN ? "mean" : "max", feature);
    RF__REFUSE_IF(padding_idx < -1 || (padding_idx >= rows && padding_idx != -1), RF_ERR_VALUE,
                  "padding_idx is " RF__I64 " (feature " RF__I64 "); expected -1 (none) to " RF__I64,
                  padding_idx, feature, rows - 1);
    return RF_OK;
}

rf_status rf__check_embedding_bag(const rf_embedding_bag_params *params) {
    static const char operator_name[] = "embedding_bag";
    const bool even = params->offsets == NULL && !params->include_last_offset;
    RF__REFUSE_IF(even && params->bags > 0 && params->lookups % params->bags != 0, RF_ERR_VALUE,
                  "lookups is " RF__I64 " and bags " RF__I64
                  " without offsets; expected bags of equal length",
                  params->lookups, params->bags);
    RF_CHECK(rf__check_call(operator_name, params->lookups, params->bags, params->index_type,
                            params->offset_type, params->prefetch_distance, params->indices,
                            even ? "" : params->offsets));
    RF_CHECK(rf__check_dtype(operator_name, "dtype", params->dtype));
    RF__REFUSE_IF(params->rows < 0 || params->dim < 0, RF_ERR_VALUE,
                  "weight is " RF__I64 " x " RF__I64 "; expected sizes of 0 or more", params->rows,
                  params->dim);
    RF__REFUSE_IF(params->weight_stride < params->dim || params->output_stride < params->dim, RF_ERR_VALUE,
                  "weight_stride is " RF__I64 " and output_stride " RF__I64 "; expected dim, " RF__I64
                  ", or more",
                  params->weight_stride, params->output_stride, params->dim);
    RF__REFUSE_IF(!rf__rows_fit(params->dtype, params->rows, params->weight_stride), RF_ERR_VALUE,
                  "weight has " RF__I64 " rows, " RF__I64
                  " elements apart; expected a size in bytes that fits int64",
                  params->rows, params->weight_stride);
    RF__REFUSE_IF((params->weight == NULL && params->rows > 0 && params->dim > 0) ||
                      (params->output == NULL && params->bags > 0 && params->dim > 0),
                  RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements",
                  params->output == NULL ? "output" : "weight");
    return rf__check_pooling(operator_name, -1, params->pooling, params->padding_idx, params->rows,
                             params->sample_weights != NULL);
}

static const char operator_name[] = "fused_embedding_bag";

/* Buffers of the C API are the operator's `weights`. */
static rf_status check_fused_feature(const rf_fused_embedding_bag_params *params, int64_t at,
                                     int64_t column) {
    const rf_feature *feature = &params->features[at];
    int64_t size, end;
    RF__REFUSE_IF(feature->buffer < 0 || feature->buffer >= params->n_buffers, RF_ERR_VALUE,
                  "features[" RF__I64 "] is in weights[" RF__I64 "]; expected one of " RF__I64 " weights", at,
                  feature->buffer, params->n_buffers);
    const int64_t numel = params->buffers[feature->buffer].numel;
    RF__REFUSE_IF(feature->rows < 0 || feature->dim < 0 || feature->weight_offset < 0 ||
                      __builtin_mul_overflow(feature->rows, feature->dim, &size) ||
                      __builtin_add_overflow(feature->weight_offset, size, &end) || end > numel,
                  RF_ERR_VALUE,
                  "features[" RF__I64 "] is a table of " RF__I64 " x " RF__I64 " at element " RF__I64
                  "; expected weights[" RF__I64 "], which has " RF__I64 " elements",
                  at, feature->rows, feature->dim, feature->weight_offset, feature->buffer, numel);
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
    return rf__check_call(operator_name, params->lookups, params->bags, params->index_type,
                          params->offset_type, params->prefetch_distance, params->indices, params->offsets);
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

rf_status rf__check_fused_warps(int32_t warps) {
    RF__REFUSE_IF(warps != 0 && (warps < 2 || warps > 64), RF_ERR_VALUE,
                  "warps is %d; expected 2 to 64, or 0 for a good default", (int)warps);
    return RF_OK;
}

rf_status rf__check_fused_features(const rf_fused_embedding_bag_params *params) {
    int64_t column = 0;
    RF_CHECK(rf__check_dtype(operator_name, "output_dtype", params->output_dtype));
    for (int64_t i = 0; i < params->n_buffers; i++) {
        const rf_buffer *buffer = &params->buffers[i];
        RF_CHECK(rf__check_dtype(operator_name, "dtype of weights", buffer->dtype));
        RF__REFUSE_IF(buffer->data == NULL && buffer->numel > 0, RF_ERR_VALUE,
                      "weights[" RF__I64 "] is NULL, for " RF__I64 " elements", i, buffer->numel);
    }
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
