/* Facts of a call that its lowering and its paths share: the error word, keys, and the fused kernel's shapes
 * and rows. */
#include "families/ikbo_attention/ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention_args.h"

void rf__ikbo_attention_errors(const rf_ikbo_attention_params *params, rf__launches *launches) {
    launches->owner = NULL;
    launches->shape = ((uint64_t)params->heads << 42) ^ ((uint64_t)params->kv_heads << 21) ^
                      (uint64_t)params->dim ^ (UINT64_C(1) << 63);
    launches->checks = true;
}

rf_attention_users rf__attention_users_of(const rf_ikbo_attention_params *params, int64_t pitch) {
    return (rf_attention_users){
        .lengths = {params->kv_lengths, params->kv_lengths_type == RF_INT64},
        .offsets = {params->kv_offsets, params->kv_offsets_type == RF_INT64},
        .count = params->n_users,
        .positions = params->positions,
        .pitch = pitch,
    };
}

int64_t rf__attention_length_bytes(const rf_attention_users *keys) {
    int64_t bytes = 0;
    if (keys->lengths.data != NULL) bytes += keys->count * (keys->lengths.is_long ? 8 : 4);
    if (keys->offsets.data != NULL) bytes += (keys->count + 1) * (keys->offsets.is_long ? 8 : 4);
    return bytes;
}

int64_t rf__attention_map_bytes(const rf_ikbo_attention_params *params) {
    const rf_attention_users keys = rf__attention_users_of(params, 0);
    return params->candidates.count * (params->cand_to_user_type == RF_INT64 ? 8 : 4) +
           rf__attention_length_bytes(&keys);
}

static const rf__attention_shape shapes[] = {{32, 128, 4, 4},  {64, 128, 4, 4}, {96, 128, 3, 2},
                                             {128, 128, 3, 2}, {192, 64, 3, 2}, {256, 48, 2, 2}};

const rf__attention_shape *rf__attention_shape_of(int64_t dim) {
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (dim <= shapes[i].dim) return &shapes[i];
    return NULL;
}

int32_t rf__attention_shared_bytes(const rf__attention_shape *shape) {
    const int32_t atoms = (shape->dim + RF_ATTENTION_ATOM - 1) / RF_ATTENTION_ATOM;
    return RF_ATTENTION_SHARED_BYTES(atoms, shape->keys, shape->k_slots + shape->v_slots);
}

bool rf__attention_has_self(const rf_ikbo_attention_params *params) {
    return params->users.q != NULL && params->users.queries > 0;
}

bool rf__attention_has_one_user(const rf_ikbo_attention_params *params) {
    return params->kv_offsets != NULL || (params->k_pitch[0] == 0 && params->v_pitch[0] == 0);
}

int64_t rf__attention_item_rows(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries) {
    return queries->queries * (params->heads / params->kv_heads);
}

int64_t rf__attention_tiles(const rf_ikbo_attention_params *params) {
    const int64_t self = rf__attention_has_self(params)
                             ? params->n_users * rf__attention_item_rows(params, &params->users)
                             : 0;
    const int64_t rows =
        params->candidates.count * rf__attention_item_rows(params, &params->candidates) + self;
    return (rows / RF_ATTENTION_TILE_ROWS + params->n_users + 1) * params->kv_heads;
}
