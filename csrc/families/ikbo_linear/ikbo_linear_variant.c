/* The variant of a layer's kernels, their workspace and their arguments. */
#include "core/validate.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"

enum { WORKSPACE_GRAIN = 256 };

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

int64_t rf__ikbo_sums_bytes(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant) {
    return rf__ikbo_strips(params) * variant->ranks * (int64_t)RF_FUSED_SUMS_BYTES(variant->rows);
}

int64_t rf__ikbo_packed_bytes(const rf_ikbo_level *level, const rf__ikbo_variant *variant) {
    return rf__ikbo_slots(level) * variant->ranks * (int64_t)RF_FUSED_WEIGHT_BYTES(variant->rows);
}

bool rf__ikbo_has_sums(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant, int32_t l) {
    return l < params->n_levels - 1 && !variant->joined;
}

int64_t rf__ikbo_workspace_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                              rf__ikbo_workspace *levels) {
    int64_t bytes = 0;
    for (int32_t l = params->n_levels - 1; l >= 0 && !variant->direct;
         l--) { /* joined levels in this order */
        levels[l].weight = bytes;
        bytes += rf__ikbo_packed_bytes(&params->levels[l], variant);
    }
    bytes = rf__round_up(bytes, WORKSPACE_GRAIN);
    for (int32_t l = 0; l < params->n_levels; l++) {
        if (!rf__ikbo_has_sums(params, variant, l)) continue;
        const int64_t items =
            params->levels[l].count + rf__ikbo_is_fused(variant); /* and the bias-only item */
        levels[l].done = bytes;
        levels[l].sums = bytes + WORKSPACE_GRAIN;
        bytes = levels[l].sums + items * rf__ikbo_sums_bytes(params, variant);
    }
    return bytes;
}

/* A pointer that is bound to the workspace later. */
static void *in_workspace(int64_t at) { return (void *)(uintptr_t)at; }

/* Of one level: its weight, its sums and their counter. */
static rf_pack_level pack_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant, int32_t l,
                             const rf__ikbo_workspace *workspace, rf_fused_level *fused) {
    const rf_ikbo_level *level = &params->levels[l];
    rf_pack_level pack = {.weight = level->weight, .pitch = level->weight_pitch, .k = (int32_t)level->k};
    if (!variant->direct) {
        fused->weight = pack.packed = in_workspace(workspace->weight);
        pack.slots = rf__ikbo_slots(level);
    }
    if (rf__ikbo_has_sums(params, variant, l)) {
        fused->done = pack.done = in_workspace(workspace->done);
        fused->sums = in_workspace(workspace->sums);
        if (rf__ikbo_is_fused(variant))
            pack.bias = in_workspace(workspace->sums + level->count * rf__ikbo_sums_bytes(params, variant));
    }
    return pack;
}

void rf__ikbo_args_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                      const rf__ikbo_workspace *workspace, rf_fused_args *fused, rf_pack_args *pack) {
    fused->n_levels = pack->n_levels = params->n_levels;
    fused->ranks = pack->ranks = variant->ranks;
    fused->strips = pack->strips = (int32_t)rf__ikbo_strips(params);
    fused->chain = params->chain;
    fused->report = params->check_bounds;
    fused->bias = pack->bias = params->bias;
    fused->m = pack->m = (int32_t)params->m;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        rf_fused_level *to = &fused->levels[l];
        pack->levels[l] = pack_of(params, variant, l, &workspace[l], to);
        to->parent = level->parent;
        to->count = (int32_t)level->count;
        to->slots = rf__ikbo_slots(level);
        to->cost = (int32_t)((level->k + 15) / 16);
    }
}
