#include "families/ikbo_attention/ikbo_attention_sizes.h"

#include <stddef.h>

#include "core/validate.h"

static const char operator_name[] = "ikbo_attention";

static int64_t integer_at(const void *data, rf_int_type type, int64_t at) {
    return type == RF_INT64 ? ((const int64_t *)data)[at] : ((const int32_t *)data)[at];
}

rf_status rf__ikbo_attention_check_contents(const rf_ikbo_attention_params *params) {
    for (int64_t i = 0; i < params->candidates.count; i++) {
        const int64_t user = integer_at(params->cand_to_user, params->cand_to_user_type, i);
        RF__REFUSE_IF(params->n_users == 0, RF_ERR_INDEX,
                      "cand_to_user[" RF__I64 "] is " RF__I64
                      ", but there are no users, so no index is valid",
                      i, user);
        RF__REFUSE_IF((uint64_t)user >= (uint64_t)params->n_users, RF_ERR_INDEX,
                      "cand_to_user[" RF__I64 "] is " RF__I64 "; expected 0 to " RF__I64
                      ", since there are " RF__I64 " users",
                      i, user, params->n_users - 1, params->n_users);
    }
    for (int64_t u = 0; params->kv_lengths != NULL && u < params->n_users; u++) {
        const int64_t length = integer_at(params->kv_lengths, params->kv_lengths_type, u);
        RF__REFUSE_IF(length < 0 || length > params->positions, RF_ERR_VALUE,
                      "kv_lengths[" RF__I64 "] is " RF__I64 "; expected 0 to " RF__I64
                      ", the positions of a user",
                      u, length, params->positions);
    }
    int64_t before = 0;
    for (int64_t u = 0; params->kv_offsets != NULL && u <= params->n_users; u++) {
        const int64_t offset = integer_at(params->kv_offsets, params->kv_offsets_type, u);
        RF__REFUSE_IF(offset < before || offset > params->positions, RF_ERR_VALUE,
                      "kv_offsets[" RF__I64 "] is " RF__I64 "; expected " RF__I64
                      " (the offset before) to " RF__I64 " (the number of positions)",
                      u, offset, before, params->positions);
        before = offset;
    }
    return RF_OK;
}

rf__ikbo_keys rf__ikbo_attention_keys(const rf_ikbo_attention_params *params, int64_t user) {
    if (params->kv_offsets != NULL) {
        const int64_t first = integer_at(params->kv_offsets, params->kv_offsets_type, user);
        const int64_t end = integer_at(params->kv_offsets, params->kv_offsets_type, user + 1);
        return (rf__ikbo_keys){first, end - first};
    }
    if (params->kv_lengths == NULL) return (rf__ikbo_keys){0, params->positions};
    return (rf__ikbo_keys){0, integer_at(params->kv_lengths, params->kv_lengths_type, user)};
}

/* A counting sort: starts[u] is first the number of candidates of users before u, then the position of the
 * next candidate of u, which ends at the start of u + 1. */
void rf__ikbo_attention_group(const rf_ikbo_attention_params *params, int64_t *starts, int64_t *order) {
    const int64_t count = params->candidates.count, users = params->n_users;
    for (int64_t u = 0; u <= users; u++) starts[u] = 0;
    for (int64_t i = 0; i < count; i++)
        starts[integer_at(params->cand_to_user, params->cand_to_user_type, i) + 1]++;
    for (int64_t u = 0; u < users; u++) starts[u + 1] += starts[u];
    for (int64_t i = 0; i < count; i++)
        order[starts[integer_at(params->cand_to_user, params->cand_to_user_type, i)]++] = i;
    for (int64_t u = users; u > 0; u--) starts[u] = starts[u - 1];
    starts[0] = 0;
}
