/* The arguments of the kernels of the one launch; see rf_ikbo_attention_params. */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_ARGS_H
#define RECFUSE_CUDA_IKBO_ATTENTION_ARGS_H

#include "gpu/device/tensor_map_type.h"
#include "families/ikbo_attention/attention_keys_args.h"

/* The shape of ikbo_attention_fused.cu's work. A row is one query of one head; a warpgroup has
 * RF_ATTENTION_ROWS of them, the warpgroups of a block share the keys of one user and one head: their rows
 * are a tile. */
enum {
    RF_ATTENTION_GROUPS = 2, /* warpgroups that multiply */
    RF_ATTENTION_THREADS = (RF_ATTENTION_GROUPS + 1) * 128,
    RF_ATTENTION_ROWS = 64, /* of a warpgroup */
    RF_ATTENTION_TILE_ROWS = RF_ATTENTION_GROUPS * RF_ATTENTION_ROWS,
    RF_ATTENTION_ATOM = 64, /* columns of a row of shared memory of 128 bytes */
    RF_ATTENTION_Q_SLOTS = 2, /* tiles whose queries are kept */
    RF_ATTENTION_TILES = 4, /* tiles that are described in advance */
    RF_ATTENTION_MOST_PARTS = 8, /* of a tile's keys */
    RF_ATTENTION_LEAST_BLOCKS = 2, /* of keys, per part */
    RF_ATTENTION_FIRST_BYTES = 16 << 20, /* of keys and values, prefetched before tiles are known */
    RF_ATTENTION_SPLIT_TIMES = 2, /* parts of tiles: up to this many per block of the grid */
    RF_ATTENTION_SMALL_BYTES = 3072, /* barriers, tiles, rows, and up to 1,024 bytes for alignment */
};

/* Bytes for heads of `atoms` * 64 columns: of a block of keys or values, of all shared memory. */
#define RF_ATTENTION_BLOCK_BYTES(atoms, keys) ((atoms) * (keys) * RF_ATTENTION_ATOM * 2)
#define RF_ATTENTION_Q_BYTES(atoms) \
    (RF_ATTENTION_Q_SLOTS * RF_ATTENTION_BLOCK_BYTES(atoms, RF_ATTENTION_TILE_ROWS))
/* Of a part of a tile's keys: its sums, shifts and sums of weights, in float32. */
#define RF_ATTENTION_PART_BYTES(dim) (RF_ATTENTION_TILE_ROWS * ((dim) + 8) * 4)
#define RF_ATTENTION_SHARED_BYTES(atoms, keys, slots) \
    (RF_ATTENTION_SMALL_BYTES + RF_ATTENTION_Q_BYTES(atoms) + (slots) * RF_ATTENTION_BLOCK_BYTES(atoms, keys))

/* A user's candidates, keys and tiles, as ikbo_attention_group.cu finds them, in the order in which blocks
 * claim tiles. */
typedef struct rf_attention_work {
    rf_i32 user; /* n_users: candidates with an invalid user, whose results are zeros */
    rf_i32 first; /* of its candidates, in `members` */
    rf_i32 candidates; /* their number */
    rf_i32 key; /* the first of its keys in a jagged k; else 0 */
    rf_i32 keys;
    rf_i32 tile; /* the first of its tiles */
    rf_i32 rows; /* for one head of keys */
    rf_i32 unused;
} __attribute__((aligned(16))) rf_attention_work;
RF_SIZE_IS(rf_attention_work, 32);

/* The data that the launches of a call share; written by ikbo_attention_group.cu each time. */
typedef struct rf_attention_plan {
    rf_i32 tiles; /* in all */
    rf_i32 claimed; /* tiles, or parts, that blocks have claimed after their first */
    rf_i32 whole_tiles; /* tiles that are not cut: the keys of later tiles are cut into `parts` */
    rf_i32 parts;
} __attribute__((aligned(16))) rf_attention_plan;
RF_SIZE_IS(rf_attention_plan, 16);

/* Pitches in bytes: from one item, query, head to the next. */
typedef struct rf_attention_queries {
    const rf_u8 *q; /* [items, queries, heads, dim] */
    rf_u8 *out; /* as above, contiguous */
    float *lse; /* [items, heads, queries], or NULL */
    rf_i64 item, query, head;
    rf_i32 queries; /* per item; 0: none */
    rf_i32 unused;
} rf_attention_queries;
RF_SIZE_IS(rf_attention_queries, 56);

typedef struct rf_attention_group_args {
    rf_integers map; /* [candidates] */
    rf_attention_users keys;
    rf_attention_plan *plan;
    rf_attention_work *work; /* [n_users + 1] */
    rf_i32 *counts; /* [n_users + 1] */
    rf_i32 *order; /* [n_users + 1] */
    rf_i32 *ranks; /* [candidates] */
    rf_i32 *members; /* [candidates]: those of a user are adjacent */
    rf_i32 candidates;
    rf_i32 user_rows, candidate_rows; /* rows that one user or one candidate gives to a head of keys */
    rf_i32 kv_heads;
    rf_i32 report; /* invalid contents are recorded */
    rf_i32 block_keys; /* of a block of keys */
    rf_i32 *
        ended; /* [RF_ATTENTION_SPLIT_TIMES * grid * RF_ATTENTION_GROUPS]: parts that have ended; NULL: no tile has parts */
    rf_i32 grid; /* of ikbo_attention_fused.cu */
    rf_i32 unused;
    rf_error_word errors;
} rf_attention_group_args;
RF_SIZE_IS(rf_attention_group_args, 176);

typedef struct rf_attention_args {
    rf_tensor_map k, v; /* [users, positions, heads, dim]; boxes of RF_KEYS positions x RF_ATTENTION_ATOM */
    /* [items, queries, heads, dim]; boxes of RF_SEGMENT queries x RF_ATTENTION_ATOM; not used if that is 1 */
    rf_tensor_map q, out, self_q, self_out;
    rf_attention_plan *plan;
    const rf_attention_work *work; /* [n_users + 1] */
    const rf_i32 *members;
    rf_attention_queries candidates, self;
    rf_i32 n_users, dim, heads, kv_heads;
    rf_i32 one_user; /* of the maps of k and v: jagged, or the same for all */
    float scale; /* times log2(e) */
    rf_i32 positions; /* of each user; 0: given by lengths */
    rf_i32 same_keys; /* of all users */
    float *parts; /* [RF_ATTENTION_SPLIT_TIMES * grid], of RF_ATTENTION_PART_BYTES each */
    rf_i32 *ended; /* as above */
} rf_attention_args;
RF_SIZE_IS(rf_attention_args, 1024);

#endif
