/* Keys and queries of attention by torch's kernels: in place where these can read them, else copied. */
#include "core/row_format.h"
#include "families/ikbo_attention/torch/attention_packed.h"

enum { ALIGNED = 16 }; /* bytes: of addresses and pitches that torch's kernels read by */

/* Returns true if torch's kernels can read heads with these pitches [2], of rows and heads. */
static bool is_readable(const rf__packed_call *packed, const void *data, const int64_t pitch[2]) {
    const rf_dtype dtype = packed->params->dtype;
    const uint64_t all = (uintptr_t)data | (uint64_t)rf__elements_bytes(dtype, pitch[0]) |
                         (uint64_t)rf__elements_bytes(dtype, pitch[1]);
    return packed->params->dim == packed->padded && all % ALIGNED == 0 && pitch[0] < INT32_MAX &&
           pitch[1] < INT32_MAX;
}

/* Returns the rows between users, if keys and values can be read in place; else -1. */
static int64_t user_pitch_of(const rf__packed_call *packed) {
    const rf_ikbo_attention_params *params = packed->params;
    const int64_t *k = params->k_pitch, *v = params->v_pitch;
    if (!is_readable(packed, params->k, k + 1) || !is_readable(packed, params->v, v + 1)) return -1;
    if (params->kv_offsets != NULL || params->n_users == 1) return 0;
    if (k[1] == 0 || v[1] == 0 || k[0] % k[1] != 0 || v[0] % v[1] != 0 || k[0] / k[1] != v[0] / v[1])
        return -1;
    return k[0] / k[1];
}

static rf_status keys_copy(rf__packed_call *packed, const void *data, const int64_t pitch[3],
                           AtenTensorHandle *copy) {
    const rf_ikbo_attention_params *params = packed->params;
    const bool jagged = params->kv_offsets != NULL; /* then an item of the copy is a position, else a user */
    const int64_t sizes[3] = {packed->keys.rows, params->kv_heads, packed->padded};
    void *to = NULL;
    RF_CHECK(rf__call_temporary(packed->call, 3, sizes, packed->dtype, copy, &to));
    const rf__attention_rows rows = {.data = data,
                                     .pitch = {jagged ? pitch[1] : pitch[0], jagged ? 0 : pitch[1], pitch[2]},
                                     .count = jagged ? params->positions : params->n_users,
                                     .queries = jagged ? 1 : params->positions,
                                     .heads = params->kv_heads,
                                     .group = 1,
                                     .dim = params->dim,
                                     .dtype = params->dtype};
    return rf__attention_pack_lower(&rows, NULL, to, packed->padded, &packed->launches);
}

rf_status rf__packed_keys_find(rf__packed_call *packed) {
    const rf_ikbo_attention_params *params = packed->params;
    rf__packed_keys *keys = &packed->keys;
    const bool jagged = params->kv_offsets != NULL;
    const int64_t user_pitch = user_pitch_of(packed);
    *keys = (rf__packed_keys){.k = packed->attention->k.handle,
                              .v = packed->attention->v.handle,
                              .k_pitch = {params->k_pitch[1], params->k_pitch[2]},
                              .v_pitch = {params->v_pitch[1], params->v_pitch[2]},
                              .user_pitch = user_pitch >= 0 ? user_pitch : params->positions};
    RF_FAIL_IF(
        !jagged && (__builtin_mul_overflow(params->n_users - 1, keys->user_pitch, &keys->rows) ||
                    keys->rows > INT32_MAX),
        RF_ERR_UNSUPPORTED,
        "recfuse.ikbo_attention: path \"packed\" counts positions of all users in 32 bits. Cut the batch.");
    keys->rows = (jagged ? 0 : keys->rows) + params->positions;
    RF_FAIL_IF(
        keys->rows > INT32_MAX, RF_ERR_UNSUPPORTED,
        "recfuse.ikbo_attention: path \"packed\" counts positions of all users in 32 bits. Cut the batch.");
    if (user_pitch >= 0) return RF_OK;
    for (int i = 0; i < 2; i++)
        keys->k_pitch[i] = keys->v_pitch[i] = i == 0 ? params->kv_heads * packed->padded : packed->padded;
    RF_CHECK(keys_copy(packed, params->k, params->k_pitch, &keys->k));
    return keys_copy(packed, params->v, params->v_pitch, &keys->v);
}

rf_status rf__packed_queries_find(rf__packed_call *packed, AtenTensorHandle handle, rf__packed_set *set) {
    const rf_ikbo_attention_params *params = packed->params;
    const rf_ikbo_queries *queries = set->queries;
    const int64_t *pitch = queries->q_pitch, group = packed->group;
    const bool by_query = group == 1, by_head = params->kv_heads == 1; /* the parts of a row */
    const int64_t row = by_query ? pitch[1] : pitch[2];
    const bool is_even =
        (by_query || (by_head && pitch[1] == group * pitch[2])) && pitch[0] == queries->queries * pitch[1];
    set->q = handle;
    set->q_pitch[0] = row;
    set->q_pitch[1] = by_query ? pitch[2] : packed->padded;
    if (set->order == NULL && is_even && is_readable(packed, queries->q, set->q_pitch)) return RF_OK;
    const int64_t sizes[3] = {set->items.count * set->items.rows, params->kv_heads, packed->padded};
    void *to = NULL;
    RF_CHECK(rf__call_temporary(packed->call, 3, sizes, packed->dtype, &set->q, &to));
    set->q_pitch[0] = params->kv_heads * packed->padded;
    set->q_pitch[1] = packed->padded;
    const rf__attention_rows rows = {.data = queries->q,
                                     .pitch = {pitch[0], pitch[1], pitch[2]},
                                     .count = queries->count,
                                     .queries = queries->queries,
                                     .heads = params->heads,
                                     .group = group,
                                     .dim = params->dim,
                                     .dtype = params->dtype};
    return rf__attention_pack_lower(&rows, set->order, to, packed->padded, &packed->launches);
}
