/* recfuse::ikbo_linear and recfuse::ikbo_linear_chain on CPU and GPU.
 *
 * Four ways to the same result, the stages of the paper: "decomposed" has a matmul of torch for each level,
 * the users' products gathered for their candidates into memory, and an addition; "aligned" the same with
 * rows of weights padded to 16 bytes, as tensor cores need; "broadcast" adds from the users' products in one
 * kernel, which also computes the remainder of a k that is not a multiple of 8; "fused" is a single launch. A
 * fifth, "concatenated" (linear_concatenated.c), is for users of one candidate each; a sixth, "small", is one
 * launch of many small tasks, for few items on a GPU. linear_levels.c has the first three.
 */
#include "core/validate.h"
#include "families/ikbo_linear/ikbo_linear.h"
#include "families/ikbo_linear/torch/ikbo_linear_torch.h"
#include "torch/dispatch.h"
#include "torch/operators.h"

/* The arguments of the one launch, except for `out`. */
static rf_ikbo_linear_params fused_params(const rf__ikbo_layer *layer, const rf_cuda_allocator *allocator) {
    rf_ikbo_linear_params params = {.n_levels = layer->n_levels,
                                    .dtype = layer->dtype,
                                    .m = layer->m,
                                    .n = layer->n,
                                    .bias = layer->bias,
                                    .activation = layer->activation,
                                    .check_bounds = layer->check_bounds,
                                    .chain = layer->chain,
                                    .allocator = allocator};
    for (int32_t l = 0; l < layer->n_levels; l++) {
        const rf__tensor *weight = &layer->weights[l], *input = &layer->inputs[l];
        params.levels[l] = (rf_ikbo_level){.weight = weight->data,
                                           .weight_pitch = weight->strides[0],
                                           .x = input->data,
                                           .x_pitch = {input->strides[0], input->strides[1]},
                                           .count = input->sizes[0],
                                           .k = input->sizes[1],
                                           .parent = layer->maps[l],
                                           .parent_type = layer->map_types[l]};
    }
    return params;
}

/* Returns true if the elements of an input's rows are contiguous, as the single launch requires. */
static bool has_rows(const rf__ikbo_layer *layer, int32_t l) {
    return !layer->matrices || layer->n <= 1 || layer->inputs[l].strides[2] == 1;
}

/* Copies weights and inputs whose rows are not contiguous. */
static rf_status make_rows(rf__call *call, rf__ikbo_layer *layer) {
    for (int32_t l = 0; l < layer->n_levels; l++) {
        rf__tensor *weight = &layer->weights[l], *input = &layer->inputs[l];
        if (weight->sizes[1] > 1 && weight->strides[1] != 1)
            RF_CHECK(rf__call_contiguous(call, weight, weight->dtype));
        if (!has_rows(layer, l)) RF_CHECK(rf__call_contiguous(call, input, input->dtype));
    }
    return RF_OK;
}

/* Selects the path of "auto" for this call. Weights may be copied for the single launch, but inputs only if
 * it is requested. `shape`: set for paths of this library's kernels only. */
static rf_status path_choose(const rf__call *call, rf__ikbo_layer *layer, rf__ikbo_shape *shape) {
    const bool on_cpu = rf__call_on_cpu(call);
    RF_FAIL_IF(
        (layer->path == RF__IKBO_FUSED || layer->path == RF__IKBO_SMALL) && on_cpu, RF_ERR_UNSUPPORTED,
        "path is \"%s\", which is a kernel of GPUs, with tensors on the CPU. Use \"auto\" or \"broadcast\".",
        layer->path == RF__IKBO_FUSED ? "fused" : "small");
    const char *reason =
        layer->path == RF__IKBO_CONCATENATED ? rf__ikbo_concatenated_refusal(call, layer) : NULL;
    RF_FAIL_IF(reason != NULL, RF_ERR_UNSUPPORTED,
               "path is \"concatenated\", which is for two levels of two dimensions on the CPU: %s. Use "
               "\"auto\" or \"broadcast\".",
               reason);
    if (layer->path != RF__IKBO_AUTO) return RF_OK;
    if (on_cpu) {
        bool best = false;
        RF_CHECK(rf__ikbo_concatenated_is_best(call, layer, &best));
        layer->path = best ? RF__IKBO_CONCATENATED : RF__IKBO_BROADCAST;
        return RF_OK;
    }
    const rf_ikbo_linear_params params = fused_params(layer, NULL);
    bool fits = true;
    for (int32_t l = 0; l < layer->n_levels; l++) fits = fits && has_rows(layer, l);
    fits = fits && rf__ikbo_linear_shape(&params, rf__call_gpu(call), shape);
    layer->path = !fits ? RF__IKBO_BROADCAST : shape->groups > 0 ? RF__IKBO_SMALL : RF__IKBO_FUSED;
    return RF_OK;
}

