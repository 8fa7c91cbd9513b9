/* Path "small" of ikbo_linear: a launch of small.cu for each level. */
#include <stdio.h>

#include "base/validate.h"
#include "cuda/ikbo_linear/args.h"
#include "cuda/ikbo_linear/ikbo_linear.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source source = {"ikbo_linear/small.cu", "rf_ikbo_small"};

enum { WORKSPACE_GRAIN = 256 };

/* All of it int32_t: compared bytewise. */
typedef struct small_variant {
    int32_t dtype, activation, index_type, rows, groups, slots, grain;
} small_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const small_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_ACTIVATION=%d -DRF_INDEX=%s -DRF_ROWS=%d -DRF_GROUPS=%d -DRF_SLOTS=%d "
             "-DRF_GRAIN=%d",
             (int)variant->dtype, (int)variant->activation, rf__kernel_integer(variant->index_type),
             (int)variant->rows, (int)variant->groups, (int)variant->slots, (int)variant->grain);
    options->dynamic_shared = RF_SMALL_SHARED_BYTES(variant->rows, variant->groups, variant->slots);
    return RF_OK;
}

int32_t rf__ikbo_small_grain(const rf_ikbo_linear_params *params) {
    const uint64_t bytes = (uint64_t)rf__dtype_bytes(params->dtype);
    uint64_t all = 0;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        all |= (uint64_t)(uintptr_t)level->weight | (uint64_t)level->weight_pitch * bytes;
    }
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 0;
}

/* Bytes of the sums of a level, in whole tiles. */
static int64_t sums_bytes(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t l) {
    const int64_t tiles = params->levels[l].count * rf__ikbo_strips(params) * shape->ranks;
    return rf__round_up(tiles * RF_FUSED_SUMS_BYTES(shape->rows), WORKSPACE_GRAIN);
}

/* `base`: the sums of the level before; `sums`: where this one's go, NULL at the last level. */
static rf_status args_of(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                         const rf__ikbo_shape *shape, int32_t l, const void *base, void *sums,
                         rf_small_args *args) {
    const rf_ikbo_level *level = &params->levels[l];
    const int64_t x_sizes[2] = {level->count, level->k}, out_sizes[2] = {level->count, params->m};
    const int64_t out_pitches[2] = {params->m * params->n, params->n};
    const bool last = sums == NULL;
    args->weight = level->weight;
    args->weight_pitch = level->weight_pitch * rf__dtype_bytes(params->dtype);
    args->parent = level->parent;
    args->base = base;
    args->sums = sums;
    args->bias = last ? params->bias : NULL;
    args->count = (int32_t)level->count;
    args->parents = l > 0 ? (int32_t)params->levels[l - 1].count : 0;
    args->m = (int32_t)params->m;
    args->k = (int32_t)level->k;
    args->slots = rf__ikbo_slots(level);
    args->strips = (int32_t)rf__ikbo_strips(params);
    args->ranks = shape->ranks;
    args->last = last;
    args->map = params->chain ? l - 1 : -1;
    args->report = params->check_bounds;
    args->errors = rf__ikbo_linear_error_word(device, rf__ikbo_weight_of(params), params->m).on_device;
    RF_CHECK(rf__ikbo_map_of(device, params, level->x, x_sizes, level->x_pitch, RF_FUSED_K, &args->x));
    return last
               ? rf__ikbo_map_of(device, params, params->out, out_sizes, out_pitches, shape->rows, &args->out)
               : RF_OK;
}

static rf_status launch_level(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                              const rf__ikbo_shape *shape, int32_t l, const void *base, void *sums,
                              void *stream) {
    const small_variant variant = {(int32_t)params->dtype,
                                   (int32_t)params->activation,
                                   (int32_t)params->levels[1].parent_type,
                                   shape->rows,
                                   shape->groups,
                                   shape->slots,
                                   rf__ikbo_small_grain(params)};
    const int64_t blocks = rf__ikbo_pieces(params, shape, l);
    const rf__kernel *kernel = NULL;
    rf_small_args args = {0};
    RF_FAIL_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_linear: path \"small\" would need more than 2^31 - 1 blocks; use path \"auto\"");
    RF_CHECK(rf__jit_kernel(device, &source, &variant, sizeof variant, describe, &kernel));
    RF_CHECK(args_of(device, params, shape, l, base, sums, &args));
    const rf__launch_config launch = {.function = kernel->function,
                                      .grid = {(uint32_t)blocks},
                                      .block = {(uint32_t)(shape->groups + 1) * 128},
                                      .shared_bytes = (uint32_t)kernel->dynamic_shared,
                                      .programmatic = l > 0,
                                      .stream = stream};
    return rf__launch(device, &launch, &args);
}

rf_status rf__ikbo_small_run(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                             const rf__ikbo_shape *shape, const rf_cuda_stream *stream) {
    const rf_cuda_allocator *allocator = params->allocator;
    const int32_t last = params->n_levels - 1;
    int64_t bytes = 0;
    void *workspace = NULL, *block = NULL;
    const void *base = NULL;
    rf_status status = RF_OK;
    for (int32_t l = 0; l < last; l++) bytes += sums_bytes(params, shape, l);
    RF_CHECK(allocator->allocate(allocator->context, bytes, false, stream, &workspace, &block));
    RF_TRY(rf__cuda_enter(device)); /* also for the tensor maps: a thread may have no context yet */
    uint8_t *sums = workspace;
    for (int32_t l = 0; l <= last && status == RF_OK; l++) {
        status = launch_level(device, params, shape, l, base, l < last ? sums : NULL, stream->stream);
        base = sums;
        if (l < last) sums += sums_bytes(params, shape, l);
    }
    rf__cuda_leave();
out:
    allocator->release(allocator->context, block);
    return status;
}
