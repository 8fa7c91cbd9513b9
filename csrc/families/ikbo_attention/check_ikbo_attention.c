#include <float.h>
#include <stddef.h>

#include "families/ikbo_attention/check_ikbo_attention.h"

static const char operator_name[] = "ikbo_attention";

static bool is_integer(rf_int_type type) { return type == RF_INT32 || type == RF_INT64; }

/* Returns true if the bytes of `count` items of `elements` fit int64. */
static bool fits(int64_t count, int64_t rows, int64_t heads, int64_t dim) {
    enum { MOST_BYTES = 8 }; /* of an element */
    int64_t elements;
    return !__builtin_mul_overflow(count, rows, &elements) &&
           !__builtin_mul_overflow(elements, heads, &elements) &&
           !__builtin_mul_overflow(elements, dim > 0 ? dim : 1, &elements) &&
           !__builtin_mul_overflow(elements, MOST_BYTES, &elements);
}

static rf_status check_queries(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries,
                               const char *name) {
    RF__REFUSE_IF(queries->count < 0 || queries->queries < 0, RF_ERR_VALUE,
                  "the number of %s is " RF__I64 ", of " RF__I64 " queries; expected sizes of 0 or more",
                  name, queries->count, queries->queries);
    RF__REFUSE_IF(!fits(queries->count, queries->queries, params->heads, params->dim), RF_ERR_VALUE,
                  "the number of %s is " RF__I64 ", of " RF__I64 " queries, " RF__I64 " heads and " RF__I64
                  " dims; expected a size in bytes that fits int64",
                  name, queries->count, queries->queries, params->heads, params->dim);
    const bool any = queries->count > 0 && queries->queries > 0 && params->heads > 0 && params->dim > 0;
    RF__REFUSE_IF(any && (queries->q == NULL || queries->out == NULL), RF_ERR_VALUE,
                  "%s of %s is NULL; expected a pointer to its elements", queries->q == NULL ? "q" : "out",
                  name);
    return RF_OK;
}

static rf_status check_maps(const rf_ikbo_attention_params *params) {
    RF__REFUSE_IF(
        !is_integer(params->cand_to_user_type) || !is_integer(params->kv_lengths_type) ||
            !is_integer(params->kv_offsets_type),
        RF_ERR_TYPE,
        "cand_to_user_type is %d, kv_lengths_type %d and kv_offsets_type %d; expected RF_INT32 or RF_INT64",
        (int)params->cand_to_user_type, (int)params->kv_lengths_type, (int)params->kv_offsets_type);
    RF__REFUSE_IF(params->kv_lengths != NULL && params->kv_offsets != NULL, RF_ERR_VALUE, "%s",
                  "kv_lengths and kv_offsets are both given; expected one of them, since the offsets of "
                  "jagged keys state their lengths");
    RF__REFUSE_IF(params->candidates.count > 0 && params->cand_to_user == NULL, RF_ERR_VALUE, "%s",
                  "cand_to_user is NULL; expected a pointer to [count]");
    return RF_OK;
}

rf_status rf__check_ikbo_attention_sizes(const rf_ikbo_attention_params *params) {
    const float scale = (float)params->scale;
    RF__REFUSE_IF(params->dtype < RF_FLOAT32 || params->dtype > RF_FLOAT64, RF_ERR_TYPE,
                  "dtype is %d; expected RF_FLOAT32, RF_FLOAT16, RF_BFLOAT16 or RF_FLOAT64",
                  (int)params->dtype);
    RF__REFUSE_IF(params->n_users < 0 || params->positions < 0 || params->heads < 0 || params->kv_heads < 0 ||
                      params->dim < 0,
                  RF_ERR_VALUE,
                  "the call has " RF__I64 " users, " RF__I64 " positions, " RF__I64 " heads, " RF__I64
                  " heads of keys and " RF__I64 " dims; expected sizes of 0 or more",
                  params->n_users, params->positions, params->heads, params->kv_heads, params->dim);
    RF__REFUSE_IF(params->kv_heads == 0 ? params->heads > 0 : params->heads % params->kv_heads != 0,
                  RF_ERR_VALUE,
                  "the number of heads is " RF__I64 " of queries and " RF__I64
                  " of keys; expected a multiple of the heads of keys",
                  params->heads, params->kv_heads);
    RF__REFUSE_IF(!fits(params->kv_offsets != NULL ? 1 : params->n_users, params->positions, params->kv_heads,
                        params->dim),
                  RF_ERR_VALUE,
                  "keys have " RF__I64 " users, " RF__I64 " positions, " RF__I64 " heads and " RF__I64
                  " dims; expected a size in bytes that fits int64",
                  params->n_users, params->positions, params->kv_heads, params->dim);
    /* Also refuses NaN. Kernels take the maximum of scores before they multiply by the scale times
     * log2(e). */
    RF__REFUSE_IF(!(scale >= FLT_MIN && scale <= FLT_MAX / 2), RF_ERR_VALUE,
                  "scale is %g; expected a positive, normal number of float32 up to %g", params->scale,
                  (double)(FLT_MAX / 2));
    return RF_OK;
}

rf_status rf__check_ikbo_attention(const rf_ikbo_attention_params *params) {
    RF_CHECK(rf__check_ikbo_attention_sizes(params));
    RF_CHECK(check_maps(params));
    RF_CHECK(check_queries(params, &params->candidates, "candidates"));
    if (params->users.q != NULL) {
        RF__REFUSE_IF(params->users.count != params->n_users, RF_ERR_VALUE,
                      "users.count is " RF__I64 "; expected n_users, " RF__I64, params->users.count,
                      params->n_users);
        RF_CHECK(check_queries(params, &params->users, "users"));
    }
    const bool any = (params->kv_offsets != NULL || params->n_users > 0) && params->positions > 0 &&
                     params->kv_heads > 0 && params->dim > 0;
    RF__REFUSE_IF(any && (params->k == NULL || params->v == NULL), RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements", params->k == NULL ? "k" : "v");
    return RF_OK;
}
