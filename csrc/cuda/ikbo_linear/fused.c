/* rf_ikbo_linear_cuda: one launch of fused.cu, or of small.cu, behind one of pack.cu. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/validate.h"
#include "cuda/ikbo_linear/args.h"
#include "cuda/ikbo_linear/ikbo_linear.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source fused_source = {"ikbo_linear/fused.cu", "rf_ikbo_linear"};
static const rf__kernel_source small_source = {"ikbo_linear/small.cu", "rf_ikbo_small"};
static const rf__kernel_source pack_source = {"ikbo_linear/pack.cu", "rf_ikbo_pack"};

enum { BLOCK = 256, GRAIN = 16, MOST_RANKS = RF__IKBO_MOST_RANKS };
/* Beyond these pack.cu's numbers of pieces and of floats would not fit 31 bits. */
enum { MOST_K = 1 << 24, MOST_N = 1 << 20 };

_Static_assert((int)RF_FUSED_MOST_LEVELS == (int)RF_IKBO_MOST_LEVELS, "the levels of a call");

typedef struct pack_variant {
    int32_t dtype, rows;
} pack_variant;

static rf_status fused_describe(const void *key, rf__kernel_options *options) {
    const rf__ikbo_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_ACTIVATION=%d -DRF_INDEX=%s -DRF_ROWS=%d -DRF_RANKS=%d -DRF_SLOTS=%d "
             "-DRF_GROUPS=%d -DRF_JOINED=%d -DRF_DIRECT=%d",
             (int)variant->dtype, (int)variant->activation, rf__kernel_integer(variant->index_type),
             (int)variant->rows, (int)variant->ranks, (int)variant->slots, (int)variant->groups,
             (int)variant->joined, (int)variant->direct);
    options->dynamic_shared = variant->groups > 0
                                  ? RF_SMALL_SHARED_BYTES(variant->rows, variant->groups, variant->slots)
                                  : RF_FUSED_SHARED_BYTES(variant->rows, variant->slots, variant->joined);
    return RF_OK;
}

static rf_status pack_describe(const void *key, rf__kernel_options *options) {
    const pack_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_DTYPE=%d -DRF_ROWS=%d -DRF_BLOCK=%d",
             (int)variant->dtype, (int)variant->rows, (int)BLOCK);
    return RF_OK;
}

/* NULL, or what keeps the kernel from taking a level. */
static const char *level_refusal(const rf_ikbo_linear_params *params, const rf_ikbo_level *level) {
    const int64_t bytes = rf__dtype_bytes(params->dtype), most_pitch = (int64_t)1 << 40;
    if (level->count < 1 || level->k < 1) return "an input has no items or no rows";
    if (level->k > MOST_K) return "an input has items of more than 2^24 rows";
    if (level->count >= INT32_MAX / MOST_RANKS / rf__ikbo_strips(params))
        return "an input has more items than 2^30 strips of 64 columns";
    if ((uintptr_t)level->x % GRAIN != 0) return "an input is not aligned to 16 bytes";
    for (int i = 0; i < 2; i++) {
        const int64_t size = i == 0 ? level->count : level->k, pitch = level->x_pitch[i] * bytes;
        if (size > 1 && (pitch <= 0 || pitch % GRAIN != 0 || pitch >= most_pitch))
            return "an input has rows or items that are not a positive multiple of 16 bytes apart";
    }
    return NULL;
}

/* NULL, with the shape that takes the call; or what keeps the kernel from it. */
static const char *refusal(const rf_ikbo_linear_params *params, const rf__cuda_device *device,
                           rf__ikbo_shape *shape) {
    if (device->gpu.cc_major != 9 || device->gpu.cc_minor != 0)
        return "the GPU is not one of compute capability 9.0";
    if (params->dtype != RF_FLOAT16 && params->dtype != RF_BFLOAT16)
        return "the dtype is neither float16 nor bfloat16";
    if (params->m < 1 || params->m > RF__IKBO_SMALL_MOST_ROWS) return "out has no rows or more than 4096";
    if (params->n < 1 || params->n * rf__dtype_bytes(params->dtype) % GRAIN != 0)
        return "out has no columns or a number of them that is no multiple of 8";
    if (params->n > MOST_N) return "out has more than 2^20 columns";
    if ((uintptr_t)params->out % GRAIN != 0) return "out is not aligned to 16 bytes";
    for (int32_t l = 0; l < params->n_levels; l++) {
        const char *reason = level_refusal(params, &params->levels[l]);
        if (reason != NULL) return reason;
        if (l > 1 && params->levels[l].parent_type != params->levels[1].parent_type)
            return "the maps are not all of one type";
    }
    *shape = rf__ikbo_shape_of(params, device, params->kernel);
    if (shape->groups == 0 && params->m > MOST_RANKS * RF_FUSED_MOST_ROWS)
        return "out has more than 448 rows";
    return shape->slots < 2 ? "a block has too little shared memory" : NULL;
}

