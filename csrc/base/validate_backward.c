/* rf__check_fused_backward. */
#include <inttypes.h>
#include <stddef.h>

#include "base/validate.h"

static rf_status check_feature(const char *name, const rf_fused_backward_params *params, int64_t at) {
    const rf_feature *feature = &params->features[at];
    const int64_t dim = params->dim;
    const int64_t first = dim > 0 && feature->weight_offset >= 0 ? feature->weight_offset / dim : 0;
    if (feature->dim != dim || feature->rows < 0 || feature->weight_offset < 0 ||
        (dim > 0 && (feature->weight_offset % dim != 0 || feature->rows > params->rows - first))) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] is a table of %" PRId64 " x %" PRId64
                        " at element %" PRId64 "; it must be whole rows of its weight, %" PRId64
                        " x %" PRId64,
                        name, at, feature->rows, feature->dim, feature->weight_offset, params->rows, dim);
    }
    if (feature->output_column < 0 || feature->output_column > params->output_dim - dim) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] has %" PRId64 " columns from column %" PRId64
                        "; grad has %" PRId64 " columns",
                        name, at, dim, feature->output_column, params->output_dim);
    }
    if (feature->pooling == RF_MAX && params->winners == NULL && params->bags > 0 && dim > 0) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64
                        "] pools by max and winners is not given; it must be that "
                        "of fused_embedding_bag_winners",
                        name, at);
    }
    return rf__check_pooling(name, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

rf_status rf__check_fused_backward(const char *name, const rf_fused_backward_params *params) {
    rf_status status = RF_OK;
    int64_t size;
    if (params->n_features < 0 || params->n_features > UINT32_MAX || params->rows < 0 || params->dim < 0 ||
        params->output_dim < 0 || params->bags < 0 ||
        __builtin_mul_overflow(params->n_features, params->bags, &size) ||
        __builtin_mul_overflow(params->bags, params->output_dim, &size) ||
        __builtin_mul_overflow(params->rows, params->dim, &size) || __builtin_mul_overflow(size, 4, &size)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: %" PRId64 " features, %" PRId64 " bags a feature, %" PRId64
                        " columns of grad, a weight of %" PRId64 " x %" PRId64
                        "; sizes are 0 or more, and their products fit int64",
                        name, params->n_features, params->bags, params->output_dim, params->rows,
                        params->dim);
    }
    RF_TRY(rf__check_call(name, params->lookups, params->bags, params->index_type, params->offset_type, 0,
                          params->indices, params->offsets));
    RF_TRY(rf__check_dtype(name, "grad_dtype", params->grad_dtype));
    RF_TRY(rf__check_dtype(name, "dtype", params->dtype));
    if (params->grad == NULL && params->bags > 0 && params->output_dim > 0) {
        return rf__fail(RF_ERR_VALUE, "recfuse.%s: grad is NULL; it must point to its elements", name);
    }
    for (int64_t i = 0; i < params->n_features; i++) {
        if (params->features[i].buffer == params->group) RF_TRY(check_feature(name, params, i));
    }
out:
    return status;
}
