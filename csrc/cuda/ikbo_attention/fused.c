/* rf_ikbo_attention_cuda: one launch of fused.cu, behind one of group.cu. */
#include <stdio.h>

#include "base/validate.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/ikbo_attention/ikbo_attention.h"
#include "cuda/jit/jit.h"
#include "ikbo_attention/args.h"

static const rf__kernel_source group_source = {"ikbo_attention/group.cu", "rf_ikbo_attention_group"};
static const rf__kernel_source fused_source = {"ikbo_attention/fused.cu", "rf_ikbo_attention"};

enum { GROUP_BLOCK = 1024, GRAIN = 16, WORKSPACE_GRAIN = 256, LEAST_SEGMENT = 8 };

/* All of it int32_t: compared bytewise. */
typedef struct fused_variant {
    int32_t dtype, dim, segment;
} fused_variant;

/* Keys of a block and slots of the two rings, by the columns that the kernel computes with; what fits into registers and
 * shared memory. */
typedef struct fused_shape {
    int32_t dim, keys, k_slots, v_slots;
} fused_shape;
static const fused_shape shapes[] = {{32, 128, 4, 4},  {64, 128, 4, 4}, {96, 128, 3, 2},
                                     {128, 128, 3, 2}, {192, 64, 3, 2}, {256, 48, 2, 2}};

/* NULL: there is none for heads of so many columns. */
static const fused_shape *shape_of(int64_t dim) {
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (dim <= shapes[i].dim) return &shapes[i];
    return NULL;
}

static int32_t shared_bytes(const fused_shape *shape) {
    const int32_t atoms = (shape->dim + RF_ATTENTION_ATOM - 1) / RF_ATTENTION_ATOM;
    return RF_ATTENTION_SHARED_BYTES(atoms, shape->keys, shape->k_slots + shape->v_slots);
}

static rf_status fused_describe(const void *key, rf__kernel_options *options) {
    const fused_variant *variant = key;
    const fused_shape *shape = shape_of(variant->dim);
    snprintf(options->defines, sizeof options->defines,
             "-DRF_DTYPE=%d -DRF_DIM=%d -DRF_KEYS=%d -DRF_K_SLOTS=%d -DRF_V_SLOTS=%d -DRF_SEGMENT=%d",
             (int)variant->dtype, (int)variant->dim, (int)shape->keys, (int)shape->k_slots,
             (int)shape->v_slots, (int)variant->segment);
    options->dynamic_shared = shared_bytes(shape);
    return RF_OK;
}

static rf_status group_describe(const void *key, rf__kernel_options *options) {
    snprintf(options->defines, sizeof options->defines, "-DRF_BLOCK=%d", (int)*(const int32_t *)key);
    return RF_OK;
}

static bool has_self(const rf_ikbo_attention_params *params) {
    return params->users.q != NULL && params->users.queries > 0;
}

/* Whether rows can be copied in pieces of 16 bytes. `zero`: one row may stand for all. */
static bool is_even(const void *data, const int64_t *pitch, const int64_t *sizes, int64_t bytes, bool zero) {
    const int64_t most = (int64_t)1 << 40;
    for (int i = 0; i < 3; i++) {
        const int64_t step = pitch[i] * bytes;
        if (sizes[i] > 1 && (step % GRAIN != 0 || step < (zero ? 0 : GRAIN) || step >= most)) return false;
    }
    return (uintptr_t)data % GRAIN == 0;
}

static bool is_even_queries(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries) {
    const int64_t sizes[3] = {queries->count, queries->queries, params->heads};
    return is_even(queries->q, queries->q_pitch, sizes, rf__dtype_bytes(params->dtype), true) &&
           (uintptr_t)queries->out % GRAIN == 0;
}

/* How many queries of an item move together: a box of a tensor map; 1: each by itself, from wherever it is. */
static int32_t segment_of(const rf_ikbo_attention_params *params) {
    const rf_ikbo_queries *sets[2] = {&params->candidates, &params->users};
    int32_t segment = RF_ATTENTION_ROWS;
    for (int i = 0; i < 2; i++) {
        if (i == 0 ? sets[i]->count == 0 : !has_self(params)) continue;
        const int64_t sizes[3] = {sets[i]->count, sets[i]->queries, params->heads};
        while (sets[i]->queries % segment != 0) segment /= 2;
        for (int d = 0; d < 3; d++)
            if (sizes[d] > 1 && sets[i]->q_pitch[d] == 0) return 1;
    }
    return segment < LEAST_SEGMENT ? 1 : segment;
}

