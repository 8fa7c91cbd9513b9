/* The work of a block: a task with its body in shared memory, and some samples. */
#ifndef RECFUSE_COLUMNS_WORK_CUH
#define RECFUSE_COLUMNS_WORK_CUH

#include "gpu/device/element.cuh"
#include "families/embedding_columns/device/column_values.h"

#ifndef RF_UNITS
#define RF_UNITS 48
#endif
#ifndef RF_CHECK
#define RF_CHECK 1
#endif
#ifndef RF_OUTPUT
#define RF_OUTPUT RF_FLOAT32
#endif
#ifndef RF_TABLES
#define RF_TABLES RF_FLOAT32 /* of all tables; -1: the dtypes differ */
#endif

#include "families/embedding_columns/columns_args.h"

enum { BLOCK = RF_COLUMNS_BLOCK, WARPS = BLOCK / 32, OUTPUT_BYTES = rf_element<RF_OUTPUT>::BYTES };

/* A task and its body in shared memory, and the samples of a block. */
struct rf_column_work {
    const rf_u8 *shared; /* the task, followed by its body */
    rf_i64 first; /* first sample of the block */
    int samples;
    int capacity; /* the largest number of samples of a block with a task of this kind */

    RF_INLINE const rf_columns_task &task() const { return *(const rf_columns_task *)shared; }
    RF_INLINE const rf_u8 *body() const { return shared + sizeof(rf_columns_task); }
    RF_INLINE const rf_columns_column &column(int i) const { return ((const rf_columns_column *)body())[i]; }
    RF_INLINE const rf_columns_source &source(int i) const {
        return ((const rf_columns_source *)(body() + task().sources_at))[i];
    }
    RF_INLINE const rf_columns_step &step(int i) const {
        return ((const rf_columns_step *)(body() + task().steps_at))[i];
    }
    RF_INLINE rf_columns_lane lane(int i) const {
        return ((const rf_columns_lane *)(body() + task().lanes_at))[i];
    }
};

/* Returns the block's work after copying the task and its body into shared memory. A read of a column's
 * description would otherwise be two dependent loads. */
RF_INLINE rf_column_work rf_column_work_of(const rf_columns_args &args, rf_u8 *shared) {
    enum { AT_ONCE = 4, HEAD = sizeof(rf_columns_task) / 16 };
    const rf_u32 bag_blocks = (rf_u32)(args.bag_tasks * args.bag_tiles);
    const bool of_bags = blockIdx.x < bag_blocks;
    const rf_u32 block = of_bags ? blockIdx.x : blockIdx.x - bag_blocks;
    const rf_u32 tiles = (rf_u32)(of_bags ? args.bag_tiles : args.tiles);
    const int number = (int)(block / tiles), tile = (int)(block - number * tiles);
    const rf_columns_task *task = args.tasks + (of_bags ? 0 : args.bag_tasks) + number;
    const rf_bytes<16> *body = (const rf_bytes<16> *)(args.program + rf_load(&task->body_at));
    const int n_vectors = rf_load(&task->words) / 2;
    rf_bytes<16> *to = (rf_bytes<16> *)shared + HEAD;
    if (threadIdx.x < HEAD)
        ((rf_bytes<16> *)shared)[threadIdx.x] = rf_load((const rf_bytes<16> *)task + threadIdx.x);
#pragma unroll 1
    for (int at = threadIdx.x; at < n_vectors; at += AT_ONCE * BLOCK) {
        rf_bytes<16> vectors[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i * BLOCK < n_vectors) vectors[i] = rf_load(body + at + i * BLOCK);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i * BLOCK < n_vectors) to[at + i * BLOCK] = vectors[i];
    }
    const int capacity = of_bags ? args.bag_samples : args.samples;
    const rf_i64 first = (rf_i64)tile * capacity;
    __syncthreads();
    return {shared, first, (int)min(args.batch - first, (rf_i64)capacity), capacity};
}

#endif
