/* rf_fused_embedding_bag_cpu: many tables. The work is pool.c's. */
#include "cpu/pool/pool.h"
#include "base/validate.h"

rf_status rf_fused_embedding_bag_cpu(const rf_fused_embedding_bag_params *params,
                                     const rf_executor *executor) {
    rf_status status = rf__check_fused_call(params);
    if (status == RF_OK) status = rf__check_fused_features(params);
    if (status != RF_OK) return status;
    rf__pool_call call = {
        .operator_name = "fused_embedding_bag",
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