/* Sums are in float32, and in whole strips and rows of blocks: of small items much more than the products in `dtype`. */
static bool is_thrifty(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape) {
    enum { MOST_TIMES = 8 };
    rf__ikbo_variant variant = rf__ikbo_variant_of(params, shape);
    rf__ikbo_places places[RF_IKBO_MOST_LEVELS] = {{0, 0, 0}};
    int64_t products = 0;
    variant.joined = false; /* has no sums, but such items are mostly padding there too */
    for (int32_t l = 0; l < params->n_levels - 1; l++)
        products += params->levels[l].count * params->m * params->n * rf__dtype_bytes(params->dtype);
    const int64_t bytes = rf__ikbo_places_of(params, &variant, places);
    return bytes <= (int64_t)1 << 30 || bytes <= MOST_TIMES * products;
}

bool rf__ikbo_linear_shape(const rf_ikbo_linear_params *params, int32_t ordinal, rf__ikbo_shape *shape) {
    const rf__cuda_device *device = NULL;
    return rf__check_ikbo_linear(params) == RF_OK && rf__cuda_device_get(ordinal, &device) == RF_OK &&
           refusal(params, device, shape) == NULL && is_thrifty(params, shape);
}

bool rf_ikbo_linear_takes(const rf_ikbo_linear_params *params, int32_t ordinal) {
    rf__ikbo_shape shape;
    return rf__ikbo_linear_shape(params, ordinal, &shape);
}

rf_ikbo_kernel rf_ikbo_linear_kernel(const rf_ikbo_linear_params *params, int32_t ordinal) {
    const rf__cuda_device *device = NULL;
    if (params->kernel != RF_IKBO_KERNEL_BEST) return params->kernel;
    return rf__cuda_device_get(ordinal, &device) == RF_OK &&
                   rf__ikbo_shape_of(params, device, params->kernel).groups > 0
               ? RF_IKBO_KERNEL_SMALL
               : RF_IKBO_KERNEL_FUSED;
}

/* Clusters of a kernel that run at once: all SMs, but where those of a GPC are not a whole number of clusters. */
static rf_status clusters_at_once(const rf__cuda_device *device, const rf__ikbo_variant *variant,
                                  const rf__kernel *kernel, int32_t *clusters) {
    static _Atomic int32_t known[RF__CUDA_MOST_DEVICES]; /* of clusters of two; 0: not asked yet */
    *clusters = device->gpu.sms;
    if (variant->ranks == 1) return RF_OK;
    *clusters = atomic_load_explicit(&known[device->ordinal], memory_order_relaxed);
    if (*clusters > 0) return RF_OK;
    const rf__launch_config config = {.function = kernel->function,
                                      .grid = {(uint32_t)device->gpu.sms / MOST_RANKS * MOST_RANKS},
                                      .block = {RF_FUSED_THREADS},
                                      .cluster = {MOST_RANKS},
                                      .shared_bytes = (uint32_t)kernel->dynamic_shared};
    RF_CHECK(rf__launch_clusters(device, &config, clusters));
    RF_FAIL_IF(*clusters < 1, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_linear: this GPU runs no cluster of two blocks; use path "
               "\"broadcast\"");
    atomic_store_explicit(&known[device->ordinal], *clusters, memory_order_relaxed);
    return RF_OK;
}

static rf_status launch_pack(const rf__cuda_device *device, const rf__ikbo_variant *variant,
                             const rf_pack_args *args, void *stream) {
    const pack_variant key = {variant->dtype, variant->rows};
    const rf__kernel *kernel = NULL;
    int64_t most = 1;
    RF_CHECK(rf__jit_kernel(device, &pack_source, &key, sizeof key, pack_describe, &kernel));
    for (int32_t l = 0; l < args->n_levels; l++) {
        const int64_t pieces = args->levels[l].slots * (int64_t)(RF_FUSED_K / 8);
        const int64_t floats = args->levels[l].bias != NULL ? (int64_t)args->strips * RF_FUSED_COLUMNS : 0;
        if (pieces > most) most = pieces;
        if (floats > most) most = floats;
    }
    most *= variant->rows * variant->ranks;
    const rf__launch_config launch = {
        .function = kernel->function,
        .grid = {(uint32_t)((most + BLOCK - 1) / BLOCK), (uint32_t)args->n_levels},
        .block = {BLOCK},
        .stream = stream};
    return rf__launch(device, &launch, args);
}

