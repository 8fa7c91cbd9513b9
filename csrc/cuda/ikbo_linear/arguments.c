/* Which variant of a kernel a call has, its workspace, and what the kernels are launched with. */
#include "base/validate.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/ikbo_linear/args.h"
#include "cuda/ikbo_linear/ikbo_linear.h"

enum { GRAIN = 16, WORKSPACE_GRAIN = 256 };

bool rf__ikbo_is_direct(const rf_ikbo_linear_params *params) {
    const int64_t bytes = rf__dtype_bytes(params->dtype), most_pitch = (int64_t)1 << 40;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        const int64_t pitch = level->weight_pitch * bytes;
        if ((uintptr_t)level->weight % GRAIN != 0) return false;
        if (params->m > 1 && (level->weight_pitch < level->k || pitch % GRAIN != 0 || pitch >= most_pitch))
            return false;
    }
    return true;
}

rf__ikbo_variant rf__ikbo_variant_of(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape) {
    return (rf__ikbo_variant){.dtype = (int32_t)params->dtype,
                              .activation = (int32_t)params->activation,
                              .index_type = (int32_t)params->levels[1].parent_type,
                              .rows = shape->rows,
                              .ranks = shape->ranks,
                              .slots = shape->slots,
                              .groups = shape->groups,
                              .joined = shape->joined,
                              .direct = shape->direct && rf__ikbo_is_direct(params)};
}

/* Bytes of an item's sums. */
static int64_t sums_bytes(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant) {
    return rf__ikbo_strips(params) * variant->ranks * (int64_t)RF_FUSED_SUMS_BYTES(variant->rows);
}

/* Packed weights, then what levels with children have: a counter with lines of its own, and sums; for fused.cu with those of an item
 * that is nobody's. */
int64_t rf__ikbo_places_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                           rf__ikbo_places *places) {
    int64_t bytes = 0;
    for (int32_t l = params->n_levels - 1; l >= 0 && !variant->direct; l--) { /* joined ones in this order */
        places[l].weight = bytes;
        bytes += rf__ikbo_slots(&params->levels[l]) * variant->ranks *
                 (int64_t)RF_FUSED_WEIGHT_BYTES(variant->rows);
    }
    bytes = rf__round_up(bytes, WORKSPACE_GRAIN);
    for (int32_t l = 0; l < params->n_levels - 1 && !variant->joined; l++) {
        places[l].done = bytes;
        places[l].sums = bytes + WORKSPACE_GRAIN;
        bytes =
            places[l].sums + (params->levels[l].count + (variant->groups == 0)) * sums_bytes(params, variant);
    }
    return bytes;
}

/* Of an input or the output: rows of n. */
static rf_status map_of(const rf__cuda_device *device, const rf_ikbo_linear_params *params, const void *data,
                        const int64_t *sizes, const int64_t *pitches, int32_t box_rows, rf_tensor_map *map) {
    const int64_t bytes = rf__dtype_bytes(params->dtype);
    rf__tensor_map_params tensor = {.data = data,
                                    .dtype = params->dtype,
                                    .dimensions = 3,
                                    .sizes = {params->n, sizes[1], sizes[0]},
                                    .pitches = {0, pitches[1] * bytes, pitches[0] * bytes},
                                    .box = {RF_FUSED_COLUMNS, box_rows, 1},
                                    .swizzle = RF_FUSED_COLUMNS * 2};
    for (int i = 1; i < 3; i++) /* of one alone, what is not used may be anything */
        if (tensor.sizes[i] == 1) tensor.pitches[i] = rf__round_up(params->n * bytes, GRAIN);
    return rf__tensor_map_encode(device->driver, &tensor, map);
}

/* Of a weight as it lies. */
static rf_status weight_map_of(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                               const rf_ikbo_level *level, int32_t box_rows, rf_tensor_map *map) {
    const int64_t bytes = rf__dtype_bytes(params->dtype);
    const int64_t pitch = params->m > 1 ? level->weight_pitch * bytes : rf__round_up(level->k * bytes, GRAIN);
    const rf__tensor_map_params tensor = {.data = level->weight,
                                          .dtype = params->dtype,
                                          .dimensions = 3,
                                          .sizes = {level->k, params->m, 1},
                                          .pitches = {0, pitch, pitch},
                                          .box = {RF_FUSED_K, box_rows, 1},
                                          .swizzle = RF_FUSED_K * 2};
    return rf__tensor_map_encode(device->driver, &tensor, map);
}

/* Of a level: its weight, its sums and their counter. */
static rf_pack_level pack_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant, int32_t l,
                             uint8_t *workspace, const rf__ikbo_places *places, rf_fused_level *fused) {
    const rf_ikbo_level *level = &params->levels[l];
    rf_pack_level pack = {.weight = level->weight, .pitch = level->weight_pitch, .k = (int32_t)level->k};
    if (!variant->direct) {
        fused->weight = pack.packed = workspace + places->weight;
        pack.slots = rf__ikbo_slots(level);
    }
    if (l < params->n_levels - 1 && !variant->joined) {
        fused->done = pack.done = (uint32_t *)(void *)(workspace + places->done);
        fused->sums = (float *)(void *)(workspace + places->sums);
        if (variant->groups == 0)
            pack.bias = fused->sums + level->count * sums_bytes(params, variant) / (int64_t)sizeof(float);
    }
    return pack;
}

rf_status rf__ikbo_args_of(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                           const rf__ikbo_variant *variant, uint8_t *workspace, const rf__ikbo_places *places,
                           rf_fused_args *fused, rf_pack_args *pack) {
    const rf_ikbo_level *last = &params->levels[params->n_levels - 1];
    const bool small = variant->groups > 0;
    fused->n_levels = pack->n_levels = params->n_levels;
    fused->ranks = pack->ranks = variant->ranks;
    fused->strips = pack->strips = (int32_t)rf__ikbo_strips(params);
    fused->chain = params->chain;
    fused->report = params->check_bounds;
    fused->errors = rf__ikbo_linear_error_word(device, rf__ikbo_weight_of(params), params->m).on_device;
    fused->bias = pack->bias = params->bias;
    fused->m = pack->m = (int32_t)params->m;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        rf_fused_level *to = &fused->levels[l];
        pack->levels[l] = pack_of(params, variant, l, workspace, &places[l], to);
        to->parent = level->parent;
        to->count = (int32_t)level->count;
        to->slots = rf__ikbo_slots(level);
        to->cost = (int32_t)((level->k + 15) / 16);
        const int64_t sizes[2] = {level->count, level->k};
        RF_CHECK(map_of(device, params, level->x, sizes, level->x_pitch,
                        small ? RF_FUSED_K : RF_FUSED_K / variant->ranks, &to->x));
        if (variant->direct) RF_CHECK(weight_map_of(device, params, level, variant->rows, &to->rows));
    }
    const int64_t sizes[2] = {last->count, params->m}, pitches[2] = {params->m * params->n, params->n};
    return map_of(device, params, params->out, sizes, pitches, small ? variant->rows : RF_FUSED_PART,
                  &fused->out);
}
