/* rf_fused_embedding_bag_winners_cuda, rf_fused_embedding_bag_sample_weights_backward_cuda: the launches of winners.cu and
 * sample_weights.cu. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/validate.h"
#include "cuda/driver/memory.h"
#include "cuda/fused_embedding_bag/backward/backward.h"
#include "cuda/fused_embedding_bag/backward/bags/args.h"
#include "cuda/jit/jit.h"

enum {
    WARP = 32,
    LANE_COLUMNS = 4,
    WARPS_AN_SM = 64, /* that bags are shared among, where they are few */
    MOST_PARTS = 1024 /* of a bag */
};

static const rf__kernel_source sources[] = {
    {"fused_embedding_bag/backward/bags/winners.cu", "rf_winners"},
    {"fused_embedding_bag/backward/bags/sample_weights.cu", "rf_sample_weights"},
};
typedef enum bags_kernel { WINNERS, SAMPLE_WEIGHTS } bags_kernel;
typedef struct bags_variant {
    int32_t index_type, offset_type, grad_dtype; /* grad_dtype: of sample_weights.cu, else 0 */
} bags_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const bags_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_GRAD_DTYPE=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             (int)variant->grad_dtype);
    return RF_OK;
}

/* What a launch needs. */
typedef struct bags_call {
    const char *operator_name;
    const rf_fused_embedding_bag_params *params;
    bags_kernel kernel;
    rf_dtype grad_dtype;
    rf_bags_args args; /* all but features */
} bags_call;

/* As lanes_of of bags.cuh. */
static int64_t bags_a_block(int64_t dim) {
    int64_t lanes = 1;
    while (lanes < RF_BAGS_BLOCK && lanes * LANE_COLUMNS < dim) lanes *= 2;
    return RF_BAGS_BLOCK / lanes;
}

/* Writes features [n_features]; returns the blocks that winners.cu takes. */
static int64_t features_write(const rf_fused_embedding_bag_params *params, rf_bags_feature *to) {
    int64_t blocks = 0;
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const rf_buffer *buffer = &params->buffers[feature->buffer];
        const int64_t each = bags_a_block(feature->dim);
        to[f] =
            (rf_bags_feature){.weight = (uintptr_t)buffer->data +
                                        (uint64_t)(feature->weight_offset * rf__dtype_bytes(buffer->dtype)),
                              .rows = feature->rows,
                              .padding_idx = feature->padding_idx,
                              .output_column = feature->output_column,
                              .dim = feature->dim,
                              .dtype = (int32_t)buffer->dtype,
                              .pooling = (int32_t)feature->pooling,
                              .first_block = blocks};
        if (feature->dim > 0) blocks += (params->bags + each - 1) / each;
    }
    return blocks;
}

static rf_status launch(const rf__cuda_store *store, bags_call *call, int64_t blocks) {
    const rf_fused_embedding_bag_params *params = call->params;
    const rf__kernel *kernel = NULL;
    const bags_variant variant = {(int32_t)params->index_type, (int32_t)params->offset_type,
                                  (int32_t)call->grad_dtype};
    rf__launch_config config = {.block = {RF_BAGS_BLOCK}, .stream = store->stream};
    int64_t parts = 1;
    if (call->kernel == SAMPLE_WEIGHTS) {
        const int64_t slots = params->n_features * params->bags;
        blocks = (slots + RF_BAGS_BLOCK / WARP - 1) / (RF_BAGS_BLOCK / WARP);
        parts = (int64_t)store->device->gpu.sms * WARPS_AN_SM / slots;
        parts = parts < 1 ? 1 : parts > MOST_PARTS ? MOST_PARTS : parts;
    }
    const char *operator_name = call->operator_name;
    RF__REFUSE_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
                  RF__I64 " bags of " RF__I64 " features; that is more than a launch takes; split the batch",
                  params->bags, params->n_features);
    config.grid[0] = (uint32_t)blocks;
    config.grid[1] = (uint32_t)parts;
    RF_CHECK(
        rf__jit_kernel(store->device, &sources[call->kernel], &variant, sizeof variant, describe, &kernel));
    config.function = kernel->function;
    RF_CHECK(rf__cuda_enter(store->device));
    return rf__cuda_leave_with(rf__launch(store->device, &config, &call->args));
}

