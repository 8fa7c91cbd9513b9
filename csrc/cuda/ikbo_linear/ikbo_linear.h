/* What the files of the family share. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_H
#define RECFUSE_CUDA_IKBO_LINEAR_H

#include "cuda/driver/device.h"

/* The word of calls with this weight [m, k] of the last level. */
rf__cuda_error_word rf__ikbo_linear_error_word(const rf__cuda_device *device, const void *weight, int64_t m);

/* Raises what earlier calls with this weight have left. */
rf_status rf__ikbo_linear_check(const void *weight, int64_t m, const rf_cuda_stream *stream);

enum { RF__IKBO_TAIL_UNIT = 8 };

/* The last rows of k, which the products that are added to lack: tensor cores want k in whole units, and slow down by half
 * where it is not. In `dtype`, of 16 bits. */
typedef struct rf__ikbo_tail {
    int32_t rows; /* 1 to RF__IKBO_TAIL_UNIT - 1 */
    const void *weight; /* [m, rows] */
    int64_t weight_pitch[2]; /* elements from one row of m, and from one of k, to the next */
    const void *
        x; /* [count, rows, n], n a multiple of RF__IKBO_TAIL_UNIT, aligned to 16 bytes, so are its pitches */
    int64_t x_pitch[2]; /* elements from one item, and from one row of k, to the next */
} rf__ikbo_tail;

/* rf_ikbo_add_cuda without that: of a call that adds several times, and must not raise what it finds itself. The products
 * of `tail` are added too, unless it is NULL. */
rf_status rf__ikbo_add_launch(const rf_ikbo_add_params *params, const rf__ikbo_tail *tail,
                              const rf_cuda_stream *stream);

/* How a call is cut: a block has `rows` of a weight, `ranks` blocks all of them. */
typedef struct rf__ikbo_shape {
    int32_t rows, ranks;
    int32_t slots; /* of the ring */
    int32_t groups; /* of small.cu: strips of a block; 0: fused.cu */
    bool joined; /* of two levels: a candidate's k ends with its user's, so there are no sums of users */
    bool direct; /* weights that can be are read as they lie; else all are packed */
} rf__ikbo_shape;

/* What a kernel is compiled for. All of it int32_t: compared bytewise. */
typedef struct rf__ikbo_variant {
    int32_t dtype, activation, index_type, rows, ranks, slots, groups, joined, direct;
} rf__ikbo_variant;

enum { RF__IKBO_MOST_RANKS = 2, RF__IKBO_SMALL_MOST_ROWS = 4096 };

/* The shape of a kernel for a call that has rows and columns: RF_IKBO_KERNEL_BEST is what is faster. Slots below 2: a block
 * has too little shared memory. */
rf__ikbo_shape rf__ikbo_shape_of(const rf_ikbo_linear_params *params, const rf__cuda_device *device,
                                 rf_ikbo_kernel kernel);

/* Strips of 64 columns of an item; slots of a level's k: whole pairs; pieces of a level for small.cu. */
int64_t rf__ikbo_strips(const rf_ikbo_linear_params *params);
int32_t rf__ikbo_slots(const rf_ikbo_level *level);
int64_t rf__ikbo_pieces(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t l);

/* Whether tensor maps can read all weights as they lie. */
bool rf__ikbo_is_direct(const rf_ikbo_linear_params *params);

rf__ikbo_variant rf__ikbo_variant_of(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape);

/* What the call's errors are known by. */
static inline const void *rf__ikbo_weight_of(const rf_ikbo_linear_params *params) {
    return params->weight != NULL ? params->weight : params->levels[params->n_levels - 1].weight;
}

/* What of the workspace is a level's: bytes from its start; not set for what there is none of. */
typedef struct rf__ikbo_places {
    int64_t weight, sums, done;
} rf__ikbo_places;

/* Bytes of the workspace; `places`: of each level. */
int64_t rf__ikbo_places_of(const rf_ikbo_linear_params *params, const rf__ikbo_variant *variant,
                           rf__ikbo_places *places);

/* Arguments of pack.cu and of the kernel behind it. In the device's context. `fused` and `pack`: zeros. */
struct rf_fused_args;
struct rf_pack_args;
rf_status rf__ikbo_args_of(const rf__cuda_device *device, const rf_ikbo_linear_params *params,
                           const rf__ikbo_variant *variant, uint8_t *workspace, const rf__ikbo_places *places,
                           struct rf_fused_args *fused, struct rf_pack_args *pack);

/* rf_ikbo_linear_takes, with the shape; and rf_ikbo_linear_cuda of what that takes, without looking at it again. `out` and the
 * allocator may be given in between. */
bool rf__ikbo_linear_shape(const rf_ikbo_linear_params *params, int32_t ordinal, rf__ikbo_shape *shape);
rf_status rf__ikbo_linear_run(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape,
                              const rf_cuda_stream *stream);

#endif
