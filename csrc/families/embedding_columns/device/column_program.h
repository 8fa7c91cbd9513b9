/* A program of embedding columns as calls read it, on the host and on a device: rf_embedding_columns_program
 * lays it out in 8-byte words, without pointers. Included as
 * "families/embedding_columns/device/column_program.h" by host C and by kernels. */
#ifndef RECFUSE_CUDA_DEVICE_COLUMN_PROGRAM_H
#define RECFUSE_CUDA_DEVICE_COLUMN_PROGRAM_H

#include "gpu/device/types.h"

enum { RF_COLUMNS_MAGIC = 0x31434652 }; /* "RFC1": the layout below */

/* The first words; arrays begin at the words `..._at`, at multiples of 16 bytes. */
typedef struct rf_columns_header {
    rf_i64 magic, words;
    rf_i64 output_dim;
    rf_i64 n_columns, columns_at; /* rf_columns_column */
    rf_i64 n_sources, sources_at; /* rf_columns_source */
    rf_i64 n_steps, steps_at; /* rf_columns_step */
    rf_i64 n_boundaries, boundaries_at; /* float, two a word */
    rf_i64 n_vocabulary,
        vocabulary_at; /* of each step its words in ascending order, then their positions: 2 * count */
    rf_i64 n_tables; /* columns that are not numeric */
    rf_i64 n_tasks, tasks_at; /* rf_columns_task: the work of blocks of a GPU; tasks of bags come first */
    rf_i64 n_bag_tasks;
    rf_i64 body_words, task_columns; /* the most words of a task's body, and the most columns */
    rf_i64 operations; /* a bit for each rf_column_operation in use */
} rf_columns_header;
RF_SIZE_IS(rf_columns_header, 160);

typedef struct rf_columns_step {
    rf_i32 operation; /* rf_column_operation */
    rf_i32 count; /* number of boundaries or words, or of buckets of a hash */
    rf_i64 a; /* as rf_column_step's, except that it is the first boundary or word of the arrays here */
    rf_i64 b; /* as rf_column_step's; bucketize: float32 of rf_column_bucket_even, or 0: not equidistant */
} rf_columns_step;
RF_SIZE_IS(rf_columns_step, 24);

/* As rf_column_source. */
typedef struct rf_columns_source {
    rf_i32 input, slot, width, first_step, n_steps, unused;
} rf_columns_source;
RF_SIZE_IS(rf_columns_source, 24);

/* As rf_column. */
typedef struct rf_columns_column {
    rf_i64 weight_offset, rows, invalid, empty;
    rf_u64 cross_seed;
    rf_i32 left, right, cross_buckets, buffer, dim, pooling, weighted, first_dim, n_dims, output_column;
    float fill, scale;
    rf_i32 table; /* its number among the columns of tables; -1: numeric */
    rf_i32 number; /* its own */
} rf_columns_column;
RF_SIZE_IS(rf_columns_column, 96);

typedef enum rf_columns_kind {
    RF_COLUMNS_BAGS, /* one column, whose samples may have any number of lookups */
    RF_COLUMNS_ROWS, /* columns whose samples have one index each */
    RF_COLUMNS_NUMBERS /* numeric columns */
} rf_columns_kind;

enum {
    RF_COLUMNS_LANES = 32, /* of a task: adjacent in a row of the output, as far as columns allow */
    RF_COLUMNS_MOST_VECTOR = 4, /* elements of a lane */
    RF_COLUMNS_MOST_BODY = 2048 /* words */
};

/* Some columns of one kind, or a part of the width of one column, for a block of a GPU. All data that it
 * reads of them is one range of the program, the body, which it copies into shared memory: columns, sources
 * and steps as above, but numbered within the body, and of a wide column or source the task's part. If a
 * step's boundaries, or its words and positions, are in the body, its a is their position in it, in bytes;
 * otherwise ~a is the first of them in the program's array. The table of all parts of a column except the
 * first is -1. */
typedef struct rf_columns_task {
    rf_i64 body_at; /* word */
    rf_i32 words; /* of the body, which begins with the columns */
    rf_i32 kind; /* rf_columns_kind */
    rf_i32 n_columns, n_lanes;
    rf_i32 vector; /* elements of a lane: 1, 2 or 4, by how offsets and widths are aligned; numbers: 1 */
    rf_i32
        alike; /* the steps of all columns are the same operations: adjacent threads may have several columns */
    rf_i32 lanes_at, sources_at, steps_at; /* in the body, in bytes; lanes: rf_columns_lane */
    rf_i32 unused;
} rf_columns_task;
RF_SIZE_IS(rf_columns_task, 48);

typedef struct rf_columns_lane {
    rf_u8 column; /* of the task */
    rf_u8 element; /* its first among those that the task has of the column */
} rf_columns_lane;
RF_SIZE_IS(rf_columns_lane, 2);

#endif