static rf_status run(bags_call *call, const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__cuda_store store;
    rf__cuda_block features = {0};
    const rf_fused_embedding_bag_params *params = call->params;
    const size_t bytes = (size_t)params->n_features * sizeof(rf_bags_feature);
    rf_bags_feature *described = malloc(bytes + 1);
    RF_FAIL_IF(described == NULL, RF_ERR_MEMORY, "no memory for %" PRId64 " features", params->n_features);
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_store_of(device, stream->stream, allocator, &store));
    const int64_t blocks = features_write(params, described);
    if (blocks == 0) goto out;
    RF_TRY(rf__cuda_block_new(&store, described, bytes, false, &features));
    call->args.indices = (uintptr_t)params->indices;
    call->args.offsets = (uintptr_t)params->offsets;
    call->args.features = features.memory;
    call->args.lookups = params->lookups;
    call->args.bags = params->bags;
    call->args.n_features = params->n_features;
    call->args.output_dim = params->output_dim;
    status = launch(&store, call, blocks);
out:
    if (features.memory != 0) rf__cuda_block_free(&store, &features);
    free(described);
    return status;
}

rf_status rf_fused_embedding_bag_winners_cuda(const rf_fused_embedding_bag_params *params, int64_t *winners,
                                              const rf_cuda_allocator *allocator,
                                              const rf_cuda_stream *stream) {
    rf_fused_embedding_bag_params checked = *params;
    checked.output = winners;
    checked.output_stride = params->output_dim;
    RF_CHECK(rf__check_fused_call(&checked));
    RF_CHECK(rf__check_fused_features(&checked));
    if (params->bags == 0) return RF_OK;
    bags_call call = {.operator_name = "fused_embedding_bag_winners",
                      .params = params,
                      .kernel = WINNERS,
                      .args = {.winners = (uintptr_t)winners}};
    return run(&call, allocator, stream);
}

static rf_status zeros_write(float *output, int64_t count, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_enter(device));
    RF__CUDA_TRY(
        device->driver->cuMemsetD32Async((uintptr_t)output, 0, (size_t)count, (rf__cu_stream)stream->stream));
out:
    return rf__cuda_leave_with(status);
}

rf_status rf_fused_embedding_bag_sample_weights_backward_cuda(const rf_fused_embedding_bag_params *params,
                                                              const void *grad, rf_dtype grad_dtype,
                                                              float *output,
                                                              const rf_cuda_allocator *allocator,
                                                              const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_sample_weights_backward";
    rf_fused_embedding_bag_params checked = *params;
    checked.output = output;
    checked.output_stride = params->output_dim;
    checked.sample_weights = output; /* allows sums alone */
    RF_CHECK(rf__check_fused_call(&checked));
    if (params->lookups == 0) return RF_OK;
    RF_CHECK(rf__check_fused_features(&checked));
    RF_CHECK(rf__check_dtype(operator_name, "grad_dtype", grad_dtype));
    RF__REFUSE_IF(output == NULL || (grad == NULL && params->bags * params->output_dim > 0), RF_ERR_VALUE,
                  "%s is NULL; it must point to its elements", output == NULL ? "output" : "grad");
    RF_CHECK(zeros_write(output, params->lookups, stream));
    if (params->bags == 0) return RF_OK;
    bags_call call = {.operator_name = operator_name,
                      .params = params,
                      .kernel = SAMPLE_WEIGHTS,
                      .grad_dtype = grad_dtype,
                      .args = {.grad = (uintptr_t)grad, .output = (uintptr_t)output}};
    return run(&call, allocator, stream);
}

rf_status rf__bags_compile(const char *arch, const rf_fused_embedding_bag_params *params) {
    bags_variant variant = {.index_type = (int32_t)params->index_type,
                            .offset_type = (int32_t)params->offset_type};
    bool any_max = false;
    for (int64_t f = 0; f < params->n_features; f++) any_max |= params->features[f].pooling == RF_MAX;
    if (any_max)
        RF_CHECK(rf__jit_compile_each(&sources[WINNERS], &variant, sizeof variant, 1, describe, arch));
    if (params->sample_weights == NULL) return RF_OK;
    variant.grad_dtype = (int32_t)params->output_dtype;
    return rf__jit_compile_each(&sources[SAMPLE_WEIGHTS], &variant, sizeof variant, 1, describe, arch);
}
