/* recfuse::fused_embedding_bag_quantized on CPU and GPU: tensors -> rf_fused_embedding_bag_params. */
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/operators.h"

enum {
    WEIGHTS,
    PARAMETERS, /* follows WEIGHTS: rf__fused_quantized_weights_read */
    FEATURES,
    INDICES,
    OFFSETS,
    OUTPUT_DIM,
    SAMPLE_WEIGHTS,
    OUTPUT_DTYPE,
    PREFETCH_DISTANCE,
    BOUNDS_CHECK,
    SCHEDULES,
    WARPS, /* follows SCHEDULES, and MAPPING follows it: rf__fused_pool */
    MAPPING,
    STORED
};

static rf_status run(rf__call *call) {
    static const char *const dtypes[] = {"float32", "float16", "bfloat16", NULL}; /* as RF_DTYPE_LIST */
    rf_fused_embedding_bag_params params = {.output_dim = call->values[OUTPUT_DIM].integer,
                                            .output_stride = call->values[OUTPUT_DIM].integer};
    const int64_t *columns = NULL;
    int dtype = 0;
    RF_CHECK(rf__call_device(call, INDICES));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &params.features, &params.n_features));
    RF_CHECK(rf__fused_quantized_weights_read(call, WEIGHTS, STORED, &columns, &params));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, -1, &params));
    RF_CHECK(rf__call_choice(call, OUTPUT_DTYPE, dtypes, &dtype));
    RF_CHECK(rf__call_bounds_check(call, BOUNDS_CHECK, &params.check_bounds));
    RF_CHECK(rf__call_prefetch_distance(call, PREFETCH_DISTANCE, &params.prefetch_distance));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, params.lookups, &params.sample_weights));
    RF_FAIL_IF(params.output_dim < 0, RF_ERR_VALUE, "output_dim is %lld; expected >= 0",
               (long long)params.output_dim);
    params.output_dtype = (rf_dtype)dtype;
    const int64_t sizes[2] = {params.bags, params.output_dim};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, rf__torch_dtype(params.output_dtype), &params.output));
    return rf__fused_pool(call, SCHEDULES, &params, columns);
}

const rf__operator rf__torch_fused_embedding_bag_quantized = {
    "(Tensor[] weights, Tensor[] parameters, Tensor features, Tensor indices, Tensor offsets, SymInt "
    "output_dim, "
    "Tensor? per_sample_weights=None, str output_dtype=\"float32\", int prefetch_distance=-1, "
    "str bounds_check=\"on\", Tensor? schedules=None, int warps=0, Tensor? mapping=None, "
    "Tensor? stored=None) -> Tensor",
    RF__CPU | RF__CUDA, run};
