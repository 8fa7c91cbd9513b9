/* recfuse::fused_embedding_bag on CPU and GPU: tensors -> rf_fused_embedding_bag_params. */
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/operators.h"

enum {
    WEIGHTS,
    FEATURES,
    INDICES,
    OFFSETS,
    OUTPUT_DIM,
    SAMPLE_WEIGHTS,
    SPARSE,
    PREFETCH_DISTANCE,
    BOUNDS_CHECK,
    SCHEDULES,
    WARPS,
    MAPPING,
    ANY_MAX /* only of the gradients */
};

static rf_status run(rf__call *call) {
    rf_fused_embedding_bag_params params = {.output_dim = call->values[OUTPUT_DIM].integer,
                                            .output_stride = call->values[OUTPUT_DIM].integer};
    const int64_t *columns = NULL;
    RF_CHECK(rf__call_device(call, INDICES));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &params.features, &params.n_features));
    RF_CHECK(rf__fused_weights_read(call, WEIGHTS, &columns, &params));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, -1, &params));
    RF_CHECK(rf__call_bounds_check(call, BOUNDS_CHECK, &params.check_bounds));
    RF_CHECK(rf__call_prefetch_distance(call, PREFETCH_DISTANCE, &params.prefetch_distance));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, params.lookups, &params.sample_weights));
    RF_FAIL_IF(params.output_dim < 0, RF_ERR_VALUE, "output_dim is %lld; expected >= 0",
               (long long)params.output_dim);
    const int64_t sizes[2] = {params.bags, params.output_dim};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, rf__torch_dtype(params.output_dtype), &params.output));
    return rf__fused_pool(call, SCHEDULES, &params, columns);
}

const rf__operator rf__torch_fused_embedding_bag = {
    "(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim, "
    "Tensor? per_sample_weights=None, bool sparse=False, int prefetch_distance=-1, "
    "str bounds_check=\"on\", Tensor? schedules=None, int warps=0, Tensor? mapping=None, "
    "bool any_max=True) -> Tensor",
    RF__CPU | RF__CUDA, run};
