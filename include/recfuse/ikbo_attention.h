/* Attention of candidates to their users' histories, with many candidates per user: a user's keys and values
 * are read for all of its candidates at once (in-kernel broadcast optimization, IKBO, section 3).
 *
 *     out[c] = softmax(scale * q[c] . k[u(c)]^T) . v[u(c)]    for each head; without a mask
 *
 * `heads` query heads share `kv_heads` heads of keys and values: query head h has head h / (heads /
 * kv_heads).
 */
#ifndef RECFUSE_API_IKBO_ATTENTION_H
#define RECFUSE_API_IKBO_ATTENTION_H

#include "recfuse/cuda.h"

RF_BEGIN_DECLARATIONS

/* Queries, and their results. An item, a candidate or a user, has `queries` of them. */
typedef struct rf_ikbo_queries {
    const void *q; /* [count, queries, heads, dim] of dtype; the dims of a head are contiguous */
    int64_t q_pitch[3]; /* elements from one item, query and head to the next */
    int64_t count, queries;
    void *out; /* [count, queries, heads, dim] of dtype, contiguous; zeros for users without keys */
    float *lse; /* [count, heads, queries] contiguous: natural logarithm of the softmax's sum, -inf for users
              * without keys; or NULL: not computed */
} rf_ikbo_queries;

typedef struct rf_ikbo_attention_params {
    rf_ikbo_queries candidates;
    rf_ikbo_queries users; /* self-attention: item u attends to user u, and count is n_users; q NULL: none */
    /* [n_users, positions, kv_heads, dim] of dtype, the dims of a head contiguous; pitches are elements
     * between users, positions and heads. Jagged: [positions, kv_heads, dim] of all users together, pitch[0]
     * unused. */
    const void *k, *v;
    int64_t k_pitch[3], v_pitch[3];
    int64_t n_users, positions, heads, kv_heads, dim; /* heads is a multiple of kv_heads */
    const void *kv_lengths; /* [n_users] of positions that count, each in [0, positions]; NULL: all of them */
    rf_int_type kv_lengths_type;
    const void
        *kv_offsets; /* [n_users + 1] into positions, ascending; not NULL: jagged, and kv_lengths is NULL */
    rf_int_type kv_offsets_type;
    const void *cand_to_user; /* [candidates.count], each in [0, n_users), in any order */
    rf_int_type cand_to_user_type;
    double scale; /* of the scores; positive, and a normal number of float32 too, up to half the greatest */
    rf_dtype dtype; /* of q, k, v and out */
    bool check_bounds; /* off: invalid contents are not reported by a GPU */
    const rf_cuda_allocator *allocator; /* [1]: gives the workspace of the call */
} rf_ikbo_attention_params;

/* Returns true if rf_ikbo_attention_cuda accepts these sizes, types and addresses on a device; outputs and
 * allocator may be NULL. Never waits; false also if there is no such device. */
RF_API bool rf_ikbo_attention_takes(const rf_ikbo_attention_params *params, int32_t device);

/* Computes in one launch, after a small launch that groups candidates by user; pointers are of the device.
 * Does not wait for the stream; may be captured. Keys and values beyond a user's length are never used.
 * RF_ERR_UNSUPPORTED, with the reason, if rf_ikbo_attention_takes returns false. Invalid contents are safe: a
 * candidate with an invalid user gets zeros and an lse of -inf, a length outside [0, positions] is clamped,
 * and a user whose offsets do not ascend in [0, positions] has no keys; the first error is recorded, and
 * raised by a later call with these heads, kv_heads and dim or by rf_cuda_check. Also RF_ERR_VALUE,
 * RF_ERR_TYPE, RF_ERR_CUDA, RF_ERR_COMPILE, RF_ERR_OUT_OF_MEMORY. */
RF_API rf_status rf_ikbo_attention_cuda(const rf_ikbo_attention_params *params, const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
