/* rf_ikbo_add_cuda: the variant of broadcast_add.cu, and its launch. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#include "families/ikbo_linear/check_ikbo_linear.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"

static const rf__kernel_source source = {"families/ikbo_linear/broadcast_add.cu", "rf_broadcast_add"};

/* All of it int32_t: compared bytewise. */
typedef struct broadcast_add_variant {
    int32_t dtype, vector, parent_type, tail;
} broadcast_add_variant;

enum { BLOCK = 256, STEPS = 4, MOST_BYTES = 16 };

static rf_status describe(const void *key, rf__kernel_options *options) {
    const broadcast_add_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_VECTOR=%d -DRF_INDEX=%s -DRF_BLOCK=%d -DRF_STEPS=%d -DRF_TAIL=%d",
             (int)variant->dtype, (int)variant->vector, rf__kernel_integer(variant->parent_type), (int)BLOCK,
             (int)STEPS, (int)variant->tail);
    return RF_OK;
}

/* The widest that divides an item and that both addresses are aligned to. */
static int32_t vector_bytes(const rf_ikbo_add_params *params, int64_t item_bytes) {
    const uint64_t all = (uintptr_t)params->out | (uintptr_t)params->base | (uint64_t)item_bytes;
    int64_t vector = MOST_BYTES;
    while (vector > rf__elements_bytes(params->dtype, 1) && all % (uint64_t)vector != 0) vector /= 2;
    return (int32_t)vector;
}

void rf__ikbo_linear_errors(const void *weight, int64_t m, rf__launches *launches) {
    launches->owner = weight;
    launches->shape = (uint64_t)m;
}

static rf_broadcast_add_args args_of(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                                     int64_t item_vectors) {
    rf_broadcast_add_args args = {.out = params->out,
                                  .base = params->base,
                                  .parent = params->parent,
                                  .bias = params->bias,
                                  .count = params->count,
                                  .parents = params->parents,
                                  .item_vectors = (uint32_t)item_vectors,
                                  .columns = (uint32_t)params->n,
                                  .bias_on_columns = params->bias_on_n,
                                  .activation = (int32_t)params->activation,
                                  .replace = params->replace,
                                  .map = params->map,
                                  .report = params->check_bounds};
    if (tail == NULL) return args;
    args.tail = tail->rows;
    args.tail_weight = tail->weight;
    args.tail_x = tail->x;
    for (int i = 0; i < 2; i++) {
        args.tail_weight_pitch[i] = tail->weight_pitch[i];
        args.tail_x_pitch[i] = tail->x_pitch[i];
    }
    return args;
}

static void traffic_count(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                          rf__kernel_launch *launch) {
    const int64_t item = params->m * params->n;
    const int64_t bases = params->count < params->parents ? params->count : params->parents;
    const int64_t index = params->parent_type == RF_INT64 ? 8 : 4, tails = tail != NULL ? tail->rows : 0;
    const int64_t biases = params->bias == NULL ? 0 : params->bias_on_n ? params->n : params->m;
    const int64_t read = (bases + (params->replace ? 0 : params->count)) * item + biases +
                         tails * (params->m + params->count * params->n);
    launch->written_bytes = rf__elements_bytes(params->dtype, params->count * item);
    launch->read_bytes =
        rf__elements_bytes(params->dtype, read) + (params->parent != NULL ? params->count * index : 0);
    launch->flops = (double)params->count * (double)item *
                    (double)(!params->replace + (params->bias != NULL) + 2 * tails);
}

rf_status rf__ikbo_add_lower(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                             rf__launches *launches) {
    const int64_t item_bytes = rf__elements_bytes(params->dtype, params->m * params->n);
    rf__ikbo_linear_errors(params->weight, params->m, launches);
    if (params->count == 0 || params->m == 0 || params->n == 0) return RF_OK;
    const broadcast_add_variant variant = {(int32_t)params->dtype, vector_bytes(params, item_bytes),
                                           (int32_t)params->parent_type, tail != NULL};
    const int64_t item_vectors = item_bytes / variant.vector;
    const int64_t blocks = (params->count * item_vectors + BLOCK * STEPS - 1) / (BLOCK * STEPS);
    RF_FAIL_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_linear: %" PRId64 " items of %" PRId64 " x %" PRId64
               " need more than 2^31 - 1 blocks. Cut the batch.",
               params->count, params->m, params->n);
    const rf_broadcast_add_args args = args_of(params, tail, item_vectors);
    rf__kernel_launch launch = {
        .source = &source, .describe = describe, .grid = {(uint32_t)blocks}, .block = {BLOCK}};
    traffic_count(params, tail, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    rf__launches_bind_errors(launches, offsetof(rf_broadcast_add_args, errors));
    return RF_OK;
}

static rf_status run(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail, bool checks,
                     const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__check_ikbo_add(params));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, "ikbo_linear");
    launches.checks = checks;
    return rf__launches_finish(rf__ikbo_add_lower(params, tail, &launches), device, &launches, NULL,
                               stream->stream);
}

rf_status rf__ikbo_linear_check(const void *weight, int64_t m, const rf_cuda_stream *stream) {
    const rf_ikbo_add_params nothing = {.weight = weight, .m = m, .parent_type = RF_INT64};
    return run(&nothing, NULL, true, stream);
}

rf_status rf__ikbo_add_launch(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                              const rf_cuda_stream *stream) {
    return run(params, tail, false, stream);
}

rf_status rf_ikbo_add_cuda(const rf_ikbo_add_params *params, const rf_cuda_stream *stream) {
    return run(params, NULL, true, stream);
}
