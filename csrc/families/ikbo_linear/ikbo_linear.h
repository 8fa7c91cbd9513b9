/* ikbo_linear on a GPU: choice of a kernel, lowering, and the additional launches for torch's matmuls. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_H
#define RECFUSE_CUDA_IKBO_LINEAR_H

#include "gpu/launches/launches.h"

enum { RF__IKBO_MOST_RANKS = 2, RF__IKBO_SMALL_MOST_ROWS = 4096, RF__IKBO_TAIL_UNIT = 8 };

/* Sets the error word of launches: that of all calls with this weight [m, k] of the last level. */
void rf__ikbo_linear_errors(const void *weight, int64_t m, rf__launches *launches);

/* Raises errors that earlier calls with this weight have left. */
rf_status rf__ikbo_linear_check(const void *weight, int64_t m, const rf_cuda_stream *stream);

/* The last rows of k, which the products in `out` lack: tensor cores need k in whole units, and are twice as
 * slow otherwise. In `dtype`, of 16 bits. */
typedef struct rf__ikbo_tail {
    int32_t rows; /* 1 to RF__IKBO_TAIL_UNIT - 1 */
    const void *weight; /* [m, rows] */
    int64_t weight_pitch[2]; /* elements between rows of m, and between rows of k */
    const void *
        x; /* [count, rows, n], n a multiple of RF__IKBO_TAIL_UNIT, aligned to 16 bytes, so are its pitches */
    int64_t x_pitch[2]; /* elements from one item, and from one row of k, to the next */
} rf__ikbo_tail;

/* Lowers one sum. The products of `tail` are added too, unless it is NULL. Does not set launches->checks: a
 * call that adds several times must not raise an error that it finds itself. */
rf_status rf__ikbo_add_lower(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                             rf__launches *launches);

/* Lowers and runs one sum without raising earlier errors. */
rf_status rf__ikbo_add_launch(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                              const rf_cuda_stream *stream);

/* The cut of a call: a block has `rows` of a weight, `ranks` blocks have all of them. */
typedef struct rf__ikbo_shape {
    int32_t rows, ranks;
    int32_t slots; /* of the ring */
    int32_t groups; /* of small.cu: strips of a block; 0: ikbo_linear_fused.cu */
    bool joined; /* of two levels: a candidate's k is followed by its user's, so there are no sums of users */
    bool direct; /* weights that tensor maps can read are read in place; else all are packed */
} rf__ikbo_shape;

/* The constants that a kernel is compiled for. All of it int32_t: compared bytewise. */
typedef struct rf__ikbo_variant {
    int32_t dtype, activation, index_type, rows, ranks, slots, groups, joined, direct;
} rf__ikbo_variant;

static inline bool rf__ikbo_is_fused(const rf__ikbo_variant *variant) { return variant->groups == 0; }

/* The shape of a kernel for a call that has rows and columns: RF_IKBO_KERNEL_BEST is the faster kernel's.
 * Slots below 2: a block has too little shared memory. */
rf__ikbo_shape rf__ikbo_shape_of(const rf_ikbo_linear_params *params, const rf__gpu *gpu,
                                 rf_ikbo_kernel kernel);

/* Strips of 64 columns of an item; slots of a level's k: whole pairs; tasks of a level for small.cu. */
int64_t rf__ikbo_strips(const rf_ikbo_linear_params *params);
int32_t rf__ikbo_slots(const rf_ikbo_level *level);
int64_t rf__ikbo_tasks(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t l);

/* Returns true if tensor maps can read all weights in place. */
bool rf__ikbo_is_direct(const rf_ikbo_linear_params *params);

rf__ikbo_variant rf__ikbo_variant_of(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape);

/* Bytes of an item's sums; of a level's packed weight; whether a level's sums go through memory. */
int64_t rf__ikbo_sums_bytes(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant);
int64_t rf__ikbo_packed_bytes(const rf_ikbo_level *level, const rf__ikbo_variant *variant);
bool rf__ikbo_has_sums(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant, int32_t l);

/* Positions of a level in the workspace, in bytes. Unset if the level has no such part. */
typedef struct rf__ikbo_workspace {
    int64_t weight; /* packed */
    int64_t sums, done; /* sums, for ikbo_linear_fused.cu with those of a bias-only item, and their counter */
} rf__ikbo_workspace;

/* Returns the bytes of the workspace; writes `levels` [params->n_levels]. */
int64_t rf__ikbo_workspace_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                              rf__ikbo_workspace *levels);

/* Fills the arguments of pack.cu and of the kernel after it, which are zeros, except for tensor maps and the
 * error word. Pointers into the workspace hold positions in it. */
struct rf_fused_args;
struct rf_pack_args;
void rf__ikbo_args_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                      const rf__ikbo_workspace *workspace, struct rf_fused_args *fused,
                      struct rf_pack_args *pack);

/* Lowers a layer that has such a shape on this GPU. */
rf_status rf__ikbo_linear_lower(const rf__gpu *gpu, const rf_ikbo_linear_params *params,
                                const rf__ikbo_shape *shape, rf__launches *launches);

/* rf_ikbo_linear_takes that also writes the shape. */
bool rf__ikbo_linear_shape(const rf_ikbo_linear_params *params, int32_t ordinal, rf__ikbo_shape *shape);
/* rf_ikbo_linear_cuda of a call that rf__ikbo_linear_shape takes, without checking it again. `out` and the
 * allocator may be set between the two. */
rf_status rf__ikbo_linear_run(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape,
                              const rf_cuda_stream *stream);

#endif
