/* rf_ikbo_linear_cuda: the calls that the kernels of a whole layer accept, and running them. */
#include <inttypes.h>

#include "families/ikbo_linear/check_ikbo_linear.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"

enum { GRAIN = 16, MOST_RANKS = RF__IKBO_MOST_RANKS };
/* Beyond these pack.cu's numbers of chunks and of floats would not fit 31 bits. */
enum { MOST_K = 1 << 24, MOST_N = 1 << 20 };

/* Returns the reason why the kernels refuse a level, or NULL. */
static const char *level_refusal(const rf_ikbo_linear_params *params, const rf_ikbo_level *level) {
    const int64_t most_pitch = (int64_t)1 << 40;
    if (level->count < 1 || level->k < 1) return "an input has no items or no rows";
    if (level->k > MOST_K) return "an input has items of more than 2^24 rows";
    if (level->count >= INT32_MAX / MOST_RANKS / rf__ikbo_strips(params))
        return "an input has more items than 2^30 strips of 64 columns";
    if ((uintptr_t)level->x % GRAIN != 0) return "an input is not aligned to 16 bytes";
    for (int i = 0; i < 2; i++) {
        const int64_t size = i == 0 ? level->count : level->k;
        const int64_t pitch = rf__elements_bytes(params->dtype, level->x_pitch[i]);
        if (size > 1 && (pitch <= 0 || pitch % GRAIN != 0 || pitch >= most_pitch))
            return "an input has rows or items that are not a positive multiple of 16 bytes apart";
    }
    return NULL;
}

/* Returns the reason why the kernels refuse the call; or NULL, and the shape. */
static const char *refusal(const rf__gpu *gpu, const rf_ikbo_linear_params *params, rf__ikbo_shape *shape) {
    if (gpu->cc_major != 9 || gpu->cc_minor != 0) return "the GPU is not one of compute capability 9.0";
    if (params->dtype != RF_FLOAT16 && params->dtype != RF_BFLOAT16)
        return "the dtype is neither float16 nor bfloat16";
    if (params->m < 1 || params->m > RF__IKBO_SMALL_MOST_ROWS) return "out has no rows or more than 4096";
    if (params->n < 1 || rf__elements_bytes(params->dtype, params->n) % GRAIN != 0)
        return "out has no columns or a number of them that is no multiple of 8";
    if (params->n > MOST_N) return "out has more than 2^20 columns";
    if ((uintptr_t)params->out % GRAIN != 0) return "out is not aligned to 16 bytes";
    for (int32_t l = 0; l < params->n_levels; l++) {
        const char *reason = level_refusal(params, &params->levels[l]);
        if (reason != NULL) return reason;
        if (l > 1 && params->levels[l].parent_type != params->levels[1].parent_type)
            return "the maps are not all of one type";
    }
    *shape = rf__ikbo_shape_of(params, gpu, params->kernel);
    if (shape->groups == 0 && params->m > MOST_RANKS * RF_FUSED_MOST_ROWS)
        return "out has more than 448 rows";
    return shape->slots < 2 ? "a block has too little shared memory" : NULL;
}

/* Sums are in float32, and in whole strips and rows of blocks: for small items far more than the products in
 * `dtype`. */
static bool is_workspace_small(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape) {
    enum { MOST_TIMES = 8 };
    rf__ikbo_variant variant = rf__ikbo_variant_of(params, shape);
    rf__ikbo_workspace levels[RF_IKBO_MOST_LEVELS] = {{0, 0, 0}};
    int64_t products = 0;
    variant.joined = false; /* has no sums, but such items are mostly padding there too */
    for (int32_t l = 0; l < params->n_levels - 1; l++)
        products += rf__elements_bytes(params->dtype, params->levels[l].count * params->m * params->n);
    const int64_t bytes = rf__ikbo_workspace_of(params, &variant, levels);
    return bytes <= (int64_t)1 << 30 || bytes <= MOST_TIMES * products;
}

bool rf__ikbo_linear_shape(const rf_ikbo_linear_params *params, int32_t ordinal, rf__ikbo_shape *shape) {
    const rf__cuda_device *device = NULL;
    return rf__check_ikbo_linear(params) == RF_OK && rf__cuda_device_get(ordinal, &device) == RF_OK &&
           refusal(&device->gpu, params, shape) == NULL && is_workspace_small(params, shape);
}

bool rf_ikbo_linear_takes(const rf_ikbo_linear_params *params, int32_t ordinal) {
    rf__ikbo_shape shape;
    return rf__ikbo_linear_shape(params, ordinal, &shape);
}

rf_ikbo_kernel rf_ikbo_linear_kernel(const rf_ikbo_linear_params *params, int32_t ordinal) {
    const rf__cuda_device *device = NULL;
    if (params->kernel != RF_IKBO_KERNEL_BEST) return params->kernel;
    return rf__cuda_device_get(ordinal, &device) == RF_OK &&
                   rf__ikbo_shape_of(params, &device->gpu, params->kernel).groups > 0
               ? RF_IKBO_KERNEL_SMALL
               : RF_IKBO_KERNEL_FUSED;
}

rf_status rf__ikbo_linear_run(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape,
                              const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, "ikbo_linear");
    launches.checks = true;
    return rf__launches_finish(rf__ikbo_linear_lower(&device->gpu, params, shape, &launches), device,
                               &launches, params->allocator, stream->stream);
}

rf_status rf_ikbo_linear_cuda(const rf_ikbo_linear_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__ikbo_shape shape;
    RF_CHECK(rf__check_ikbo_linear(params));
    const bool any = params->m > 0 && params->n > 0 && params->levels[params->n_levels - 1].count > 0;
    RF_FAIL_IF(params->allocator == NULL || (params->out == NULL && any), RF_ERR_VALUE,
               "recfuse.ikbo_linear: %s is NULL", params->allocator == NULL ? "allocator" : "out");
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    const char *reason = refusal(&device->gpu, params, &shape);
    RF_FAIL_IF(
        reason != NULL, RF_ERR_UNSUPPORTED,
        "recfuse.ikbo_linear: path \"%s\" does not take this call: %s. Use path \"auto\" or \"broadcast\".",
        params->kernel == RF_IKBO_KERNEL_SMALL ? "small" : "fused", reason);
    return rf__ikbo_linear_run(params, &shape, stream);
}
