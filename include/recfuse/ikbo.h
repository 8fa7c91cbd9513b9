/* Linear layers over features of users and of candidates, with many candidates per user: each user's part is
 * computed once and added to those of all of its candidates (in-kernel broadcast optimization, IKBO).
 *
 *     out[c] = activation(W_last . x_last[c] + ... + W_1 . x_1[p(c)] + W_0 . x_0[p(p(c))] + bias)
 *
 * Levels go from the broadest (0: users) to the last (candidates); an item of a level belongs to an item of
 * the previous level, its parent. An item of x is a matrix [k, n], whose product with a weight [m, k] is [m,
 * n].
 */
#ifndef RECFUSE_API_IKBO_H
#define RECFUSE_API_IKBO_H

#include "recfuse/cuda.h"
#include "recfuse/ikbo_codes.h"

RF_BEGIN_DECLARATIONS

/* One level's products, to which the parents' are added. */
typedef struct rf_ikbo_add_params {
    void *out; /* [count, m, n] of dtype, contiguous: the products, replaced by the result */
    int64_t count, m, n; /* >= 0; m * n < 2^31 */
    rf_dtype
        dtype; /* of out, base and bias; RF_FLOAT64 too. Sums are in float32 (RF_FLOAT64: float64), rounded
                * once */
    const void *base; /* [parents, m, n] of dtype, contiguous, not overlapping out */
    int64_t parents;
    const void *
        parent; /* [count] of parent_type, each in [0, parents), any order; NULL: item c of base for item c */
    rf_int_type parent_type;
    const void *bias; /* [m], or [n] with bias_on_n, of dtype; may be NULL */
    bool bias_on_n; /* m is 1: items are rows of features */
    rf_activation activation;
    bool replace; /* out is base's items only, without its old values: a gather */
    bool check_bounds; /* off: an invalid parent is undefined behaviour on the CPU, unreported on a GPU */
    int32_t
        map; /* `parent` in messages: "maps[map]" of ikbo_linear_chain; -1: "cand_to_user" of ikbo_linear */
    const void
        *weight; /* [m, k] of the last level, may be NULL: later calls with its address and m raise the errors
                 * of this call */
} rf_ikbo_add_params;

/* Adds. `executor` may be NULL: the caller's thread. Returns when all is written; allocates nothing.
 * RF_ERR_VALUE, RF_ERR_TYPE, RF_ERR_INDEX (an invalid parent; then `out` is as it was), RF_ERR_INTERNAL (the
 * executor failed). */
RF_API rf_status rf_ikbo_add_cpu(const rf_ikbo_add_params *params, const rf_executor *executor);

/* As above, on a GPU, with its pointers: one kernel in the stream, without waiting; it may be captured. The
 * kernel is compiled at its first use, or read from the cache. An invalid parent counts as an item of zeros;
 * the first is recorded, and raised by a later call as in rf_embedding_bag_cuda. Also RF_ERR_UNSUPPORTED
 * (2^31 blocks of 256 threads or more), RF_ERR_CUDA, RF_ERR_COMPILE. */
RF_API rf_status rf_ikbo_add_cuda(const rf_ikbo_add_params *params, const rf_cuda_stream *stream);

enum { RF_IKBO_MOST_LEVELS = 4 };

typedef struct rf_ikbo_level {
    const void *weight; /* [m, k] of dtype, weight_pitch elements from row to row */
    int64_t weight_pitch;
    const void *x; /* [count, k, n] of dtype; the n of a row are contiguous */
    int64_t x_pitch[2]; /* elements from one item to the next, and from one row of k to the next */
    int64_t count, k;
    const void *parent; /* [count] of parent_type: items of the level before, in any order; NULL at level 0 */
    rf_int_type parent_type;
} rf_ikbo_level;

/* The kernels of a whole layer: a launch of persistent blocks, for many items; a launch of small pieces, for
 * few. */
typedef enum rf_ikbo_kernel {
    RF_IKBO_KERNEL_BEST,
    RF_IKBO_KERNEL_FUSED,
    RF_IKBO_KERNEL_SMALL,
} rf_ikbo_kernel;

/* A whole layer in one launch. Pointers are of the device. */
typedef struct rf_ikbo_linear_params {
    rf_ikbo_level levels[RF_IKBO_MOST_LEVELS];
    int32_t n_levels; /* 2 to RF_IKBO_MOST_LEVELS */
    rf_dtype dtype; /* of weights, x, out and bias */
    int64_t m, n;
    void *out; /* [count of the last level, m, n] of dtype, contiguous */
    const void *bias; /* [m] of dtype, contiguous; may be NULL */
    rf_activation activation;
    bool check_bounds; /* off: an invalid parent is not reported */
    bool chain; /* messages name "maps[i]" of ikbo_linear_chain; else "cand_to_user" of ikbo_linear */
    rf_ikbo_kernel kernel;
    const rf_cuda_allocator *allocator; /* [1]: gives the workspace of the call */
    /* Set if levels[] has a copy of the last level's weight; else NULL. Later calls with its address and m
     * raise the errors of this call. */
    const void *weight; /* [m, k], the caller's; may be NULL */
} rf_ikbo_linear_params;

/* Returns true if rf_ikbo_linear_cuda accepts these sizes, types and addresses on a device, and its workspace
 * is at most a GiB or eight times the products of all levels except the last. Never waits; false also if
 * there is no such device. */
RF_API bool rf_ikbo_linear_takes(const rf_ikbo_linear_params *params, int32_t device);

/* The kernel that RF_IKBO_KERNEL_BEST is for such a call, which it takes. */
RF_API rf_ikbo_kernel rf_ikbo_linear_kernel(const rf_ikbo_linear_params *params, int32_t device);

/* Computes a layer in the stream without waiting; it may be captured. RF_ERR_UNSUPPORTED, with the reason, if
 * rf_ikbo_linear_takes returns false. Invalid parents are treated as by rf_ikbo_add_cuda. */
RF_API rf_status rf_ikbo_linear_cuda(const rf_ikbo_linear_params *params, const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
