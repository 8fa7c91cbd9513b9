/* The small path of the backward pass, for tables of few rows that only one feature looks up: shared by its
 * host C and its kernels, lists.cu and small_rows.cu. Read by C11 and by NVRTC, as
 * "families/fused_backward/small/backward_small_args.h" on both sides.
 *
 * lists.cu sorts the lookups of each such feature by row, in one block's shared memory; small_rows.cu pools
 * the rows from the lists and passes the sums to the epilogue (epilogue.cuh). No keys, no sort of all lookups, no
 * partial sums in memory.
 */
#ifndef RECFUSE_CUDA_BACKWARD_SMALL_ARGS_H
#define RECFUSE_CUDA_BACKWARD_SMALL_ARGS_H

#include "families/fused_backward/backward_args.h"
#include "families/fused_backward/device/optimizer_steps.h"

enum {
    /* A feature is small if its table has at most this many rows and the call at most this many bags per
     * feature, if its columns are a multiple of four and it is a sum or a mean without sample weights. With
     * more bags the general path takes 11 % less time. */
    RF_SMALL_MOST_ROWS = 16384,
    RF_SMALL_MOST_BAGS = 4096,
    /* lists.cu */
    RF_SMALL_FEW_ROWS = 128, /* so few that many lanes count the same: parts.cuh lists their lookups */
    RF_SMALL_LISTS_BLOCK = 512,
    RF_SMALL_LISTS_ROWS = 8192, /* of a task, at most */
    RF_SMALL_LISTS_BLOCKS = 2, /* per SM */
    RF_SMALL_LISTS_LEAST_SHARED = 48 << 10, /* bytes */
    /* small_rows.cu */
    RF_SMALL_COLUMNS = 32, /* of a task whose gradients are staged, at most; a power of two */
    RF_SMALL_WHOLE_COLUMNS = 128, /* the same if they are gathered; and of row-wise Adagrad's rows */
    RF_SMALL_LONG = 256 /* lookups of a row; rows with more are pooled by the whole block */
};

/* Columns of a lane: a single vector if gradients are staged, so that adjacent lanes read and write whole
 * sectors of a row. */
#define RF_SMALL_LANE_COLUMNS(staged) ((staged) ? 4 : 8)
/* Threads of a block of small_rows.cu: as many as the registers allow. Two blocks per SM, three if gradients
 * are gathered for SGD or are the output. */
#define RF_SMALL_THREADS(staged, epilogue)                                 \
    (rf_optimizer_column_states((epilogue) - 1) > 1 ? (staged) ? 384 : 256 \
     : (staged)                                     ? 512                  \
     : rf_optimizer_row_states((epilogue) - 1) > 0  ? 320                  \
                                                    : 256)

/* The task of a block of lists.cu: rows [first_row, last_row) of a small feature. Like a task of
 * small_rows.cu it contains all data of the feature, so that the block does not wait for memory twice. */
typedef struct rf_small_list {
    rf_i64 start; /* position of the feature's rows + 1 numbers in `starts` */
    rf_i64 factors; /* position of its factors, one per bag, in `factors`; -1: it is a sum */
    rf_i32 number; /* of the feature, among those of the call */
    rf_i32 rows, padding_idx; /* -1: no padding */
    rf_i32 first_row, last_row, unused;
} rf_small_list;
RF_SIZE_IS(rf_small_list, 40);

/* The task of a block of small_rows.cu: columns from `column` on of those rows. */
typedef struct rf_small_task {
    rf_i64 row; /* of its matrix, at which the feature's table begins */
    rf_i64 start, factors; /* as above */
    rf_i32 feature, first_row, last_row, column, columns;
    rf_i32 output_column, matrix, unused;
} rf_small_task;
RF_SIZE_IS(rf_small_task, 56);

/* lists.cu */
typedef struct rf_small_lists_args {
    RF_BACKWARD_ADDRESS(const RF_INDEX) indices; /* [lookups] */
    RF_BACKWARD_ADDRESS(const RF_OFFSET) offsets; /* [features * bags + 1] */
    RF_BACKWARD_ADDRESS(const rf_small_list) tasks; /* [grid] */
    RF_BACKWARD_ADDRESS(rf_u16)
    list; /* [lookups]: bags, each feature's from the position of its lookups on */
    RF_BACKWARD_ADDRESS(rf_u32) starts; /* positions in the list at which a row's bags begin */
    RF_BACKWARD_ADDRESS(float) factors; /* one over the lookups of a bag that count; NULL: all are sums */
    rf_i64 lookups;
    rf_i32 bags;
    rf_i32 shared_bytes; /* of a block, dynamic */
} rf_small_lists_args;
RF_SIZE_IS(rf_small_lists_args, 64);

/* small_rows.cu */
typedef struct rf_small_args {
    RF_BACKWARD_ADDRESS(const rf_u8) grad; /* [bags, output_dim] */
    RF_BACKWARD_ADDRESS(const rf_small_task) tasks; /* [grid] */
    RF_BACKWARD_ADDRESS(const rf_u16) list; /* as above */
    RF_BACKWARD_ADDRESS(const rf_u32) starts;
    RF_BACKWARD_ADDRESS(const float) factors;
    rf_i64 output_dim;
    rf_i32 bags;
    rf_i32 by_frequency; /* a row's sum is divided by the number of its lookups */
    rf_epilogue_args epilogue;
    rf_backward_matrix matrices[RF_BACKWARD_MOST_MATRICES];
} rf_small_args;
RF_SIZE_IS(rf_small_args, 840);

#endif
