/* What the host gives the kernels of embedding columns, besides the program. */
#ifndef RECFUSE_CUDA_EMBEDDING_COLUMNS_ARGS_H
#define RECFUSE_CUDA_EMBEDDING_COLUMNS_ARGS_H

#include "device/column_program.h"
#include "device/error_word.h"

enum {
    RF_COLUMNS_BLOCK = 128, /* threads */
    RF_COLUMNS_MOST_SAMPLES = 64, /* of a block */
    RF_COLUMNS_LISTED = 512, /* lookups that a block of a bag's task has looked at before it reads rows */
    RF_COLUMNS_LONG = 128, /* lookups; a longer bag has the whole block */
    RF_COLUMNS_BAGS_BYTES = 12832 /* of shared memory behind a bag's body: rf_column_bags */
};

/* An input. They travel in the kernel's parameters: nothing is copied ahead of a call, and a captured call has its own. */
typedef struct rf_columns_tensor {
    const rf_u8 *values;
    const rf_u8 *offsets; /* jagged; else NULL */
    const float *weights; /* NULL: none */
    rf_i64 sample_stride; /* dense: elements; jagged: lookups */
    rf_i64 value_stride; /* dense */
    rf_i32 type; /* rf_column_type */
    rf_i32 offset_type; /* rf_int_type */
} rf_columns_tensor;
RF_SIZE_IS(rf_columns_tensor, 48);

/* A buffer: its data, and the rf_dtype in the high byte, which no address of a process has. Six have the room of an input. */
typedef rf_u64 rf_columns_buffer;
enum { RF_COLUMNS_BUFFER_DTYPE = 56, RF_COLUMNS_BUFFERS_OF_TENSOR = 6 };

/* Kernels are compiled for so many tensors at most; parameters of more than 4,096 bytes need CUDA 12.1. */
#define RF_COLUMNS_FEW_TENSORS 16
#define RF_COLUMNS_SOME_TENSORS 80
#define RF_COLUMNS_MANY_TENSORS 256
#define RF_COLUMNS_MOST_TENSORS 600
#ifndef RF_TENSORS
#define RF_TENSORS RF_COLUMNS_MOST_TENSORS
#endif

typedef struct rf_columns_args {
    const rf_i64 *program; /* on the device */
    const rf_columns_task *tasks; /* the first that this launch does, in the program */
    rf_u8 *output;
    rf_i64 output_pitch; /* bytes from one sample to the next */
    rf_i64 batch;
    const float *boundaries;
    const rf_i64 *vocabulary; /* both in the program */
    /* Samples of a block, a power of two, at most RF_COLUMNS_MOST_SAMPLES, and blocks that share a task; the same of tasks
     * of bags, which come first. */
    rf_i32 samples, tiles;
    rf_i32 bag_samples, bag_tiles, bag_tasks;
    rf_i32 output_vector; /* as `vector`, of the output's rows */
    rf_i32 vector; /* elements of tables that all of their addresses allow to be moved at once: 1, 2, 4 */
    rf_i32 n_inputs;
    rf_error_word errors;
    rf_columns_tensor tensors[RF_TENSORS]; /* inputs; behind them rf_columns_buffer [n_buffers] */
} rf_columns_args;
RF_SIZE_IS(rf_columns_args, 104 + 48 * RF_TENSORS);

/* Of lookups.cu: table column t's bag of sample s is number t * batch + s. Counts are where their sums will be: that of a
 * bag is offsets[bag + 1]. */
typedef struct rf_columns_lookups_args {
    rf_i64 *offsets; /* [bags + 1]: written where lookups are counted, else read */
    rf_i64 *indices; /* [capacity] */
    float *factors; /* [capacity], or NULL */
    rf_i64 capacity;
    rf_columns_args call; /* tables and the output are not looked at; last, since it ends with tensors */
} rf_columns_lookups_args;
RF_SIZE_IS(rf_columns_lookups_args, sizeof(rf_columns_args) + 32);

/* Of scan.cu: values [count] become their sums up to each, in place. */
enum { RF_COLUMNS_SCAN_BLOCK = 256, RF_COLUMNS_SCAN_VALUES = 2048 /* of a block */ };
typedef struct rf_columns_scan_args {
    rf_i64 *values;
    rf_i64 *sums; /* [blocks], of each block's values */
    rf_i64 count;
} rf_columns_scan_args;
RF_SIZE_IS(rf_columns_scan_args, 24);

#endif
