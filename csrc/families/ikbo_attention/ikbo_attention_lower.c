/* The fused attention lowered: ikbo_attention_group.cu, which groups candidates by user and cuts tiles, then
 * ikbo_attention_fused.cu. */
#include <stddef.h>
#include <stdio.h>

#include "core/validate.h"
#include "families/ikbo_attention/ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention_args.h"

static const rf__kernel_source group_source = {"families/ikbo_attention/ikbo_attention_group.cu",
                                               "rf_ikbo_attention_group"};
static const rf__kernel_source fused_source = {"families/ikbo_attention/ikbo_attention_fused.cu",
                                               "rf_ikbo_attention"};

enum { GROUP_BLOCK = 1024, GRAIN = 16, WORKSPACE_GRAIN = 256, LEAST_SEGMENT = 8 };

/* All of it int32_t: compared bytewise. */
typedef struct fused_variant {
    int32_t dtype, dim, segment;
} fused_variant;

static rf_status fused_describe(const void *key, rf__kernel_options *options) {
    const fused_variant *variant = key;
    const rf__attention_shape *shape = rf__attention_shape_of(variant->dim);
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_DIM=%d -DRF_KEYS=%d -DRF_K_SLOTS=%d -DRF_V_SLOTS=%d -DRF_SEGMENT=%d",
             (int)variant->dtype, (int)variant->dim, (int)shape->keys, (int)shape->k_slots,
             (int)shape->v_slots, (int)variant->segment);
    options->dynamic_shared = rf__attention_shared_bytes(shape);
    return RF_OK;
}

static rf_status group_describe(const void *key, rf__kernel_options *options) {
    snprintf(options->defines, sizeof options->defines, "-DRF_BLOCK=%d", (int)*(const int32_t *)key);
    return RF_OK;
}

/* Returns how many queries of an item move together, as a box of a tensor map; 1: each by itself, from any
 * address. */
static int32_t segment_of(const rf_ikbo_attention_params *params) {
    const rf_ikbo_queries *sets[2] = {&params->candidates, &params->users};
    int32_t segment = RF_ATTENTION_ROWS;
    for (int i = 0; i < 2; i++) {
        if (i == 0 ? sets[i]->count == 0 : !rf__attention_has_self(params)) continue;
        const int64_t sizes[3] = {sets[i]->count, sets[i]->queries, params->heads};
        while (sets[i]->queries % segment != 0) segment /= 2;
        for (int d = 0; d < 3; d++)
            if (sizes[d] > 1 && sets[i]->q_pitch[d] == 0) return 1;
    }
    return segment < LEAST_SEGMENT ? 1 : segment;
}

/* Offsets in the workspace, in bytes. */
typedef struct workspace_offsets {
    int64_t plan, work, counts, order, ranks, members;
    int64_t ended, parts; /* 0 if no tile has parts */
    int64_t end;
} workspace_offsets;

/* Returns true if the keys of the last tiles may be cut, so that all blocks end at the same time: there must
 * be many keys, and so few tiles that the last ones matter. `grid`: of blocks. */
static bool may_split(const rf_ikbo_attention_params *params, int32_t grid) {
    enum { MOST_TURNS = 32 };
    const int64_t keys = rf__attention_shape_of(params->dim)->keys;
    return params->positions >= 2 * RF_ATTENTION_LEAST_BLOCKS * keys &&
           rf__attention_tiles(params) <= (int64_t)MOST_TURNS * grid;
}

static int32_t grid_of(const rf__gpu *gpu, const rf_ikbo_attention_params *params) {
    const int64_t tiles =
        rf__attention_tiles(params) * (may_split(params, gpu->sms) ? RF_ATTENTION_MOST_PARTS : 1);
    return tiles < gpu->sms ? (int32_t)tiles : gpu->sms;
}

static workspace_offsets workspace_offsets_of(const rf__gpu *gpu, const rf_ikbo_attention_params *params) {
    const int64_t items =
        may_split(params, gpu->sms) ? RF_ATTENTION_SPLIT_TIMES * (int64_t)grid_of(gpu, params) : 0;
    const int64_t users = params->n_users + 1, candidates = params->candidates.count,
                  number = sizeof(int32_t);
    workspace_offsets at = {0};
    at.work = WORKSPACE_GRAIN;
    at.counts = at.work + users * (int64_t)sizeof(rf_attention_work);
    at.order = at.counts + users * number;
    at.ranks = at.order + users * number;
    at.members = at.ranks + candidates * number;
    at.end = at.members + candidates * number;
    if (items == 0) return at;
    at.ended = at.end;
    at.parts = rf__round_up(at.ended + items * RF_ATTENTION_GROUPS * number, WORKSPACE_GRAIN);
    at.end = at.parts + items * RF_ATTENTION_PART_BYTES(rf__attention_shape_of(params->dim)->dim);
    return at;
}

/* A pointer that is bound to the workspace later. */
static void *in_workspace(int64_t at) { return (void *)(uintptr_t)at; }

