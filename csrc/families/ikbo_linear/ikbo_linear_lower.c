/* A whole layer lowered: pack.cu if there is data to pack or to reset, then ikbo_linear_fused.cu or
 * small.cu. */
#include <stddef.h>
#include <stdio.h>

#include "core/validate.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"

static const rf__kernel_source fused_source = {"families/ikbo_linear/ikbo_linear_fused.cu", "rf_ikbo_linear"};
static const rf__kernel_source small_source = {"families/ikbo_linear/small.cu", "rf_ikbo_small"};
static const rf__kernel_source pack_source = {"families/ikbo_linear/pack.cu", "rf_ikbo_pack"};

enum { BLOCK = 256, GRAIN = 16 };

_Static_assert((int)RF_FUSED_MOST_LEVELS == (int)RF_IKBO_MOST_LEVELS, "the levels of a call");

typedef struct pack_variant {
    int32_t dtype, rows;
} pack_variant;

static int32_t shared_bytes(const rf__ikbo_variant *variant) {
    return rf__ikbo_is_fused(variant) ? RF_FUSED_SHARED_BYTES(variant->rows, variant->slots, variant->joined)
                                      : RF_SMALL_SHARED_BYTES(variant->rows, variant->groups, variant->slots);
}

static rf_status fused_describe(const void *key, rf__kernel_options *options) {
    const rf__ikbo_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_ACTIVATION=%d -DRF_INDEX=%s -DRF_ROWS=%d -DRF_RANKS=%d -DRF_SLOTS=%d "
             "-DRF_GROUPS=%d -DRF_JOINED=%d -DRF_DIRECT=%d",
             (int)variant->dtype, (int)variant->activation, rf__kernel_integer(variant->index_type),
             (int)variant->rows, (int)variant->ranks, (int)variant->slots, (int)variant->groups,
             (int)variant->joined, (int)variant->direct);
    options->dynamic_shared = shared_bytes(variant);
    return RF_OK;
}

static rf_status pack_describe(const void *key, rf__kernel_options *options) {
    const pack_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_DTYPE=%d -DRF_ROWS=%d -DRF_BLOCK=%d",
             (int)variant->dtype, (int)variant->rows, (int)BLOCK);
    return RF_OK;
}

/* Binds the map of an input or of the output: rows of n. */
static void map_bind(rf__launches *launches, size_t at, const rf_ikbo_linear_params *params, const void *data,
                     const int64_t *sizes, const int64_t *pitches, int32_t box_rows) {
    rf__tensor_map_params tensor = {.data = data,
                                    .dtype = params->dtype,
                                    .dimensions = 3,
                                    .sizes = {params->n, sizes[1], sizes[0]},
                                    .box = {RF_FUSED_COLUMNS, box_rows, 1},
                                    .swizzle = RF_FUSED_COLUMNS * 2};
    for (int i = 1; i < 3; i++) /* the pitch of a single element is not used, and may be anything */
        tensor.pitches[i] = tensor.sizes[i] == 1
                                ? rf__round_up(rf__elements_bytes(params->dtype, params->n), GRAIN)
                                : rf__elements_bytes(params->dtype, pitches[2 - i]);
    rf__launches_bind_map(launches, at, &tensor);
}

/* Binds the map of a weight in place. */
static void weight_map_bind(rf__launches *launches, size_t at, const rf_ikbo_linear_params *params,
                            const rf_ikbo_level *level, int32_t box_rows) {
    const rf__row_format row = rf__row_format_of(params->dtype, level->k, level->weight_pitch);
    const int64_t pitch = params->m > 1 ? row.pitch : rf__round_up(row.bytes, GRAIN);
    const rf__tensor_map_params tensor = {.data = level->weight,
                                          .dtype = params->dtype,
                                          .dimensions = 3,
                                          .sizes = {level->k, params->m, 1},
                                          .pitches = {0, pitch, pitch},
                                          .box = {RF_FUSED_K, box_rows, 1},
                                          .swizzle = RF_FUSED_K * 2};
    rf__launches_bind_map(launches, at, &tensor);
}

