/* Facts that the two paths on a GPU share: the error word of a layer's calls, and where keys are. */
#include "families/ikbo_attention/ikbo_attention.h"

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
