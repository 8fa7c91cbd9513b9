/* rf_fused_embedding_bag_winners_cuda, rf_fused_embedding_bag_sample_weights_backward_cuda: the launches of
 * winners.cu and sample_weights.cu. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/feature_rows.h"
#include "families/fused_backward/backward.h"
#include "families/fused_backward/bags/backward_bags_args.h"
#include "gpu/launches/description.h"

enum {
    WARP = 32,
    LANE_COLUMNS = 4,
    WARPS_AN_SM = 64, /* among which bags are shared if they are few */
    MOST_PARTS = 1024 /* of a bag */
};

static const rf__kernel_source sources[] = {
    {"families/fused_backward/bags/winners.cu", "rf_winners"},
    {"families/fused_backward/bags/sample_weights.cu", "rf_sample_weights"},
};
typedef enum bags_kernel { WINNERS, SAMPLE_WEIGHTS } bags_kernel;
typedef struct bags_variant {
    int32_t index_type, offset_type;
    int32_t grad_dtype, is_quantized; /* of sample_weights.cu, else 0 */
} bags_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const bags_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_GRAD_DTYPE=%d -DRF_QUANTIZED=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             (int)variant->grad_dtype, (int)variant->is_quantized);
    return RF_OK;
}

/* A call of one of the kernels; `output` of sample_weights.cu. */
typedef struct bags_problem {
    const rf_fused_embedding_bag_params *params;
    bags_kernel kernel;
    rf_dtype grad_dtype;
    const void *grad;
    void *output;
} bags_problem;

/* The features of a call. */
typedef struct bags_description {
    int64_t blocks; /* that winners.cu takes */
    rf_bags_feature features[];
} bags_description;

/* As lanes_of of backward_bags.cuh. */
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
        const rf__row_format row = rf__feature_row(params->buffers, feature);
        const int64_t block_bags = bags_a_block(feature->dim);
        to[f] = (rf_bags_feature){.weight = (uintptr_t)rf__feature_weight(params->buffers, feature),
                                  .parameters = (uintptr_t)rf__feature_parameters(params->buffers, feature),
                                  .pitch = row.pitch,
                                  .parameters_pitch = row.parameters_pitch,
                                  .rows = feature->rows,
                                  .padding_idx = feature->padding_idx,
                                  .output_column = feature->output_column,
                                  .dim = feature->dim,
                                  .dtype = (int32_t)row.dtype,
                                  .pooling = (int32_t)feature->pooling,
                                  .first_block = blocks};
        if (feature->dim > 0) blocks += (params->bags + block_bags - 1) / block_bags;
    }
    return blocks;
}

/* An rf__description_make. */
static rf_status description_make(const rf__gpu *gpu, const void *problem, rf__description *to) {
    const rf_fused_embedding_bag_params *params = ((const bags_problem *)problem)->params;
    const size_t bytes = (size_t)params->n_features * sizeof(rf_bags_feature);
    bags_description *description = malloc(sizeof *description + bytes);
    (void)gpu;
    RF_FAIL_IF(description == NULL, RF_ERR_MEMORY, "no memory for %" PRId64 " features", params->n_features);
    description->blocks = features_write(params, description->features);
    *to = (rf__description){.data = description,
                            .free_data = free,
                            .upload = description->features,
                            .upload_bytes = description->blocks > 0 ? (int64_t)bytes : 0};
    return RF_OK;
}

/* Adds the bytes that a launch moves: lookups, rows of tables, the gradient or its places. */
static void traffic_add(const bags_problem *problem, rf__kernel_launch *launch) {
    const rf_fused_embedding_bag_params *params = problem->params;
    const bool is_winners = problem->kernel == WINNERS;
    const int64_t bags = params->bags * params->n_features, outputs = params->bags * params->output_dim;
    const double lookups = (double)params->lookups / (double)params->n_features;
    launch->read_bytes = params->lookups * (params->index_type == RF_INT64 ? 8 : 4) +
                         (bags + 1) * (params->offset_type == RF_INT64 ? 8 : 4);
    if (!is_winners) launch->read_bytes += rf__elements_bytes(problem->grad_dtype, outputs);
    launch->written_bytes = is_winners ? outputs * (int64_t)sizeof(int64_t) : params->lookups * 4;
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const rf__row_format row = rf__feature_row(params->buffers, feature);
        const double rows = (double)feature->rows < lookups ? (double)feature->rows : lookups;
        if (is_winners && feature->pooling != RF_MAX) continue;
        launch->read_bytes += (int64_t)(rows * (double)rf__row_read_bytes(&row));
        launch->flops += lookups * (double)feature->dim * (is_winners ? 1 : 2);
    }
}