static void fused_bind(rf__launches *launches, const rf_ikbo_linear_params *params,
                       const rf__ikbo_variant *variant) {
    const bool is_fused = rf__ikbo_is_fused(variant);
    const int64_t count = params->levels[params->n_levels - 1].count;
    const int64_t out_sizes[2] = {count, params->m}, out_pitches[2] = {params->m * params->n, params->n};
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        const size_t at = offsetof(rf_fused_args, levels) + (size_t)l * sizeof(rf_fused_level);
        const int64_t sizes[2] = {level->count, level->k};
        map_bind(launches, at + offsetof(rf_fused_level, x), params, level->x, sizes, level->x_pitch,
                 is_fused ? RF_FUSED_K / variant->ranks : RF_FUSED_K);
        if (variant->direct)
            weight_map_bind(launches, at + offsetof(rf_fused_level, rows), params, level, variant->rows);
        else
            rf__launches_bind_workspace(launches, at + offsetof(rf_fused_level, weight));
        if (!rf__ikbo_has_sums(params, variant, l)) continue;
        rf__launches_bind_workspace(launches, at + offsetof(rf_fused_level, sums));
        rf__launches_bind_workspace(launches, at + offsetof(rf_fused_level, done));
    }
    map_bind(launches, offsetof(rf_fused_args, out), params, params->out, out_sizes, out_pitches,
             is_fused ? RF_FUSED_PART : variant->rows);
    rf__launches_bind_errors(launches, offsetof(rf_fused_args, errors));
}

static rf_status pack_lower(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                            const rf_pack_args *args, rf__launches *launches) {
    const pack_variant key = {variant->dtype, variant->rows};
    rf__kernel_launch launch = {.source = &pack_source, .describe = pack_describe, .block = {BLOCK}};
    int64_t most = 1;
    for (int32_t l = 0; l < args->n_levels; l++) {
        const rf_pack_level *level = &args->levels[l];
        const bool has_bias = rf__ikbo_has_sums(params, variant, l) && rf__ikbo_is_fused(variant);
        const int64_t chunks = level->slots * (int64_t)(RF_FUSED_K / 8);
        const int64_t floats = has_bias ? (int64_t)args->strips * RF_FUSED_COLUMNS : 0;
        if (chunks > most) most = chunks;
        if (floats > most) most = floats;
        if (!variant->direct) {
            launch.read_bytes += rf__elements_bytes(params->dtype, params->m * level->k);
            launch.written_bytes += rf__ikbo_packed_bytes(&params->levels[l], variant);
        }
        if (has_bias) launch.written_bytes += rf__ikbo_sums_bytes(params, variant);
        if (rf__ikbo_has_sums(params, variant, l)) launch.written_bytes += (int64_t)sizeof *level->done;
    }
    most *= variant->rows * variant->ranks;
    launch.grid[0] = (uint32_t)((most + BLOCK - 1) / BLOCK);
    launch.grid[1] = (uint32_t)args->n_levels;
    RF_CHECK(rf__launches_add(launches, &launch, &key, sizeof key, args, sizeof *args));
    for (int32_t l = 0; l < args->n_levels; l++) {
        const size_t at = offsetof(rf_pack_args, levels) + (size_t)l * sizeof(rf_pack_level);
        if (!variant->direct) rf__launches_bind_workspace(launches, at + offsetof(rf_pack_level, packed));
        if (!rf__ikbo_has_sums(params, variant, l)) continue;
        rf__launches_bind_workspace(launches, at + offsetof(rf_pack_level, done));
        if (rf__ikbo_is_fused(variant))
            rf__launches_bind_workspace(launches, at + offsetof(rf_pack_level, bias));
    }
    return RF_OK;
}

/* Bytes and operations of ikbo_linear_fused.cu and small.cu. With joined levels each candidate multiplies its
 * user's rows again; otherwise sums go through memory once. */
static void traffic_count(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                          rf__kernel_launch *launch) {
    const int64_t m = params->m, n = params->n;
    int64_t read = params->bias != NULL ? m : 0; /* elements */
    const int64_t items = params->levels[params->n_levels - 1].count;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        const int64_t sums =
            rf__ikbo_has_sums(params, variant, l) ? level->count * rf__ikbo_sums_bytes(params, variant) : 0;
        const int64_t products = variant->joined ? items : level->count;
        launch->read_bytes += variant->direct ? 0 : rf__ikbo_packed_bytes(level, variant);
        launch->read_bytes += sums;
        read += (variant->direct ? m * level->k : 0) + level->count * level->k * n;
        if (l > 0) launch->read_bytes += level->count * (level->parent_type == RF_INT64 ? 8 : 4);
        launch->written_bytes += sums;
        launch->tensor_flops += 2.0 * (double)m * (double)n * (double)level->k * (double)products;
        if (l > 0 && !variant->joined) launch->flops += (double)m * (double)n * (double)level->count;
    }
    launch->read_bytes += rf__elements_bytes(params->dtype, read);
    launch->written_bytes += rf__elements_bytes(params->dtype, items * m * n);
    if (params->bias != NULL) launch->flops += (double)m * (double)n * (double)items;
}

