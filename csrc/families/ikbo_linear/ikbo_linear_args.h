/* The arguments of the family's kernels; see rf_ikbo_add_params and rf_ikbo_linear_params. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_ARGS_H
#define RECFUSE_CUDA_IKBO_LINEAR_ARGS_H

#include "gpu/device/error_word.h"
#include "gpu/device/tensor_map_type.h"
#include "recfuse/ikbo_codes.h"

typedef struct rf_broadcast_add_args {
    rf_u8 *out;             /* [count, item_vectors] vectors */
    const rf_u8 *base;      /* [parents, item_vectors] vectors */
    const RF_INDEX *parent; /* [count], NULL: each item its own */
    const rf_u8 *bias;      /* [rows], or [columns] with bias_on_columns, elements; NULL: no bias */
    rf_i64 count, parents;
    rf_u32 item_vectors; /* of an item: rows * columns elements */
    rf_u32 columns;
    rf_i32 bias_on_columns;
    rf_i32 activation; /* rf_activation */
    rf_i32 replace;    /* out is not read */
    rf_i32 map;        /* as in rf_ikbo_add_params */
    rf_i32 report;     /* an invalid parent is recorded */
    rf_i32 tail;       /* rows of k that the products in `out` lack, 0 to 7 */
    rf_error_word errors;
    /* Of these rows, as of rf__ikbo_tail; `columns` and x are in whole vectors. */
    const rf_u8 *tail_weight, *tail_x;
    rf_i64 tail_weight_pitch[2], tail_x_pitch[2]; /* elements */
} rf_broadcast_add_args;
RF_SIZE_IS(rf_broadcast_add_args, 144);

/* The shape of ikbo_linear_fused.cu's work. A strip is 64 columns of an item's matrix; a warpgroup has one at
 * a time, RF_FUSED_GROUPS of them share a block's rows of the weight, RF_ROWS of a block and RF_RANKS blocks
 * to a cluster. */
enum {
    RF_FUSED_COLUMNS = 64, /* of a strip */
    RF_FUSED_K = 32, /* of a slot of the ring */
    RF_FUSED_GROUPS = 3, /* warpgroups that multiply */
    RF_FUSED_THREADS = (RF_FUSED_GROUPS + 1) * 128,
    RF_FUSED_PART = 32, /* rows that leave at once */
    RF_FUSED_STAGES = 3, /* parts of a warpgroup on their way out */
    RF_FUSED_ENTRIES = 4, /* turns whose descriptions are kept */
    RF_FUSED_MOST_LEVELS = 4,
    RF_FUSED_MOST_ROWS = 224, /* of a block: limited by the registers of its sums */
};

/* Bytes: of a slot's strips and weights, of a block's sums for one strip, of all shared memory: joined levels
 * have no sums there. */
#define RF_FUSED_X_BYTES (RF_FUSED_K * RF_FUSED_COLUMNS * 2)
#define RF_FUSED_WEIGHT_BYTES(rows) ((rows) * RF_FUSED_K * 2)
#define RF_FUSED_SLOT_BYTES(rows) (RF_FUSED_GROUPS * RF_FUSED_X_BYTES + RF_FUSED_WEIGHT_BYTES(rows))
#define RF_FUSED_SUMS_BYTES(rows) ((rows) * RF_FUSED_COLUMNS * 4)
#define RF_FUSED_STAGE_BYTES (RF_FUSED_PART * RF_FUSED_COLUMNS * 2)
#define RF_FUSED_SMALL_BYTES 2048 /* barriers, descriptions, and up to 1,024 bytes for alignment */
#define RF_FUSED_SHARED_BYTES(rows, slots, joined)                \
    (RF_FUSED_SMALL_BYTES + (slots) * RF_FUSED_SLOT_BYTES(rows) + \
     ((joined) ? 0 : RF_FUSED_SUMS_BYTES(rows)) + RF_FUSED_GROUPS * RF_FUSED_STAGES * RF_FUSED_STAGE_BYTES)

typedef struct rf_fused_level {
    rf_tensor_map x; /* [count, k, n]; boxes of RF_FUSED_COLUMNS x RF_FUSED_K / RF_RANKS */
    rf_tensor_map rows; /* direct: the weight in place, [1, m, k]; boxes of RF_FUSED_K x RF_ROWS */
    /* Otherwise: packed by pack.cu, [slots, ranks, RF_ROWS, RF_FUSED_K]; those of joined levels are
     * consecutive, the last level's first. */
    const rf_u8 *weight;
    const RF_INDEX *parent; /* [count], NULL at level 0 */
    /* [count + 1, strips, RF_RANKS, RF_ROWS * RF_FUSED_COLUMNS] of all levels except the last: an item's sums
     * with those of its parents, in the order of a warpgroup's registers. For ikbo_linear_fused.cu the last
     * one is the bias-only item. NULL if levels are joined, and so is `done`. */
    float *sums;
    rf_u32 *done; /* strips x ranks of this level that are in `sums` */
    rf_i32 count;
    rf_i32 slots; /* of k, a multiple of 2 */
    rf_i32 cost; /* of a strip: steps of 16 of k */
    rf_i32 unused;
} rf_fused_level;

typedef struct rf_fused_args {
    rf_fused_level levels[RF_FUSED_MOST_LEVELS];
    rf_tensor_map out; /* [count of the last, m, n]; boxes of RF_FUSED_COLUMNS x RF_FUSED_PART */
    rf_i32 n_levels;
    rf_i32 strips; /* of an item */
    rf_i32 chain; /* the name of a parent in messages: see rf_ikbo_linear_params */
    rf_i32 report;
    rf_error_word errors;
    rf_i32 tickets; /* of small.cu: blocks claim tasks by a ticket; else by blockIdx, and all run at once */
    rf_i32 ranks; /* of small.cu: blocks that have all rows */
    rf_i32 m;
    rf_i32 unused;
    const rf_u16 *bias; /* [m] or NULL */
} rf_fused_args;

typedef struct rf_pack_level {
    const rf_u16 *weight; /* [m, k], rows `pitch` elements apart */
    rf_i64 pitch;
    rf_u8 *packed; /* see rf_fused_level */
    float *bias; /* the bias-only item in `sums`, or NULL */
    rf_u32 *done; /* set to 0, and the following ticket; may be NULL */
    rf_i32 k;
    rf_i32 slots; /* 0: the weight is not packed */
} rf_pack_level;

typedef struct rf_pack_args {
    rf_pack_level levels[RF_FUSED_MOST_LEVELS];
    const rf_u16 *bias; /* [m] or NULL */
    rf_i32 n_levels, m, strips, ranks;
} rf_pack_args;
RF_SIZE_IS(rf_fused_level, 384);
RF_SIZE_IS(rf_fused_args, 1792);
RF_SIZE_IS(rf_pack_level, 48);
RF_SIZE_IS(rf_pack_args, 216);

/* Of small.cu: a block has RF_ROWS rows of a weight for RF_GROUPS strips. */
enum { RF_SMALL_TICKET = 32 }; /* position of the next task's number, after the first level's counter */
#define RF_SMALL_SLOT_BYTES(rows, groups) (RF_FUSED_WEIGHT_BYTES(rows) + (groups) * RF_FUSED_X_BYTES)
#define RF_SMALL_SHARED_BYTES(rows, groups, slots)                        \
    (RF_FUSED_SMALL_BYTES + (slots) * RF_SMALL_SLOT_BYTES(rows, groups) + \
     (groups) * (rows) * RF_FUSED_COLUMNS * 2)

#endif