/* Whether k and v have one user for tensor maps: they are jagged, or the same for all users. */
static bool has_one_user(const rf_ikbo_attention_params *params) {
    return params->kv_offsets != NULL || (params->k_pitch[0] == 0 && params->v_pitch[0] == 0);
}

/* Rows that an item gives to one head of keys. */
static int64_t rows_of(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries) {
    return queries->queries * (params->heads / params->kv_heads);
}

/* Tiles: each user's last one may be short. */
static int64_t tiles_most(const rf_ikbo_attention_params *params) {
    const int64_t self = has_self(params) ? params->n_users * rows_of(params, &params->users) : 0;
    const int64_t rows = params->candidates.count * rows_of(params, &params->candidates) + self;
    return (rows / RF_ATTENTION_TILE_ROWS + params->n_users + 1) * params->kv_heads;
}

/* NULL, or what keeps the kernel from taking the call. */
static const char *refusal(const rf_ikbo_attention_params *params, const rf__cuda_device *device) {
    const int64_t bytes = rf__dtype_bytes(params->dtype), most = INT32_MAX / 2;
    const int64_t sizes[3] = {has_one_user(params) ? 1 : params->n_users, params->positions,
                              params->kv_heads};
    const rf_ikbo_queries *sets[2] = {&params->candidates, &params->users};
    if (device->gpu.cc_major != 9 || device->gpu.cc_minor != 0)
        return "the GPU is not one of compute capability 9.0";
    if (params->dtype != RF_FLOAT16 && params->dtype != RF_BFLOAT16)
        return "the dtype is neither float16 nor bfloat16";
    if (params->dim < 1 || params->dim % 8 != 0 || shape_of(params->dim) == NULL)
        return "the dims of a head are no multiple of 8 from 8 to 256";
    if (shared_bytes(shape_of(params->dim)) > device->gpu.shared_per_block_optin)
        return "a block has too little shared memory";
    if (params->n_users < 1 || params->positions < 1 || params->heads < 1) return "there are no keys";
    if (params->n_users > most || params->positions > most || params->kv_heads > most)
        return "k has 2^30 users, positions or heads, or more";
    if (!is_even(params->k, params->k_pitch, sizes, bytes, false) ||
        !is_even(params->v, params->v_pitch, sizes, bytes, false))
        return "the heads of k or v do not lie a multiple of 16 bytes apart";
    int64_t left = most; /* a user may have all rows of both sets */
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !has_self(params)) continue;
        const rf_ikbo_queries *set = sets[i];
        int64_t rows;
        if (set->count > most || __builtin_mul_overflow(set->count, set->queries, &rows) ||
            __builtin_mul_overflow(rows, params->heads, &rows) || rows > left)
            return "q has 2^30 candidates or queries of a head, or more";
        left -= rows;
        if (set->count > 0 && set->queries > 0 && !is_even_queries(params, set))
            return "the heads of q do not lie a multiple of 16 bytes apart";
    }
    if (tiles_most(params) > most) return "there are 2^30 tiles or more";
    return NULL;
}

bool rf_ikbo_attention_takes(const rf_ikbo_attention_params *params, int32_t ordinal) {
    const rf__cuda_device *device = NULL;
    return rf__check_ikbo_attention_sizes(params) == RF_OK &&
           rf__cuda_device_get(ordinal, &device) == RF_OK && refusal(params, device) == NULL;
}

/* What of the workspace is for what: bytes from its start. */
typedef struct places {
    int64_t plan, work, counts, order, ranks, members, ended, parts,
        end; /* ended: 0 where no tile has parts */
} places;

/* Whether the last tiles' keys may be cut, so that all blocks end at once: they must be many, and the tiles few beside which
 * those count. `grid`: of blocks. */
static bool may_split(const rf_ikbo_attention_params *params, int32_t grid) {
    enum { MOST_TURNS = 32 };
    return params->positions >= 2 * RF_ATTENTION_LEAST_BLOCKS * (int64_t)shape_of(params->dim)->keys &&
           tiles_most(params) <= (int64_t)MOST_TURNS * grid;
}

static int32_t grid_of(const rf_ikbo_attention_params *params, const rf__cuda_device *device) {
    const int64_t tiles =
        tiles_most(params) * (may_split(params, device->gpu.sms) ? RF_ATTENTION_MOST_PARTS : 1);
    return tiles < device->gpu.sms ? (int32_t)tiles : device->gpu.sms;
}