/* ikbo_linear_fused.cu: clusters that stay. Joined levels begin while pack.cu runs. */
static void fused_grid(const rf__gpu *gpu, const rf_ikbo_linear_params *params,
                       const rf__ikbo_variant *variant, bool packs, rf__kernel_launch *launch) {
    int64_t clusters = gpu->sms / variant->ranks, strips = 0;
    for (int32_t l = variant->joined; l < params->n_levels; l++)
        strips += params->levels[l].count * rf__ikbo_strips(params);
    if (clusters > strips) clusters = strips;
    launch->grid[0] = (uint32_t)(clusters * variant->ranks);
    launch->block[0] = RF_FUSED_THREADS;
    if (variant->ranks > 1) launch->cluster[0] = (uint32_t)variant->ranks;
    launch->resident = true;
    launch->cooperative = !variant->joined;
    launch->overlap = variant->joined && packs ? RF__OVERLAP_ALWAYS : RF__OVERLAP_NEVER;
}

/* small.cu: a block per task, started while pack.cu runs. If all blocks may run at once they need no
 * tickets. */
static rf_status small_grid(const rf__gpu *gpu, const rf_ikbo_linear_params *params,
                            const rf__ikbo_shape *shape, bool packs, rf_fused_args *args,
                            rf__kernel_launch *launch) {
    int64_t tasks = 0;
    for (int32_t l = shape->joined; l < params->n_levels; l++) tasks += rf__ikbo_tasks(params, shape, l);
    RF_FAIL_IF(
        tasks > INT32_MAX, RF_ERR_UNSUPPORTED,
        "recfuse.ikbo_linear: path \"small\" would need more than 2^31 - 1 blocks. Use path \"auto\".");
    launch->grid[0] = (uint32_t)tasks;
    launch->block[0] = (uint32_t)(shape->groups + 1) * 128;
    launch->cooperative = !shape->joined && tasks <= gpu->sms;
    if (launch->cooperative) launch->uncooperative_at = offsetof(rf_fused_args, tickets);
    args->tickets = !shape->joined && !launch->cooperative;
    launch->overlap = packs ? RF__OVERLAP_ALWAYS : RF__OVERLAP_NEVER;
    return RF_OK;
}

rf_status rf__ikbo_linear_lower(const rf__gpu *gpu, const rf_ikbo_linear_params *params,
                                const rf__ikbo_shape *shape, rf__launches *launches) {
    const rf__ikbo_variant variant = rf__ikbo_variant_of(params, shape);
    const bool packs = !variant.direct || !variant.joined, is_fused = rf__ikbo_is_fused(&variant);
    rf__ikbo_workspace workspace[RF_IKBO_MOST_LEVELS] = {{0, 0, 0}};
    rf_fused_args fused = {0};
    rf_pack_args pack = {0};
    rf__kernel_launch launch = {.source = is_fused ? &fused_source : &small_source,
                                .describe = fused_describe,
                                .shared_bytes = (uint32_t)shared_bytes(&variant)};
    rf__ikbo_variant key = variant;
    if (!is_fused) key.ranks = 0; /* one kernel for any number */
    rf__ikbo_linear_errors(params->weight != NULL ? params->weight
                                                  : params->levels[params->n_levels - 1].weight,
                           params->m, launches);
    launches->workspace_bytes = rf__ikbo_workspace_of(params, &variant, workspace);
    rf__ikbo_args_of(params, &variant, workspace, &fused, &pack);
    if (is_fused)
        fused_grid(gpu, params, &variant, packs, &launch);
    else
        RF_CHECK(small_grid(gpu, params, shape, packs, &fused, &launch));
    if (packs) RF_CHECK(pack_lower(params, &variant, &pack, launches));
    traffic_count(params, &variant, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &key, sizeof key, &fused, sizeof fused));
    fused_bind(launches, params, &variant);
    return RF_OK;
}
