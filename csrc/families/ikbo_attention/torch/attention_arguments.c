/* Arguments of ikbo_attention and its private operators. */
#include <math.h>

#include "families/ikbo_attention/check_ikbo_attention.h"
#include "torch/arguments.h"
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"

/* Reads a tensor whose last dimension is contiguous, or copies it, and the pitches of the other dimensions
 * [3]; with three dimensions the first is 0. For a dimension with one element torch's stride is arbitrary;
 * here it is the natural stride. */
static rf_status rows_read(rf__call *call, rf__tensor *tensor, int64_t pitch[3]) {
    const int64_t last = tensor->dim - 1;
    if (tensor->sizes[last] > 1 && tensor->strides[last] != 1)
        RF_CHECK(rf__call_contiguous(call, tensor, tensor->dtype));
    int64_t natural = tensor->sizes[last];
    pitch[0] = 0;
    for (int64_t d = last - 1; d >= 0; d--) {
        int64_t *at = &pitch[3 - last + d];
        *at = tensor->sizes[d] > 1 ? tensor->strides[d] : natural;
        natural = *at * (tensor->sizes[d] > 1 ? tensor->sizes[d] : 1);
    }
    return RF_OK;
}

static rf_status queries_read(rf__call *call, int argument, rf__attention *attention, rf__tensor *q,
                              rf_ikbo_queries *queries) {
    rf_ikbo_attention_params *params = &attention->params;
    const bool first = q == &attention->q;
    RF_CHECK(rf__call_tensor(call, argument, RF__ANY_DIM, q));
    RF_CHECK(rf__dtype_read(q, first, "q is", &params->dtype));
    if (q->dim != 4) return rf__tensor_refuse(q, RF_ERR_VALUE, "[items, queries, heads, dim]");
    if (first) {
        params->heads = q->sizes[2];
        params->dim = q->sizes[3];
    } else if (q->sizes[2] != params->heads || q->sizes[3] != params->dim) {
        return rf__tensor_refuse(q, RF_ERR_VALUE, "[users, queries, %lld, %lld], since q has such heads",
                                 (long long)params->heads, (long long)params->dim);
    }
    RF_CHECK(rows_read(call, q, queries->q_pitch));
    queries->q = q->data;
    queries->count = q->sizes[0];
    queries->queries = q->sizes[1];
    return RF_OK;
}

static rf_status keys_read(rf__call *call, int argument, bool jagged, rf__attention *attention) {
    rf_ikbo_attention_params *params = &attention->params;
    rf__tensor *k = &attention->k, *v = &attention->v;
    const int64_t dim = jagged ? 3 : 4;
    RF_CHECK(rf__call_tensor(call, argument, RF__ANY_DIM, k));
    RF_CHECK(rf__call_tensor(call, argument + 1, RF__ANY_DIM, v));
    RF_CHECK(rf__dtype_read(k, false, "q is", &params->dtype));
    RF_CHECK(rf__dtype_read(v, false, "q is", &params->dtype));
    if (k->dim != dim || k->sizes[dim - 1] != params->dim)
        return rf__tensor_refuse(k, RF_ERR_VALUE, "[%s, kv_heads, %lld], since %s, and q has such heads",
                                 jagged ? "positions" : "users, positions", (long long)params->dim,
                                 jagged ? "kv_offsets are given" : "there are no kv_offsets");
    bool same = v->dim == dim;
    for (int64_t d = 0; d < dim && same; d++) same = v->sizes[d] == k->sizes[d];
    if (!same) return rf__tensor_refuse(v, RF_ERR_VALUE, "the sizes of k");
    params->n_users = jagged ? 0 : k->sizes[0];
    params->positions = k->sizes[dim - 3];
    params->kv_heads = k->sizes[dim - 2];
    RF_CHECK(rows_read(call, k, params->k_pitch));
    RF_CHECK(rows_read(call, v, params->v_pitch));
    params->k = k->data;
    params->v = v->data;
    return RF_OK;
}

static rf_status maps_read(rf__call *call, int cand_to_user, int lengths, int offsets,
                           rf_ikbo_attention_params *params) {
    static const char none[1] = ""; /* of no elements; NULL would mean an absent argument */
    int64_t count = 0;
    RF_CHECK(
        rf__call_integers(call, cand_to_user, &params->cand_to_user, &count, &params->cand_to_user_type));
    RF_FAIL_IF(count != params->candidates.count, RF_ERR_VALUE,
               "cand_to_user has %lld elements; expected an element for each of the %lld candidates of q",
               (long long)count, (long long)params->candidates.count);
    if (call->values[offsets].is_present) {
        RF_FAIL_IF(call->values[lengths].is_present, RF_ERR_VALUE,
                   "kv_lengths and kv_offsets are both given; expected one of them, since the offsets of "
                   "jagged keys state their lengths");
        RF_CHECK(rf__call_integers(call, offsets, &params->kv_offsets, &count, &params->kv_offsets_type));
        RF_FAIL_IF(count < 1, RF_ERR_VALUE,
                   "kv_offsets has no elements; expected one more than there are users");
        params->n_users = count - 1;
    }
    if (call->values[lengths].is_present) {
        RF_CHECK(rf__call_integers(call, lengths, &params->kv_lengths, &count, &params->kv_lengths_type));
        RF_FAIL_IF(count != params->n_users, RF_ERR_VALUE,
                   "kv_lengths has %lld elements; expected a length for each of the %lld users of k",
                   (long long)count, (long long)params->n_users);
        if (params->kv_lengths == NULL) params->kv_lengths = none;
    }
    return RF_OK;
}

static double scale_of(const rf__value *scale, int64_t dim) {
    if (scale->is_present) return scale->number;
    return dim > 0 ? 1 / sqrt((double)dim) : 1; /* all scores are 0 */
}

rf_status rf__attention_read(rf__call *call, bool self, rf__attention *attention) {
    enum { Q, K, V, CAND_TO_USER, SCALE, KV_LENGTHS, KV_OFFSETS, PATH, BOUNDS_CHECK };
#define TEXT(name, text) [name] = text,
    static const char *const paths[] = {RF__ATTENTION_PATH_LIST(TEXT) NULL};
#undef TEXT
    const int first = self; /* after q_user */
    int chosen = 0;
    *attention = (rf__attention){.self = self};
    rf_ikbo_attention_params *params = &attention->params;
    RF_CHECK(rf__call_device(call, first + Q));
    RF_CHECK(queries_read(call, first + Q, attention, &attention->q, &params->candidates));
    RF_CHECK(keys_read(call, first + K, call->values[first + KV_OFFSETS].is_present, attention));
    RF_CHECK(maps_read(call, first + CAND_TO_USER, first + KV_LENGTHS, first + KV_OFFSETS, params));
    if (self) {
        RF_CHECK(queries_read(call, 0, attention, &attention->q_user, &params->users));
        RF_FAIL_IF(params->users.count != params->n_users, RF_ERR_VALUE,
                   "q_user has %lld items; expected an item for each of the %lld users of k",
                   (long long)params->users.count, (long long)params->n_users);
    }
    params->scale = scale_of(&call->values[first + SCALE], params->dim);
    RF_CHECK(rf__call_choice(call, first + PATH, paths, &chosen));
    attention->path = (rf__attention_path)chosen;
    RF_CHECK(rf__call_bounds_check(call, first + BOUNDS_CHECK, &params->check_bounds));
    return rf__check_ikbo_attention_sizes(params);
}