static places places_of(const rf_ikbo_attention_params *params, const rf__cuda_device *device) {
    const int64_t items =
        may_split(params, device->gpu.sms) ? RF_ATTENTION_SPLIT_TIMES * (int64_t)grid_of(params, device) : 0;
    const int64_t users = params->n_users + 1, candidates = params->candidates.count,
                  number = sizeof(int32_t);
    places at = {0};
    at.work = WORKSPACE_GRAIN;
    at.counts = at.work + users * (int64_t)sizeof(rf_attention_work);
    at.order = at.counts + users * number;
    at.ranks = at.order + users * number;
    at.members = at.ranks + candidates * number;
    at.end = at.members + candidates * number;
    if (items == 0) return at;
    at.ended = at.end;
    at.parts = rf__round_up(at.ended + items * RF_ATTENTION_GROUPS * number, WORKSPACE_GRAIN);
    at.end = at.parts + items * RF_ATTENTION_PART_BYTES(shape_of(params->dim)->dim);
    return at;
}

/* A map of [items, rows, heads, dim] whose boxes are `rows` rows of one head. */
static rf_status map_of(const rf__cuda_device *device, const rf_ikbo_attention_params *params,
                        const void *data, const int64_t *sizes, const int64_t *pitch, int32_t rows,
                        rf_tensor_map *map) {
    const int64_t bytes = rf__dtype_bytes(params->dtype);
    rf__tensor_map_params tensor = {.data = data,
                                    .dtype = params->dtype,
                                    .dimensions = 4,
                                    .sizes = {params->dim, sizes[2], sizes[1], sizes[0]},
                                    .pitches = {0, pitch[2] * bytes, pitch[1] * bytes, pitch[0] * bytes},
                                    .box = {RF_ATTENTION_ATOM, 1, rows, 1},
                                    .swizzle = RF_ATTENTION_ATOM * 2};
    for (int i = 1; i < 4; i++) /* of one alone, what is not used may be anything */
        if (tensor.sizes[i] == 1) tensor.pitches[i] = GRAIN;
    return rf__tensor_map_encode(device->driver, &tensor, map);
}

/* A set of queries, and the maps of its boxes unless `segment` is 1. */
static rf_status queries_of(const rf__cuda_device *device, const rf_ikbo_attention_params *params,
                            const rf_ikbo_queries *from, int32_t segment, rf_attention_queries *to,
                            rf_tensor_map *q, rf_tensor_map *out) {
    const int64_t bytes = rf__dtype_bytes(params->dtype), line = params->heads * params->dim;
    const int64_t sizes[3] = {from->count, from->queries, params->heads};
    const int64_t contiguous[3] = {from->queries * line, line, params->dim};
    *to = (rf_attention_queries){.q = from->q,
                                 .out = from->out,
                                 .lse = from->lse,
                                 .item = from->q_pitch[0] * bytes,
                                 .query = from->q_pitch[1] * bytes,
                                 .head = from->q_pitch[2] * bytes,
                                 .queries = from->count > 0 ? (int32_t)from->queries : 0};
    if (segment == 1 || from->count == 0 || from->queries == 0) return RF_OK;
    RF_CHECK(map_of(device, params, from->q, sizes, from->q_pitch, segment, q));
    return map_of(device, params, from->out, sizes, contiguous, segment, out);
}

static rf_status args_of(const rf__cuda_device *device, const rf_ikbo_attention_params *params,
                         int32_t segment, uint8_t *workspace, rf_attention_args *args) {
    static const double log2_e = 1.4426950408889634;
    const bool one_user = has_one_user(params);
    const int32_t keys = shape_of(params->dim)->keys;
    const int64_t sizes[3] = {one_user ? 1 : params->n_users, params->positions, params->kv_heads};
    const places at = places_of(params, device);
    args->plan = (rf_attention_plan *)(void *)(workspace + at.plan);
    args->work = (const rf_attention_work *)(const void *)(workspace + at.work);
    args->members = (const int32_t *)(const void *)(workspace + at.members);
    if (at.ended > 0) {
        args->parts = (float *)(void *)(workspace + at.parts);
        args->ended = (int32_t *)(void *)(workspace + at.ended);
    }
    args->n_users = (int32_t)params->n_users;
    args->dim = (int32_t)params->dim;
    args->heads = (int32_t)params->heads;
    args->kv_heads = (int32_t)params->kv_heads;
    args->one_user = one_user;
    args->same_keys = one_user && params->kv_offsets == NULL;
    args->positions =
        params->kv_lengths == NULL && params->kv_offsets == NULL ? (int32_t)params->positions : 0;
    args->scale = (float)(params->scale * log2_e);
    RF_CHECK(map_of(device, params, params->k, sizes, params->k_pitch, keys, &args->k));
    RF_CHECK(map_of(device, params, params->v, sizes, params->v_pitch, keys, &args->v));
    RF_CHECK(
        queries_of(device, params, &params->candidates, segment, &args->candidates, &args->q, &args->out));
    if (!has_self(params)) return RF_OK;
    return queries_of(device, params, &params->users, segment, &args->self, &args->self_q, &args->self_out);
}

