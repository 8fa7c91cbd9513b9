/* rf_embedding_bag_cpu: one table. The work is pool.c's; here are the checks of the arguments. */
#include <inttypes.h>
#include <stddef.h>

#include "check.h"

static rf_status check(const rf_embedding_bag_params *params) {
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

rf_status rf_embedding_bag_cpu(const rf_embedding_bag_params *params, const rf_executor *executor) {
    rf_status status = check(params);
    if (status != RF_OK) return status;
    const rf_buffer table = {params->weight, params->rows * params->weight_stride, params->dtype};
    const rf_feature feature = {.rows = params->rows,
                                .dim = params->dim,
                                .pooling = params->pooling,
                                .padding_idx = params->padding_idx};
    rf__pool_call call = {
        .operator_name = "embedding_bag",
        .buffers = &table,
        .features = &feature,
        .n_features = 1,
        .pitch = params->weight_stride * rf__dtype_bytes(params->dtype),
        .bags = params->bags,
        .indices = params->indices,
        .offsets = params->offsets,
        .n_offsets = params->bags + (params->include_last_offset ? 1 : 0),
        .lookups = params->lookups,
        .index_type = params->index_type,
        .offset_type = params->offset_type,
        .sample_weights = params->sample_weights,
        .output = params->output,
        .output_dtype = params->dtype,
        .output_pitch = params->output_stride * rf__dtype_bytes(params->dtype),
        .output_dim = params->dim,
        .check_bounds = params->check_bounds,
        .prefetch_distance = params->prefetch_distance,
    };
    return rf__pool_run(&call, executor);
}
