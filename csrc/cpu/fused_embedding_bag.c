/* rf_fused_embedding_bag_cpu: many tables. The work is pool.c's; here are the checks of the arguments. */
#include <inttypes.h>
#include <stddef.h>

#include "pool.h"
#include "validate.h"

static const char name[] = "fused_embedding_bag";

static rf_status check_feature(const rf_fused_embedding_bag_params *params, int64_t at, int64_t column) {
    const rf_feature *feature = &params->features[at];
    if (feature->buffer < 0 || feature->buffer >= params->n_buffers) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] is in buffer %" PRId64 "; there are %" PRId64
                        " buffers",
                        name, at, feature->buffer, params->n_buffers);
    }
    int64_t numel = params->buffers[feature->buffer].numel, size, end;
    if (feature->rows < 0 || feature->dim < 0 || feature->weight_offset < 0 ||
        __builtin_mul_overflow(feature->rows, feature->dim, &size) ||
        __builtin_add_overflow(feature->weight_offset, size, &end) || end > numel) {
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.%s: features[%" PRId64 "] is a table of %" PRId64 " x %" PRId64 " at element %" PRId64
            "; it must lie in buffer %" PRId64 ", which has %" PRId64 " elements",
            name, at, feature->rows, feature->dim, feature->weight_offset, feature->buffer, numel);
    }
    if (feature->output_column != column || feature->dim > params->output_dim - column) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: features[%" PRId64 "] writes %" PRId64 " columns from column %" PRId64
                        "; it must begin at column %" PRId64
                        ", where the feature before ends, and end within the "
                        "output's %" PRId64,
                        name, at, feature->dim, feature->output_column, column, params->output_dim);
    }
    return rf__check_pooling(name, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

static rf_status check(const rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    int64_t column = 0, bags;
    if (params->n_features < 0 || params->n_buffers < 0 ||
        __builtin_mul_overflow(params->n_features, params->bags, &bags)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: %" PRId64 " features, %" PRId64 " buffers and %" PRId64
                        " bags a feature; sizes are 0 or more, and their product fits int64",
                        name, params->n_features, params->n_buffers, params->bags);
    }
    RF_TRY(rf__check_call(name, params->lookups, params->bags, params->index_type, params->offset_type,
                          params->prefetch_distance, params->indices, params->offsets));
    RF_TRY(rf__check_dtype(name, "output_dtype", params->output_dtype));
    for (int64_t i = 0; i < params->n_buffers; i++) {
        RF_TRY(rf__check_dtype(name, "a buffer's dtype", params->buffers[i].dtype));
        if (params->buffers[i].data == NULL && params->buffers[i].numel > 0) {
            return rf__fail(RF_ERR_VALUE,
                            "recfuse.%s: buffers[%" PRId64 "].data is NULL, for %" PRId64 " elements", name,
                            i, params->buffers[i].numel);
        }
    }
    for (int64_t i = 0; i < params->n_features; i++) {
        RF_TRY(check_feature(params, i, column));
        column += params->features[i].dim;
    }
    if (column != params->output_dim || params->output_stride < params->output_dim ||
        (params->output == NULL && params->bags > 0 && column > 0)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: output is %s, %" PRId64 " columns wide with a stride of %" PRId64
                        "; the features write %" PRId64 " columns, and the stride may not be less",
                        name, params->output == NULL ? "NULL" : "given", params->output_dim,
                        params->output_stride, column);
    }
out:
    return status;
}

rf_status rf_fused_embedding_bag_cpu(const rf_fused_embedding_bag_params *params,
                                     const rf_executor *executor) {
    rf_status status = check(params);
    if (status != RF_OK) return status;
    rf__pool_call call = {
        .operator_name = name,
        .buffers = params->buffers,
        .features = params->features,
        .n_features = params->n_features,
        .bags = params->bags,
        .indices = params->indices,
        .offsets = params->offsets,
        .n_offsets = params->n_features * params->bags + 1,
        .lookups = params->lookups,
        .index_type = params->index_type,
        .offset_type = params->offset_type,
        .sample_weights = params->sample_weights,
        .output = params->output,
        .output_dtype = params->output_dtype,
        .output_pitch = params->output_stride * rf__dtype_bytes(params->output_dtype),
        .output_dim = params->output_dim,
        .check_bounds = params->check_bounds,
        .prefetch_distance = params->prefetch_distance,
    };
    return rf__pool_run(&call, executor);
}