static rf_status launch_group(const rf__cuda_device *device, const rf_ikbo_attention_params *params,
                              uint8_t *workspace, void *stream) {
    static const int32_t block = GROUP_BLOCK;
    const rf__kernel *kernel = NULL;
    const places at = places_of(params, device);
    const rf_attention_group_args args = {
        .map = {params->cand_to_user, params->cand_to_user_type == RF_INT64},
        .keys = rf__attention_users_of(params, 0),
        .plan = (rf_attention_plan *)(void *)(workspace + at.plan),
        .work = (rf_attention_work *)(void *)(workspace + at.work),
        .counts = (int32_t *)(void *)(workspace + at.counts),
        .order = (int32_t *)(void *)(workspace + at.order),
        .ranks = (int32_t *)(void *)(workspace + at.ranks),
        .members = (int32_t *)(void *)(workspace + at.members),
        .candidates = (int32_t)params->candidates.count,
        .user_rows = has_self(params) ? (int32_t)rows_of(params, &params->users) : 0,
        .candidate_rows = (int32_t)rows_of(params, &params->candidates),
        .kv_heads = (int32_t)params->kv_heads,
        .report = params->check_bounds,
        .block_keys = shape_of(params->dim)->keys,
        .ended = at.ended > 0 ? (int32_t *)(void *)(workspace + at.ended) : NULL,
        .grid = grid_of(params, device),
        .errors = rf__ikbo_attention_error_word(device, params).on_device};
    RF_CHECK(rf__jit_kernel(device, &group_source, &block, sizeof block, group_describe, &kernel));
    const rf__launch_config launch = {.function = kernel->function,
                                      .grid = {1},
                                      .block = {GROUP_BLOCK},
                                      .programmatic = true,
                                      .stream = stream};
    return rf__launch(device, &launch, &args);
}

static rf_status run(const rf__cuda_device *device, const rf_ikbo_attention_params *params,
                     const rf_cuda_stream *stream) {
    const rf_cuda_allocator *allocator = params->allocator;
    const int32_t segment = segment_of(params);
    const fused_variant variant = {(int32_t)params->dtype, shape_of(params->dim)->dim, segment};
    const bool any = params->candidates.queries > 0 || has_self(params);
    const rf__kernel *kernel = NULL;
    rf_attention_args args = {0};
    void *workspace = NULL, *block = NULL;
    rf_status status = RF_OK;
    RF_CHECK(rf__jit_kernel(device, &fused_source, &variant, sizeof variant, fused_describe, &kernel));
    RF_CHECK(allocator->allocate(allocator->context, places_of(params, device).end, false, stream, &workspace,
                                 &block));
    RF_TRY(rf__cuda_enter(device)); /* also for the tensor maps: a thread may have no context yet */
    status = args_of(device, params, segment, workspace, &args);
    if (status == RF_OK) status = launch_group(device, params, workspace, stream->stream);
    if (status == RF_OK && any) {
        const rf__launch_config launch = {.function = kernel->function,
                                          .grid = {(uint32_t)grid_of(params, device)},
                                          .block = {RF_ATTENTION_THREADS},
                                          .shared_bytes = (uint32_t)kernel->dynamic_shared,
                                          .programmatic = true,
                                          .stream = stream->stream};
        status = rf__launch(device, &launch, &args);
    }
    rf__cuda_leave();
out:
    allocator->release(allocator->context, block);
    return status;
}

rf_status rf_ikbo_attention_cuda(const rf_ikbo_attention_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__check_ikbo_attention(params));
    RF_FAIL_IF(params->allocator == NULL, RF_ERR_VALUE, "recfuse.ikbo_attention: allocator is NULL");
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    const char *reason = refusal(params, device);
    RF_FAIL_IF(reason != NULL, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: path \"fused\" does not take this call: %s; use path \"auto\" or "
               "\"packed\"",
               reason);
    RF_CHECK(rf__ikbo_attention_check_earlier(params, stream));
    return params->candidates.count > 0 || has_self(params) ? run(device, params, stream) : RF_OK;
}