/* Binds a map of [items, rows, heads, dim] whose boxes are `rows` rows of one head. */
static void map_bind(rf__launches *launches, size_t at, const rf_ikbo_attention_params *params,
                     const void *data, const int64_t *sizes, const int64_t *pitch, int32_t rows) {
    rf__tensor_map_params tensor = {.data = data,
                                    .dtype = params->dtype,
                                    .dimensions = 4,
                                    .sizes = {params->dim, sizes[2], sizes[1], sizes[0]},
                                    .box = {RF_ATTENTION_ATOM, 1, rows, 1},
                                    .swizzle = RF_ATTENTION_ATOM * 2};
    for (int i = 1; i < 4; i++) /* the pitch of a single element is not used, and may be anything */
        tensor.pitches[i] = tensor.sizes[i] == 1 ? GRAIN : rf__elements_bytes(params->dtype, pitch[3 - i]);
    rf__launches_bind_map(launches, at, &tensor);
}

/* Binds the maps of a set of queries and of its output, at offsets `q` and `out` of the arguments. */
static void queries_bind(rf__launches *launches, const rf_ikbo_attention_params *params,
                         const rf_ikbo_queries *queries, int32_t segment, size_t q, size_t out) {
    const int64_t line = params->heads * params->dim;
    const int64_t sizes[3] = {queries->count, queries->queries, params->heads};
    const int64_t contiguous[3] = {queries->queries * line, line, params->dim};
    if (segment == 1 || queries->count == 0 || queries->queries == 0) return;
    map_bind(launches, q, params, queries->q, sizes, queries->q_pitch, segment);
    map_bind(launches, out, params, queries->out, sizes, contiguous, segment);
}

static rf_attention_queries queries_of(const rf_ikbo_attention_params *params, const rf_ikbo_queries *from) {
    return (rf_attention_queries){.q = from->q,
                                  .out = from->out,
                                  .lse = from->lse,
                                  .item = rf__elements_bytes(params->dtype, from->q_pitch[0]),
                                  .query = rf__elements_bytes(params->dtype, from->q_pitch[1]),
                                  .head = rf__elements_bytes(params->dtype, from->q_pitch[2]),
                                  .queries = from->count > 0 ? (int32_t)from->queries : 0};
}

static rf_attention_args fused_args(const rf_ikbo_attention_params *params, const workspace_offsets *at) {
    static const double log2_e = 1.4426950408889634;
    const bool one_user = rf__attention_has_one_user(params);
    const bool all = params->kv_lengths == NULL && params->kv_offsets == NULL;
    rf_attention_args args = {.plan = in_workspace(at->plan),
                              .work = in_workspace(at->work),
                              .members = in_workspace(at->members),
                              .candidates = queries_of(params, &params->candidates),
                              .n_users = (int32_t)params->n_users,
                              .dim = (int32_t)params->dim,
                              .heads = (int32_t)params->heads,
                              .kv_heads = (int32_t)params->kv_heads,
                              .one_user = one_user,
                              .scale = (float)(params->scale * log2_e),
                              .positions = all ? (int32_t)params->positions : 0,
                              .same_keys = one_user && params->kv_offsets == NULL,
                              .parts = in_workspace(at->parts),
                              .ended = in_workspace(at->ended)};
    if (rf__attention_has_self(params)) args.self = queries_of(params, &params->users);
    return args;
}

static void fused_bind(rf__launches *launches, const rf_ikbo_attention_params *params, int32_t segment,
                       const workspace_offsets *at) {
    const int32_t keys = rf__attention_shape_of(params->dim)->keys;
    const int64_t sizes[3] = {rf__attention_has_one_user(params) ? 1 : params->n_users, params->positions,
                              params->kv_heads};
    rf__launches_bind_workspace(launches, offsetof(rf_attention_args, plan));
    rf__launches_bind_workspace(launches, offsetof(rf_attention_args, work));
    rf__launches_bind_workspace(launches, offsetof(rf_attention_args, members));
    if (at->ended > 0) {
        rf__launches_bind_workspace(launches, offsetof(rf_attention_args, parts));
        rf__launches_bind_workspace(launches, offsetof(rf_attention_args, ended));
    }
    map_bind(launches, offsetof(rf_attention_args, k), params, params->k, sizes, params->k_pitch, keys);
    map_bind(launches, offsetof(rf_attention_args, v), params, params->v, sizes, params->v_pitch, keys);
    queries_bind(launches, params, &params->candidates, segment, offsetof(rf_attention_args, q),
                 offsetof(rf_attention_args, out));
    if (rf__attention_has_self(params))
        queries_bind(launches, params, &params->users, segment, offsetof(rf_attention_args, self_q),
                     offsetof(rf_attention_args, self_out));
}

/* Bytes and operations of ikbo_attention_fused.cu: keys and values once, each query with all positions of a
 * user, or with the mean if they are jagged. Lengths are on the device: with lengths this is an upper
 * bound. */
