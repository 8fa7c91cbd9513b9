/* rf_embedding_bag_cpu: one table. The work is pool.c's. */
#include "families/fused_embedding_bag/cpu/pool.h"
#include "families/embedding_bag/check_embedding_bag.h"

rf_status rf_embedding_bag_cpu(const rf_embedding_bag_params *params, const rf_executor *executor) {
    RF_CHECK(rf__check_embedding_bag(params));
    const rf_buffer table = {
        .data = params->weight, .numel = params->rows * params->weight_stride, .dtype = params->dtype};
    const rf_feature feature = {.rows = params->rows,
                                .dim = params->dim,
                                .pooling = params->pooling,
                                .padding_idx = params->padding_idx};
    rf__pool_call call = {
        .operator_name = "embedding_bag",
        .buffers = &table,
        .features = &feature,
        .n_features = 1,
        .pitch = rf__elements_bytes(params->dtype, params->weight_stride),
        RF__LOOKUPS_OF(params),
        .n_offsets = params->bags + (params->include_last_offset ? 1 : 0),
        .even_lookups = params->bags > 0 ? params->lookups / params->bags : 0,
        .output = params->output,
        .output_row = rf__row_format_of(params->dtype, params->dim, params->output_stride),
        .check_bounds = params->check_bounds,
        .prefetch_distance = params->prefetch_distance,
    };
    return rf__pool_run(&call, executor);
}
