/* rf_fused_embedding_bag_cpu: many tables. The work is pool.c's. */
#include "families/fused_embedding_bag/cpu/pool.h"
#include "families/fused_embedding_bag/check_fused.h"

rf_status rf_fused_embedding_bag_cpu(const rf_fused_embedding_bag_params *params,
                                     const rf_executor *executor) {
    RF_CHECK(rf__check_fused_call(params));
    RF_CHECK(rf__check_fused_features(params));
    rf__pool_call call = {
        .operator_name = "fused_embedding_bag",
        .buffers = params->buffers,
        .features = params->features,
        .n_features = params->n_features,
        RF__LOOKUPS_OF(params),
        .n_offsets = params->n_features * params->bags + 1,
        .output = params->output,
        .output_row = rf__row_format_of(params->output_dtype, params->output_dim, params->output_stride),
        .check_bounds = params->check_bounds,
        .prefetch_distance = params->prefetch_distance,
    };
    RF_CHECK(rf__pool_run(&call, executor));
    if (!call.check_bounds) return RF_OK;
    const int64_t last = call.n_offsets - 1;
    const int64_t end = rf__load_int(call.offsets, call.offset_type, last);
    RF_FAIL_IF(end != call.lookups, RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: offsets[%" PRId64 "], the last offset, is %" PRId64
               "; expected %" PRId64 ", the number of indices",
               last, end, call.lookups);
    return RF_OK;
}
