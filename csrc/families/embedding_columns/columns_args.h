/* The arguments of the kernels of embedding columns, in addition to the program. */
#ifndef RECFUSE_CUDA_EMBEDDING_COLUMNS_ARGS_H
#define RECFUSE_CUDA_EMBEDDING_COLUMNS_ARGS_H

#include "families/embedding_columns/device/column_program.h"
#include "gpu/device/error_word.h"
#include "recfuse/embedding_columns_codes.h"

enum {
    RF_COLUMNS_BLOCK = 128, /* threads */
    RF_COLUMNS_MOST_SAMPLES = 64, /* of a block */
    RF_COLUMNS_LIST_LOOKUPS =
        512, /* lookups that a block of a bag's task has looked at before it reads rows */
    RF_COLUMNS_LONG = 128, /* lookups; all threads of the block share a longer bag */
    RF_COLUMNS_BAGS_BYTES = 13344 /* of shared memory after a bag's body: rf_column_bags */
};

/* An input. Inputs are kernel parameters: a call copies nothing before the launch, and a captured call has
 * its own. */
typedef struct rf_columns_tensor {
    const rf_u8 *values;
    const rf_u8 *offsets; /* jagged; else NULL */
    const float *weights; /* NULL: no weights */
    rf_i64 sample_stride; /* dense: elements; jagged: lookups */
    rf_i64 value_stride; /* dense */
    rf_i32 type; /* rf_column_type */
    rf_i32 offset_type; /* rf_int_type */
} rf_columns_tensor;
RF_SIZE_IS(rf_columns_tensor, 48);

/* A dense input in a third of that: a thousand features of their own are as many of these. */
typedef struct rf_columns_dense {
    rf_u64 values; /* the address, and the rf_column_type in the high byte */
    rf_u32 sample_stride, value_stride; /* elements */
} rf_columns_dense;
RF_SIZE_IS(rf_columns_dense, 16);

/* A buffer: its data, and the rf_dtype in the high byte. */
typedef rf_u64 rf_columns_buffer;

/* No address of a process has anything in its high byte. */
enum { RF_COLUMNS_HIGH_BYTE = 56 };

/* Tensors are consecutive in units of 16 bytes: rf_columns_dense, rf_columns_tensor, rf_columns_buffer.
 * Kernels are compiled for a maximum number of units; parameters of more than 4,096 bytes need CUDA 12.1, and
 * all are at most 32,764. */
enum { RF_COLUMNS_UNIT = 16, RF_COLUMNS_UNITS_OF_TENSOR = 3, RF_COLUMNS_BUFFERS_OF_UNIT = 2 };
#define RF_COLUMNS_FEW_UNITS 48
#define RF_COLUMNS_SOME_UNITS 240
#define RF_COLUMNS_MANY_UNITS 768
#define RF_COLUMNS_MOST_UNITS 2016
#ifndef RF_UNITS
#define RF_UNITS RF_COLUMNS_MOST_UNITS
#endif

typedef struct rf_columns_args {
    const rf_i64 *program; /* on the device */
    const rf_columns_task *tasks; /* the first that this launch does, in the program */
    rf_u8 *output;
    rf_i64 output_pitch; /* bytes from one sample to the next */
    rf_i64 batch;
    const float *boundaries;
    const rf_i64 *vocabulary; /* both in the program */
    /* Samples of a block, a power of two, at most RF_COLUMNS_MOST_SAMPLES, and blocks that share a task; the
     * same for tasks of bags, which come first. */
    rf_i32 samples, tiles;
    rf_i32 bag_samples, bag_tiles, bag_tasks;
    rf_i32 output_vector; /* as `vector`, of the output's rows */
    rf_i32 vector; /* elements of tables that all of their addresses allow to be moved at once: 1, 2, 4 */
    rf_i32 n_dense; /* the first inputs, which are rf_columns_dense; all others are rf_columns_tensor */
    rf_i32 buffers_at; /* unit */
    rf_i32 unused;
    rf_error_word errors;
    rf_columns_dense tensors[RF_UNITS];
} rf_columns_args;
RF_SIZE_IS(rf_columns_args, 112 + RF_COLUMNS_UNIT * RF_UNITS);
/* Of a kernel that is compiled for this many units. */
#define RF_COLUMNS_ARGS_BYTES(units) (112 + (size_t)RF_COLUMNS_UNIT * (size_t)(units))

/* Of lookups.cu: the bag of sample s in table column t has the number t * batch + s. Counts are stored where
 * their prefix sums will be: that of a bag at offsets[bag + 1]. */
typedef struct rf_columns_lookups_args {
    rf_i64 *offsets; /* [bags + 1]: written by the counting pass, else read */
    rf_i64 *indices; /* [capacity] */
    float *factors; /* [capacity], or NULL */
    rf_i64 capacity;
    rf_columns_args call; /* tables and the output are not looked at; last, since it ends with tensors */
} rf_columns_lookups_args;
RF_SIZE_IS(rf_columns_lookups_args, sizeof(rf_columns_args) + 32);

/* Of scan.cu: values [count] become their inclusive prefix sums, in place. */
enum { RF_COLUMNS_SCAN_BLOCK = 256, RF_COLUMNS_SCAN_VALUES = 2048 /* of a block */ };
typedef struct rf_columns_scan_args {
    rf_i64 *values;
    rf_i64 *sums; /* [blocks], of each block's values */
    rf_i64 count;
} rf_columns_scan_args;
RF_SIZE_IS(rf_columns_scan_args, 24);

#endif
