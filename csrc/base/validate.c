#include "base/validate.h"

#include <inttypes.h>
#include <stddef.h>

rf_status rf__check_call(const char *operator_name, int64_t lookups, int64_t bags, rf_int_type index_type,
                         rf_int_type offset_type, int32_t prefetch_distance, const void *indices,
                         const void *offsets) {
    if (lookups < 0 || bags < 0) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: %" PRId64 " lookups and %" PRId64 " bags; sizes are 0 or more",
                        operator_name, lookups, bags);
    }
    if ((index_type != RF_INT32 && index_type != RF_INT64) ||
        (offset_type != RF_INT32 && offset_type != RF_INT64)) {
        return rf__fail(RF_ERR_TYPE,
                        "recfuse.%s: index_type is %d and offset_type %d; allowed are RF_INT32 and RF_INT64",
                        operator_name, (int)index_type, (int)offset_type);
    }
    if (prefetch_distance < -1) {
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.%s: prefetch_distance is %d; allowed is 0 (none) or more lookups, or -1 (the default)",
            operator_name, (int)prefetch_distance);
    }
    if ((indices == NULL && lookups > 0) || offsets == NULL) {
        return rf__fail(RF_ERR_VALUE, "recfuse.%s: %s is NULL; it must point to its elements", operator_name,
                        offsets == NULL ? "offsets" : "indices");
    }
    return RF_OK;
}

rf_status rf__check_dtype(const char *operator_name, const char *argument, rf_dtype dtype) {
    if (dtype == RF_FLOAT32 || dtype == RF_FLOAT16 || dtype == RF_BFLOAT16) return RF_OK;
    return rf__fail(RF_ERR_TYPE, "recfuse.%s: %s is %d; allowed are RF_FLOAT32, RF_FLOAT16 and RF_BFLOAT16",
                    operator_name, argument, (int)dtype);
}

rf_status rf__check_pooling(const char *operator_name, int64_t feature, int64_t pooling, int64_t padding_idx,
                            int64_t rows, bool weighted) {
    if (pooling != RF_SUM && pooling != RF_MEAN && pooling != RF_MAX) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: feature %" PRId64 " has pooling %" PRId64
                        "; allowed are 0 (sum), 1 (mean), 2 (max)",
                        operator_name, feature < 0 ? 0 : feature, pooling);
    }
    if (weighted && pooling != RF_SUM) {
        return rf__fail(RF_ERR_UNSUPPORTED,
                        "recfuse.%s: per-sample weights with %s pooling (feature %" PRId64
                        "); they need sum pooling",
                        operator_name, pooling == RF_MEAN ? "mean" : "max", feature < 0 ? 0 : feature);
    }
    if (padding_idx < -1 || (padding_idx >= rows && padding_idx != -1)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: padding_idx is %" PRId64 " (feature %" PRId64
                        "); allowed is -1 (none) to %" PRId64,
                        operator_name, padding_idx, feature < 0 ? 0 : feature, rows - 1);
    }
    return RF_OK;
}

rf_status rf__check_embedding_bag(const rf_embedding_bag_params *params) {
    rf_status status = RF_OK;
    RF_TRY(rf__check_call("embedding_bag", params->lookups, params->bags, params->index_type,
                          params->offset_type, params->prefetch_distance, params->indices,
                          params->bags + params->include_last_offset > 0 ? params->offsets : ""));
    RF_TRY(rf__check_dtype("embedding_bag", "dtype", params->dtype));
    if (params->rows < 0 || params->dim < 0) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.embedding_bag: weight is %" PRId64 " x %" PRId64 "; sizes are 0 or more",
                        params->rows, params->dim);
    }
    if (params->weight_stride < params->dim || params->output_stride < params->dim) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.embedding_bag: weight_stride is %" PRId64 " and output_stride %" PRId64
                        "; neither may be less than dim, %" PRId64,
                        params->weight_stride, params->output_stride, params->dim);
    }
    int64_t elements, bytes;
    if (__builtin_mul_overflow(params->rows, params->weight_stride, &elements) ||
        __builtin_mul_overflow(elements, rf__dtype_bytes(params->dtype), &bytes)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.embedding_bag: weight has %" PRId64 " rows, %" PRId64
                        " elements apart; its size in bytes must fit int64",
                        params->rows, params->weight_stride);
    }
    if ((params->weight == NULL && params->rows > 0 && params->dim > 0) ||
        (params->output == NULL && params->bags > 0 && params->dim > 0)) {
        return rf__fail(RF_ERR_VALUE, "recfuse.embedding_bag: %s is NULL; it must point to its elements",
                        params->output == NULL ? "output" : "weight");
    }
    RF_TRY(rf__check_pooling("embedding_bag", -1, params->pooling, params->padding_idx, params->rows,
                             params->sample_weights != NULL));