/* Runs a path that uses only kernels of this library. `shape`: of path_choose; NULL: the path was
 * requested. */
static rf_status run_kernels(rf__call *call, rf__ikbo_layer *layer, const rf__ikbo_shape *shape, void *out) {
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    const void *weight = layer->weights[layer->n_levels - 1].data;
    rf_cuda_stream stream;
    RF_CHECK(make_rows(call, layer));
    rf_ikbo_linear_params params = fused_params(layer, &allocator);
    params.out = out;
    params.weight = weight;
    params.kernel = layer->path == RF__IKBO_SMALL ? RF_IKBO_KERNEL_SMALL : RF_IKBO_KERNEL_FUSED;
    RF_CHECK(rf__call_stream(call, &stream));
    return shape != NULL ? rf__ikbo_linear_run(&params, shape, &stream)
                         : rf_ikbo_linear_cuda(&params, &stream);
}

static rf_status run_layer(rf__call *call, bool chain) {
    rf__ikbo_layer layer;
    rf__ikbo_shape shape;
    void *data = NULL;
    RF_CHECK(rf__ikbo_layer_read(call, chain, &layer));
    const bool chosen = layer.path == RF__IKBO_AUTO;
    RF_CHECK(path_choose(call, &layer, &shape));
    const int64_t sizes[3] = {layer.inputs[layer.n_levels - 1].sizes[0], layer.m, layer.n};
    RF_CHECK(rf__call_output(call, 0, 2 + layer.matrices, sizes, rf__torch_dtype(layer.dtype), &data));
    if (layer.path == RF__IKBO_FUSED || layer.path == RF__IKBO_SMALL)
        return run_kernels(call, &layer, chosen ? &shape : NULL, data);
    if (layer.path == RF__IKBO_CONCATENATED)
        return rf__ikbo_concatenated_run(call, &layer, call->outputs[0].tensor, data);
    return rf__ikbo_levels_run(call, &layer, call->outputs[0].tensor, data);
}

/* Returns the number of the path that such a call takes. */
static rf_status path_return(rf__call *call, bool chain) {
    rf__ikbo_layer layer;
    rf__ikbo_shape shape;
    RF_CHECK(rf__ikbo_layer_read(call, chain, &layer));
    RF_CHECK(path_choose(call, &layer, &shape));
    call->outputs[0].integer = layer.path;
    call->outputs[0].is_present = true;
    return RF_OK;
}

static rf_status run(rf__call *call) { return run_layer(call, false); }
static rf_status run_chain(rf__call *call) { return run_layer(call, true); }
static rf_status path_run(rf__call *call) { return path_return(call, false); }
static rf_status chain_path_run(rf__call *call) { return path_return(call, true); }

const rf__operator rf__torch_ikbo_linear = {RF__IKBO_ARGUMENTS " -> Tensor", RF__CPU | RF__CUDA, run};
const rf__operator rf__torch_ikbo_linear_chain = {RF__IKBO_CHAIN_ARGUMENTS " -> Tensor", RF__CPU | RF__CUDA,
                                                  run_chain};
const rf__operator rf__torch__ikbo_linear_path = {RF__IKBO_ARGUMENTS " -> int", RF__CPU | RF__CUDA, path_run};
const rf__operator rf__torch__ikbo_linear_chain_path = {RF__IKBO_CHAIN_ARGUMENTS " -> int",
                                                        RF__CPU | RF__CUDA, chain_path_run};