static void traffic_count(const rf_ikbo_attention_params *params, rf__kernel_launch *launch) {
    enum { SOFTMAX = 3 }; /* of a score: a difference, an exponential, a sum */
    const int64_t head_bytes = rf__elements_bytes(params->dtype, params->dim);
    const int64_t users = rf__attention_has_one_user(params) ? 1 : params->n_users;
    const double keys =
        (double)params->positions / (double)(params->kv_offsets != NULL ? params->n_users : 1);
    const rf_ikbo_queries *sets[2] = {&params->candidates, &params->users};
    launch->read_bytes = 2 * users * params->positions * params->kv_heads * head_bytes;
    for (int i = 0; i < 1 + rf__attention_has_self(params); i++) {
        const int64_t rows = sets[i]->count * sets[i]->queries * params->heads;
        launch->read_bytes += rows * head_bytes;
        launch->written_bytes += rows * (head_bytes + (sets[i]->lse != NULL ? 4 : 0));
        launch->tensor_flops += 4.0 * (double)rows * keys * (double)params->dim;
        launch->flops += SOFTMAX * (double)rows * keys;
    }
}

static rf_status group_lower(const rf__gpu *gpu, const rf_ikbo_attention_params *params,
                             const workspace_offsets *at, rf__launches *launches) {
    static const int32_t block = GROUP_BLOCK;
    const int64_t user_rows = rf__attention_item_rows(params, &params->users);
    const rf_attention_group_args args = {
        .map = {params->cand_to_user, params->cand_to_user_type == RF_INT64},
        .keys = rf__attention_users_of(params, 0),
        .plan = in_workspace(at->plan),
        .work = in_workspace(at->work),
        .counts = in_workspace(at->counts),
        .order = in_workspace(at->order),
        .ranks = in_workspace(at->ranks),
        .members = in_workspace(at->members),
        .candidates = (int32_t)params->candidates.count,
        .user_rows = rf__attention_has_self(params) ? (int32_t)user_rows : 0,
        .candidate_rows = (int32_t)rf__attention_item_rows(params, &params->candidates),
        .kv_heads = (int32_t)params->kv_heads,
        .report = params->check_bounds,
        .block_keys = rf__attention_shape_of(params->dim)->keys,
        .ended = in_workspace(at->ended),
        .grid = grid_of(gpu, params)};
    static const size_t bound[] = {
        offsetof(rf_attention_group_args, plan),   offsetof(rf_attention_group_args, work),
        offsetof(rf_attention_group_args, counts), offsetof(rf_attention_group_args, order),
        offsetof(rf_attention_group_args, ranks),  offsetof(rf_attention_group_args, members)};
    const rf__kernel_launch launch = {.source = &group_source,
                                      .describe = group_describe,
                                      .grid = {1},
                                      .block = {GROUP_BLOCK},
                                      .overlap = RF__OVERLAP_ALWAYS,
                                      .read_bytes = rf__attention_map_bytes(params),
                                      .written_bytes = (at->ended > 0 ? at->parts : at->end) - at->work +
                                                       (int64_t)sizeof *args.plan};
    RF_CHECK(rf__launches_add(launches, &launch, &block, sizeof block, &args, sizeof args));
    for (size_t i = 0; i < sizeof bound / sizeof bound[0]; i++)
        rf__launches_bind_workspace(launches, bound[i]);
    if (at->ended > 0) rf__launches_bind_workspace(launches, offsetof(rf_attention_group_args, ended));
    rf__launches_bind_errors(launches, offsetof(rf_attention_group_args, errors));
    return RF_OK;
}

rf_status rf__ikbo_attention_lower(const rf__gpu *gpu, const rf_ikbo_attention_params *params,
                                   rf__launches *launches) {
    const bool self = rf__attention_has_self(params);
    rf__ikbo_attention_errors(params, launches);
    if (params->candidates.count == 0 && !self) return RF_OK;
    const rf__attention_shape *shape = rf__attention_shape_of(params->dim);
    const int32_t segment = segment_of(params);
    const fused_variant variant = {(int32_t)params->dtype, shape->dim, segment};
    const workspace_offsets at = workspace_offsets_of(gpu, params);
    const rf_attention_args args = fused_args(params, &at);
    rf__kernel_launch launch = {.source = &fused_source,
                                .describe = fused_describe,
                                .grid = {(uint32_t)grid_of(gpu, params)},
                                .block = {RF_ATTENTION_THREADS},
                                .shared_bytes = (uint32_t)rf__attention_shared_bytes(shape),
                                .overlap = RF__OVERLAP_ALWAYS};
    launches->workspace_bytes = at.end;
    RF_CHECK(group_lower(gpu, params, &at, launches));
    if (params->candidates.queries == 0 && !self) return RF_OK;
    traffic_count(params, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    fused_bind(launches, params, segment, &at);
    return RF_OK;
}