/* Returns true if a table is quantised, or its rows have gaps. */
static bool any_quantized(const rf_fused_embedding_bag_params *params) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_buffer *buffer = &params->buffers[params->features[f].buffer];
        if (buffer->pitch != 0 || rf_is_quantized((int)buffer->dtype)) return true;
    }
    return false;
}

/* Description NULL: no bags. */
static rf_status lower(const rf__gpu *gpu, const bags_description *description, const bags_problem *problem,
                       rf__launches *launches) {
    const char *const operator_name = launches->name;
    const rf_fused_embedding_bag_params *params = problem->params;
    const bool is_winners = problem->kernel == WINNERS;
    const int64_t slots = params->n_features * params->bags;
    int64_t blocks = 0, parts = 1;
    if (!is_winners)
        RF_CHECK(rf__launches_fill(launches, (uintptr_t)problem->output, false,
                                   params->lookups * (int64_t)sizeof(float)));
    if (description == NULL || description->blocks == 0) return RF_OK;
    blocks = description->blocks;
    if (!is_winners) {
        blocks = (slots + RF_BAGS_BLOCK / WARP - 1) / (RF_BAGS_BLOCK / WARP);
        parts = (int64_t)gpu->sms * WARPS_AN_SM / slots;
        parts = parts < 1 ? 1 : parts > MOST_PARTS ? MOST_PARTS : parts;
    }
    RF__REFUSE_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
                  RF__I64 " bags of " RF__I64 " features are more than a launch takes. Split the batch.",
                  params->bags, params->n_features);
    const bags_variant variant = {(int32_t)params->index_type, (int32_t)params->offset_type,
                                  (int32_t)problem->grad_dtype, !is_winners && any_quantized(params)};
    const rf_bags_args args = {.indices = (uintptr_t)params->indices,
                               .offsets = (uintptr_t)params->offsets,
                               .grad = (uintptr_t)problem->grad,
                               .output = is_winners ? 0 : (uintptr_t)problem->output,
                               .winners = is_winners ? (uintptr_t)problem->output : 0,
                               .lookups = params->lookups,
                               .bags = params->bags,
                               .n_features = params->n_features,
                               .output_dim = params->output_dim};
    rf__kernel_launch launch = {.source = &sources[problem->kernel],
                                .describe = describe,
                                .grid = {(uint32_t)blocks, (uint32_t)parts},
                                .block = {RF_BAGS_BLOCK}};
    traffic_add(problem, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    rf__launches_bind_upload(launches, 0, offsetof(rf_bags_args, features));
    return RF_OK;
}

static rf_status run(const char *operator_name, const bags_problem *problem,
                     const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__cuda_store store;
    rf__described described = {0};
    rf__launches launches;
    rf__launches_init(&launches, operator_name);
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_store_of(device, stream->stream, allocator, &store));
    if (problem->params->bags > 0)
        RF_TRY(rf__description_make_uncached(&store, description_make, problem, &described));
    RF_TRY(lower(&device->gpu, described.data, problem, &launches));
    const uint64_t uploads[RF__MOST_UPLOADS] = {described.upload};
    RF_TRY(rf__launches_run_in(device, &launches, uploads, 0, store.stream));
out:
    rf__launches_free(&launches);
    rf__description_release(&described);
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
    RF_CHECK(rf__check_fused_floats("fused_embedding_bag_winners", &checked));
    if (params->bags == 0) return RF_OK;
    const bags_problem problem = {.params = params, .kernel = WINNERS, .output = winners};
    return run("fused_embedding_bag_winners", &problem, allocator, stream);
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
    checked.sample_weights = output; /* this check allows only sums */
    RF_CHECK(rf__check_fused_call(&checked));
    if (params->lookups == 0) return RF_OK;
    RF_CHECK(rf__check_fused_features(&checked));
    for (int64_t f = 0; f < params->n_features; f++)
        RF_CHECK(rf__check_fused_parameters(operator_name, params, f));
    RF_CHECK(rf__check_dtype(operator_name, "grad_dtype", grad_dtype));
    RF__REFUSE_IF(output == NULL || (grad == NULL && params->bags * params->output_dim > 0), RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", output == NULL ? "output" : "grad");
    const bags_problem problem = {
        .params = params, .kernel = SAMPLE_WEIGHTS, .grad_dtype = grad_dtype, .grad = grad, .output = output};
    return run(operator_name, &problem, allocator, stream);
}