out:
    return status;
}

static const char fused[] = "fused_embedding_bag";

static rf_status check_fused_feature(const rf_fused_embedding_bag_params *params, int64_t at,
                                     int64_t column) {
    const rf_feature *feature = &params->features[at];
    if (feature->buffer < 0 || feature->buffer >= params->n_buffers) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] is in buffer %" PRId64 "; there are %" PRId64
                        " buffers",
                        fused, at, feature->buffer, params->n_buffers);
    }
    int64_t numel = params->buffers[feature->buffer].numel, size, end;
    if (feature->rows < 0 || feature->dim < 0 || feature->weight_offset < 0 ||
        __builtin_mul_overflow(feature->rows, feature->dim, &size) ||
        __builtin_add_overflow(feature->weight_offset, size, &end) || end > numel) {
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.%s: features[%" PRId64 "] is a table of %" PRId64 " x %" PRId64 " at element %" PRId64
            "; it must lie in buffer %" PRId64 ", which has %" PRId64 " elements",
            fused, at, feature->rows, feature->dim, feature->weight_offset, feature->buffer, numel);
    }
    if (feature->output_column != column || feature->dim > params->output_dim - column) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] writes %" PRId64 " columns from column %" PRId64
                        "; it must begin at column %" PRId64
                        ", where the feature before ends, and end within the "
                        "output's %" PRId64,
                        fused, at, feature->dim, feature->output_column, column, params->output_dim);
    }
    return rf__check_pooling(fused, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

rf_status rf__check_fused_call(const rf_fused_embedding_bag_params *params) {
    int64_t bags;
    if (params->n_features < 0 || params->n_buffers < 0 ||
        __builtin_mul_overflow(params->n_features, params->bags, &bags)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: %" PRId64 " features, %" PRId64 " buffers and %" PRId64
                        " bags a feature; sizes are 0 or more, and their product fits int64",
                        fused, params->n_features, params->n_buffers, params->bags);
    }
    return rf__check_call(fused, params->lookups, params->bags, params->index_type, params->offset_type,
                          params->prefetch_distance, params->indices, params->offsets);
}

/* Most are powers of two, and a division takes as long as all the rest of a feature. */
static bool is_multiple(int64_t elements, int64_t columns) {
    if ((columns & (columns - 1)) == 0) return (elements & (columns - 1)) == 0; /* of 0 only 0 */
    return elements % columns == 0;
}

rf_status rf__check_fused_rows(const rf_fused_embedding_bag_params *params, const int64_t *columns) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        if (feature->buffer < 0 || feature->buffer >= params->n_buffers || columns[feature->buffer] < 0)
            continue;
        const int64_t dim = columns[feature->buffer];
        if (feature->dim == dim && is_multiple(feature->weight_offset, dim)) continue;
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] has %" PRId64
                        " columns and begins at element %" PRId64
                        "; it must be whole rows of weights[%" PRId64 "], which has %" PRId64 " columns",
                        fused, f, feature->dim, feature->weight_offset, feature->buffer, dim);
    }
    return RF_OK;
}

rf_status rf__check_fused_warps(int32_t warps) {
    if (warps == 0 || (warps >= 2 && warps <= 64)) return RF_OK;
    return rf__fail(RF_ERR_VALUE, "recfuse.%s: warps is %d, must be 2 to 64, or 0 for a good default", fused,
                    (int)warps);
}

rf_status rf__check_fused_features(const rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    int64_t column = 0;
    RF_TRY(rf__check_dtype(fused, "output_dtype", params->output_dtype));
    for (int64_t i = 0; i < params->n_buffers; i++) {
        RF_TRY(rf__check_dtype(fused, "a buffer's dtype", params->buffers[i].dtype));
        if (params->buffers[i].data == NULL && params->buffers[i].numel > 0) {
            return rf__fail(RF_ERR_VALUE,
                            "recfuse.%s: buffers[%" PRId64 "].data is NULL, for %" PRId64 " elements", fused,
                            i, params->buffers[i].numel);
        }
    }
    for (int64_t i = 0; i < params->n_features; i++) {
        RF_TRY(check_fused_feature(params, i, column));
        column += params->features[i].dim;
    }
    if (column != params->output_dim || params->output_stride < params->output_dim ||
        (params->output == NULL && params->bags > 0 && column > 0)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: output is %s, %" PRId64 " columns wide with a stride of %" PRId64
                        "; the features write %" PRId64 " columns, and the stride may not be less",
                        fused, params->output == NULL ? "NULL" : "given", params->output_dim,
                        params->output_stride, column);
    }
out:
    return status;
}
