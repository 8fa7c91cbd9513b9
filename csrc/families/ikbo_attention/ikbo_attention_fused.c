/* rf_ikbo_attention_cuda: which calls the fused kernel takes, and running them. */
#include "families/ikbo_attention/check_ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention_args.h"

enum { GRAIN = 16 };

/* Returns true if rows can be copied in pieces of 16 bytes. `zero`: one row may represent all. */
static bool is_even(const void *data, const int64_t *pitch, const int64_t *sizes, rf_dtype dtype, bool zero) {
    const int64_t most = (int64_t)1 << 40;
    for (int i = 0; i < 3; i++) {
        const int64_t step = rf__elements_bytes(dtype, pitch[i]);
        if (sizes[i] > 1 && (step % GRAIN != 0 || step < (zero ? 0 : GRAIN) || step >= most)) return false;
    }
    return (uintptr_t)data % GRAIN == 0;
}

static bool is_even_queries(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries) {
    const int64_t sizes[3] = {queries->count, queries->queries, params->heads};
    return is_even(queries->q, queries->q_pitch, sizes, params->dtype, true) &&
           (uintptr_t)queries->out % GRAIN == 0;
}

/* Returns the reason why the kernel refuses the call, or NULL. */
static const char *refusal(const rf__gpu *gpu, const rf_ikbo_attention_params *params) {
    const int64_t most = INT32_MAX / 2;
    const int64_t sizes[3] = {rf__attention_has_one_user(params) ? 1 : params->n_users, params->positions,
                              params->kv_heads};
    const rf_ikbo_queries *sets[2] = {&params->candidates, &params->users};
    if (gpu->cc_major != 9 || gpu->cc_minor != 0) return "the GPU is not one of compute capability 9.0";
    if (params->dtype != RF_FLOAT16 && params->dtype != RF_BFLOAT16)
        return "the dtype is neither float16 nor bfloat16";
    if (params->dim < 1 || params->dim % 8 != 0 || rf__attention_shape_of(params->dim) == NULL)
        return "the dims of a head are no multiple of 8 from 8 to 256";
    if (rf__attention_shared_bytes(rf__attention_shape_of(params->dim)) > gpu->shared_per_block_optin)
        return "a block has too little shared memory";
    if (params->n_users < 1 || params->positions < 1 || params->heads < 1) return "there are no keys";
    if (params->n_users > most || params->positions > most || params->kv_heads > most)
        return "k has 2^30 users, positions or heads, or more";
    if (!is_even(params->k, params->k_pitch, sizes, params->dtype, false) ||
        !is_even(params->v, params->v_pitch, sizes, params->dtype, false))
        return "the heads of k or v do not lie a multiple of 16 bytes apart";
    int64_t left = most; /* a user may have all rows of both sets */
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !rf__attention_has_self(params)) continue;
        const rf_ikbo_queries *set = sets[i];
        int64_t rows;
        if (set->count > most || __builtin_mul_overflow(set->count, set->queries, &rows) ||
            __builtin_mul_overflow(rows, params->heads, &rows) || rows > left)
            return "q has 2^30 candidates or queries of a head, or more";
        left -= rows;
        if (set->count > 0 && set->queries > 0 && !is_even_queries(params, set))
            return "the heads of q do not lie a multiple of 16 bytes apart";
    }
    if (rf__attention_tiles(params) > most) return "there are 2^30 tiles or more";
    return NULL;
}

bool rf_ikbo_attention_takes(const rf_ikbo_attention_params *params, int32_t ordinal) {
    const rf__cuda_device *device = NULL;
    return rf__check_ikbo_attention_sizes(params) == RF_OK &&
           rf__cuda_device_get(ordinal, &device) == RF_OK && refusal(&device->gpu, params) == NULL;
}

static rf_status run(const rf__cuda_device *device, const rf_ikbo_attention_params *params, void *stream) {
    rf__launches launches;
    rf__launches_init(&launches, "ikbo_attention");
    return rf__launches_finish(rf__ikbo_attention_lower(&device->gpu, params, &launches), device, &launches,
                               params->allocator, stream);
}

rf_status rf_ikbo_attention_cuda(const rf_ikbo_attention_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__check_ikbo_attention(params));
    RF_FAIL_IF(params->allocator == NULL, RF_ERR_VALUE, "recfuse.ikbo_attention: allocator is NULL");
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    const char *reason = refusal(&device->gpu, params);
    RF_FAIL_IF(reason != NULL, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: path \"fused\" does not take this call: %s. Use path \"auto\" or "
               "\"packed\".",
               reason);
    return run(device, params, stream->stream);
}
