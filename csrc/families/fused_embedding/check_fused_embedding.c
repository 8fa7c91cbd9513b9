/* rf__check_fused_embedding. */
#include "families/fused_embedding/check_fused_embedding.h"

#include <stddef.h>

static const char operator_name[] = "fused_embedding";

static rf_status check_feature(const rf_fused_embedding_params *params, int64_t at, int64_t column) {
    const rf_feature *feature = &params->features[at];
    RF_CHECK(rf__check_table(operator_name, feature, at, params->buffers, params->n_buffers));
    RF__REFUSE_IF(feature->output_column != column, RF_ERR_VALUE,
                  "features[" RF__I64 "] has output_column " RF__I64 "; expected " RF__I64
                  ", the end of the feature before",
                  at, feature->output_column, column);
    RF__REFUSE_IF(feature->pooling != RF_SUM, RF_ERR_VALUE,
                  "features[" RF__I64 "] has pooling " RF__I64 "; expected 0, since nothing is pooled", at,
                  feature->pooling);
    RF__REFUSE_IF(params->layout == RF_HISTORY_JAGGED && params->sizes == NULL &&
                      feature->dim != params->output_dim,
                  RF_ERR_VALUE,
                  "features[" RF__I64 "] has " RF__I64 " columns, and output_dim is " RF__I64
                  "; expected equal numbers with layout jagged. Pass sizes for tables of several dims.",
                  at, feature->dim, params->output_dim);
    return rf__check_pooling(operator_name, at, feature->pooling, feature->padding_idx, feature->rows, false);
}

/* The sum of `sizes`, and of their elements. */
static rf_status check_sizes(const rf_fused_embedding_params *params) {
    int64_t lookups = 0, elements = 0, size;
    for (int64_t f = 0; f < params->n_features; f++) {
        RF__REFUSE_IF(params->sizes[f] < 0 || __builtin_add_overflow(lookups, params->sizes[f], &lookups) ||
                          __builtin_mul_overflow(params->sizes[f], params->features[f].dim, &size) ||
                          __builtin_add_overflow(elements, size, &elements),
                      RF_ERR_VALUE,
                      "sizes[" RF__I64 "] is " RF__I64 "; expected the lookups of feature " RF__I64
                      ", and a sum that fits int64",
                      f, params->sizes[f], f);
    }
    RF__REFUSE_IF(lookups != params->lookups, RF_ERR_VALUE,
                  "sizes has the sum " RF__I64 "; expected " RF__I64 ", the number of indices", lookups,
                  params->lookups);
    RF__REFUSE_IF(elements != params->output_dim, RF_ERR_VALUE,
                  "output_dim is " RF__I64 "; expected " RF__I64 ", the elements of all features with sizes",
                  params->output_dim, elements);
    return RF_OK;
}

static rf_status check_layout(const rf_fused_embedding_params *params, int64_t columns) {
    const bool is_padded = params->layout == RF_HISTORY_PADDED;
    RF__REFUSE_IF(is_padded ? params->length < 1 : params->length != 0, RF_ERR_VALUE,
                  "length is " RF__I64 "; expected 1 or more with layout padded, else 0", params->length);
    RF__REFUSE_IF(!is_padded && params->fill != NULL, RF_ERR_VALUE,
                  "fill is given, and %s; expected layout padded", "no slot is without a lookup");
    RF__REFUSE_IF(params->sizes != NULL && params->layout != RF_HISTORY_JAGGED, RF_ERR_VALUE,
                  "sizes has " RF__I64 " elements; expected 0 unless layout is jagged", params->n_features);
    if (params->sizes != NULL) return check_sizes(params);
    RF__REFUSE_IF(params->layout != RF_HISTORY_JAGGED && columns != params->output_dim, RF_ERR_VALUE,
                  "output_dim is " RF__I64 "; expected the " RF__I64 " columns of all features",
                  params->output_dim, columns);
    RF__REFUSE_IF(params->layout == RF_HISTORY_JOINED && params->n_features > 0 &&
                      params->lookups % params->n_features != 0,
                  RF_ERR_VALUE,
                  "indices has " RF__I64 " elements for " RF__I64
                  " features of layout joined; expected equal numbers a feature",
                  params->lookups, params->n_features);
    return RF_OK;
}

/* The bytes of the output fit int64, and so do those of `rows`. */
static rf_status check_bytes(const rf_fused_embedding_params *params) {
    int64_t slots, total;
    const bool is_flat = params->sizes != NULL;
    if (params->layout != RF_HISTORY_PADDED)
        slots = params->lookups;
    else if (__builtin_mul_overflow(params->bags, params->length, &slots))
        slots = INT64_MAX;
    RF__REFUSE_IF(!rf__rows_fit(params->output_dtype, is_flat ? 1 : slots, params->output_dim) ||
                      __builtin_mul_overflow(slots, params->n_features > 8 ? params->n_features : 8, &total),
                  RF_ERR_VALUE,
                  "the output has " RF__I64 " bags of length " RF__I64 " and " RF__I64
                  " columns; expected a product that fits int64",
                  params->bags, params->length, params->output_dim);
    return RF_OK;
}

rf_status rf__check_fused_embedding(const rf_fused_embedding_params *params) {
    int64_t bags, columns = 0;
    RF__REFUSE_IF(params->n_features < 0 || params->n_buffers < 0 || params->output_dim < 0 ||
                      __builtin_mul_overflow(params->n_features, params->bags, &bags),
                  RF_ERR_VALUE,
                  "n_features is " RF__I64 ", n_buffers " RF__I64 ", bags " RF__I64 " and output_dim " RF__I64
                  "; expected 0 or more, and a product that fits int64",
                  params->n_features, params->n_buffers, params->bags, params->output_dim);
    const rf__lookup_arrays arrays = {.indices = params->indices,
                                      .offsets = params->offsets,
                                      .lookups = params->lookups,
                                      .bags = params->bags,
                                      .index_type = params->index_type,
                                      .offset_type = params->offset_type};
    RF_CHECK(rf__check_lookups(operator_name, &arrays, -1));
    RF__REFUSE_IF(bags == 0 && params->lookups > 0, RF_ERR_VALUE,
                  "indices has " RF__I64 " elements, and there are no bags; expected 0", params->lookups);
    RF_CHECK(rf__check_dtype(operator_name, "output_dtype", params->output_dtype));
    RF__REFUSE_IF(params->layout != RF_HISTORY_JAGGED && params->layout != RF_HISTORY_JOINED &&
                      params->layout != RF_HISTORY_PADDED,
                  RF_ERR_VALUE, "layout is %d; expected a code of rf_history_layout", (int)params->layout);
    for (int64_t i = 0; i < params->n_buffers; i++) {
        const rf_buffer *buffer = &params->buffers[i];
        RF_CHECK(rf__check_dtype(operator_name, "dtype of weights", buffer->dtype));
        RF__REFUSE_IF(buffer->data == NULL && buffer->numel > 0, RF_ERR_VALUE,
                      "weights[" RF__I64 "] is NULL, for " RF__I64 " elements", i, buffer->numel);
    }
    for (int64_t i = 0; i < params->n_features; i++) {
        RF_CHECK(check_feature(params, i, columns));
        RF__REFUSE_IF(__builtin_add_overflow(columns, params->features[i].dim, &columns), RF_ERR_VALUE,
                      "features[" RF__I64 "] has " RF__I64 " columns; expected a sum that fits int64", i,
                      params->features[i].dim);
    }
    RF_CHECK(check_layout(params, columns));
    return check_bytes(params);
}
