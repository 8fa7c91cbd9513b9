/* rf_ikbo_add_cuda: which variant of broadcast_add.cu is launched how. */
#include <inttypes.h>
#include <stdio.h>

#include "base/validate.h"
#include "cuda/ikbo_linear/args.h"
#include "cuda/ikbo_linear/ikbo_linear.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source source = {"ikbo_linear/broadcast_add.cu", "rf_broadcast_add"};

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
    while (vector > rf__dtype_bytes(params->dtype) && all % (uint64_t)vector != 0) vector /= 2;
    return (int32_t)vector;
}

rf__cuda_error_word rf__ikbo_linear_error_word(const rf__cuda_device *device, const void *weight, int64_t m) {
    return rf__cuda_error_word_of(&device->errors, weight, (uint64_t)m);
}

static rf_status launch_add(const rf__cuda_device *device, const rf_ikbo_add_params *params,
                            const rf__ikbo_tail *tail, rf_error_word errors, void *stream) {
    const rf__kernel *kernel = NULL;
    const int64_t item_bytes = params->m * params->n * rf__dtype_bytes(params->dtype);
    const broadcast_add_variant variant = {(int32_t)params->dtype, vector_bytes(params, item_bytes),
                                           (int32_t)params->parent_type, tail != NULL};
    const int64_t item_vectors = item_bytes / variant.vector;
    const int64_t blocks = (params->count * item_vectors + BLOCK * STEPS - 1) / (BLOCK * STEPS);
    RF_FAIL_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_linear: %" PRId64 " items of %" PRId64 " x %" PRId64
               " need more than 2^31 - 1 blocks; cut the batch",
               params->count, params->m, params->n);
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
                                  .report = params->check_bounds,
                                  .errors = errors};
    if (tail != NULL) {
        args.tail = tail->rows;
        args.tail_weight = tail->weight;
        args.tail_x = tail->x;
        for (int i = 0; i < 2; i++) {
            args.tail_weight_pitch[i] = tail->weight_pitch[i];
            args.tail_x_pitch[i] = tail->x_pitch[i];
        }
    }
    RF_CHECK(rf__jit_kernel(device, &source, &variant, sizeof variant, describe, &kernel));
    const rf__launch_config launch = {
        .function = kernel->function, .grid = {(uint32_t)blocks}, .block = {BLOCK}, .stream = stream};
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(rf__launch(device, &launch, &args));
}

rf_status rf__ikbo_linear_check(const void *weight, int64_t m, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    return rf__cuda_check_word(device, rf__ikbo_linear_error_word(device, weight, m), stream->stream);
}

rf_status rf__ikbo_add_launch(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                              const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__check_ikbo_add(params));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    if (params->count == 0 || params->m == 0 || params->n == 0) return RF_OK;
    const rf_error_word word = rf__ikbo_linear_error_word(device, params->weight, params->m).on_device;
    return launch_add(device, params, tail, word, stream->stream);
}

rf_status rf_ikbo_add_cuda(const rf_ikbo_add_params *params, const rf_cuda_stream *stream) {
    RF_CHECK(rf__check_ikbo_add(params));
    RF_CHECK(rf__ikbo_linear_check(params->weight, params->m, stream));
    return rf__ikbo_add_launch(params, NULL, stream);
}