/* `packed`: behind pack.cu, beside which joined levels begin. */
static rf_status launch_fused(const rf__cuda_device *device, const rf__ikbo_variant *variant,
                              const rf__kernel *kernel, bool packed, const rf_fused_args *args,
                              void *stream) {
    int64_t strips = 0;
    int32_t clusters = 0;
    RF_CHECK(clusters_at_once(device, variant, kernel, &clusters));
    for (int32_t l = variant->joined; l < args->n_levels; l++)
        strips += (int64_t)args->levels[l].count * args->strips;
    if (clusters > strips) clusters = (int32_t)strips;
    rf__launch_config launch = {.function = kernel->function,
                                .grid = {(uint32_t)(clusters * variant->ranks)},
                                .block = {RF_FUSED_THREADS},
                                .shared_bytes = (uint32_t)kernel->dynamic_shared,
                                .cooperative = !variant->joined,
                                .programmatic = variant->joined && packed,
                                .stream = stream};
    if (variant->ranks > 1) launch.cluster[0] = (uint32_t)variant->ranks;
    return rf__launch(device, &launch, args);
}

/* Small pieces, as many blocks as there are; begun beside pack.cu. All at once where they may be, which takes no ticket; the
 * stream may have fewer SMs than the device, which the driver knows. */
static rf_status launch_small(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                              const rf__ikbo_shape *shape, const rf__kernel *kernel, bool packed,
                              rf_fused_args *args, void *stream) {
    int64_t pieces = 0;
    for (int32_t l = shape->joined; l < args->n_levels; l++) pieces += rf__ikbo_pieces(params, shape, l);
    RF_FAIL_IF(pieces > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_linear: path \"small\" would need more than 2^31 - 1 blocks; use path \"auto\"");
    rf__launch_config launch = {.function = kernel->function,
                                .grid = {(uint32_t)pieces},
                                .block = {(uint32_t)(shape->groups + 1) * 128},
                                .shared_bytes = (uint32_t)kernel->dynamic_shared,
                                .cooperative = !shape->joined && pieces <= device->gpu.sms,
                                .programmatic = packed,
                                .stream = stream};
    if (launch.cooperative && rf__launch(device, &launch, args) == RF_OK) return RF_OK;
    launch.cooperative = false;
    args->tickets = !shape->joined;
    return rf__launch(device, &launch, args);
}

static rf_status run(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                     const rf__ikbo_shape *shape, const rf_cuda_stream *stream) {
    const rf__ikbo_variant variant = rf__ikbo_variant_of(params, shape);
    const rf_cuda_allocator *allocator = params->allocator;
    const rf__kernel *kernel = NULL;
    rf__ikbo_places places[RF_IKBO_MOST_LEVELS] = {{0, 0, 0}};
    rf_fused_args fused = {0};
    rf_pack_args pack = {0};
    void *workspace = NULL, *block = NULL;
    rf_status status = RF_OK;
    const bool small = variant.groups > 0;
    rf__ikbo_variant key = variant;
    if (small) key.ranks = 0; /* for any number */
    RF_CHECK(rf__jit_kernel(device, small ? &small_source : &fused_source, &key, sizeof key, fused_describe,
                            &kernel));
    const int64_t bytes = rf__ikbo_places_of(params, &variant, places);
    const bool packs = !variant.direct || !variant.joined;
    if (bytes > 0)
        RF_CHECK(allocator->allocate(allocator->context, bytes, false, stream, &workspace, &block));
    RF_TRY(rf__cuda_enter(device)); /* also for the tensor maps: a thread may have no context yet */
    status = rf__ikbo_args_of(device, params, &variant, workspace, places, &fused, &pack);
    if (status == RF_OK && packs) status = launch_pack(device, &variant, &pack, stream->stream);
    if (status == RF_OK)
        status = small ? launch_small(device, params, shape, kernel, packs, &fused, stream->stream)
                       : launch_fused(device, &variant, kernel, packs, &fused, stream->stream);
    rf__cuda_leave();
out:
    if (bytes > 0) allocator->release(allocator->context, block);
    return status;
}

rf_status rf__ikbo_linear_run(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape,
                              const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__ikbo_linear_check(rf__ikbo_weight_of(params), params->m, stream));
    return run(device, params, shape, stream);
}

rf_status rf_ikbo_linear_cuda(const rf_ikbo_linear_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__ikbo_shape shape;
    RF_CHECK(rf__check_ikbo_linear(params));
    const bool any = params->m > 0 && params->n > 0 && params->levels[params->n_levels - 1].count > 0;
    RF_FAIL_IF(params->allocator == NULL || (params->out == NULL && any), RF_ERR_VALUE,
               "recfuse.ikbo_linear: %s is NULL", params->allocator == NULL ? "allocator" : "out");
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    const char *reason = refusal(params, device, &shape);
    RF_FAIL_IF(
        reason != NULL, RF_ERR_UNSUPPORTED,
        "recfuse.ikbo_linear: path \"%s\" does not take this call: %s; use path \"auto\" or \"broadcast\"",
        params->kernel == RF_IKBO_KERNEL_SMALL ? "small" : "fused", reason);
    return rf__ikbo_linear_run(params, &shape, stream);
}
