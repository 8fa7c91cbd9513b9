/* Shared by the fused embedding bag's host C and its kernels: numbers of kinds, descriptors of features,
 * tasks and lanes, the arguments of a launch. Read by C11 and by NVRTC, as
 * "families/fused_embedding_bag/fused_args.h" on both sides. In kernels RF_INDEX and RF_OFFSET are the types
 * of indices and offsets. */
#ifndef RECFUSE_CUDA_FUSED_ARGS_H
#define RECFUSE_CUDA_FUSED_ARGS_H

#include "gpu/device/codes.h"
#include "gpu/device/error_word.h"
#include "gpu/device/types.h"

#ifdef __CUDACC__
#define RF_FUSED_FUNCTION static constexpr __device__ __forceinline__
#define RF_FUSED_ALIGN(bytes) __align__(bytes)
#define RF_FUSED_ADDRESS(type) type *
typedef float rf_fused_number;
#else
#define RF_FUSED_FUNCTION static inline
#define RF_FUSED_ALIGN(bytes)
#define RF_FUSED_ADDRESS(type) rf_u64 /* on the device */
typedef double rf_fused_number;
#endif

enum {
    RF_FUSED_CLASS_POOL = 0, /* kinds of classes: how their kernels work */
    RF_FUSED_CLASS_COLUMNS = 1,
    RF_FUSED_CLASS_STAGED = 2,
    RF_FUSED_BLOCK = 64, /* threads of a block that pools */
    RF_FUSED_TILE = 32, /* lanes of a tile */
    RF_FUSED_TILE_BAGS = RF_FUSED_BLOCK / RF_FUSED_TILE * 4, /* of a tile that a block handles at once */
    RF_FUSED_TILE_ROWS = 256, /* row numbers that a warp has of a tile at once */
    RF_FUSED_BUCKETS = 8, /* of mean bag lengths, each with a default schedule */
    RF_FUSED_FEW_BAGS = 256, /* of a feature: up to this number, two warps share a long bag */
    RF_FUSED_MOST_CLASSES = 128,
    RF_FUSED_PARTIAL_FLOATS = 32, /* the unit of partial sums */
    /* Of a block of staged/staged.cu. */
    RF_FUSED_STAGED_BLOCK = 640, /* threads that pool */
    RF_FUSED_STAGED_HELPERS = 128, /* producer threads, that load tables for them */
    RF_FUSED_STAGED_BAGS = 512, /* of a task, at most */
    RF_FUSED_STAGED_RING = 210944, /* bytes of shared memory for tables */
    RF_FUSED_STAGED_SHARED = RF_FUSED_STAGED_RING + 15360 /* and lists of bags */
};

/* The bucket of a mean bag length: the most lookups of each bucket; the last bucket has longer bags. */
#define RF_FUSED_BUCKET_ENDS {2, 6, 12, 24, 48, 96, 192}
RF_FUSED_FUNCTION int rf_fused_bucket(rf_fused_number mean) {
    const rf_fused_number ends[RF_FUSED_BUCKETS - 1] = RF_FUSED_BUCKET_ENDS;
    int bucket = 0;
    for (int i = 0; i < RF_FUSED_BUCKETS - 1; i++) bucket += mean > ends[i];
    return bucket;
}

/* The properties of a feature that a schedule must match. */
typedef struct rf_fused_properties {
    int dtype, align, store, lanes, vectors, whole, pooling, padded;
} rf_fused_properties;
RF_FUSED_FUNCTION int rf_fused_shape_code(rf_fused_properties shape) {
    return shape.dtype | shape.align << 3 | shape.store << 8 | shape.lanes << 13 | shape.vectors << 19 |
           shape.whole << 21 | shape.pooling << 22 | shape.padded << 24;
}
enum { RF_FUSED_COLUMN_CODE = (1 << 13) - 1 }; /* the bits of it that matter to columns */

/* Lookups of a bag whose indices a slot loads at once. */
RF_FUSED_FUNCTION int rf_fused_indices_at_once(int distance) { return distance < 4 ? 4 : distance; }

/* A feature. */
typedef struct RF_FUSED_ALIGN(16) rf_fused_descriptor {
    RF_FUSED_ADDRESS(const rf_u8) weight;
    rf_i64 rows, padding_idx; /* -1: no padding */
    rf_i64 output_offset; /* bytes from the first column */
    rf_u32 pitch; /* bytes from row to row */
    rf_i32 columns; /* vectors of a row */
    rf_i32 pooling; /* rf_pooling */
    rf_i32 shape; /* rf_fused_shape_code */
    RF_FUSED_ADDRESS(const rf_u8) parameters; /* scale and bias of row 0, of a quantised table */
    rf_u32 parameters_pitch; /* bytes from row to row */
    rf_i32 unused;
} rf_fused_descriptor;
RF_SIZE_IS(rf_fused_descriptor, 64);

/* The task of a block: bags [first_bag, last_bag) of a feature, or of the 32 lanes of a tile. */
typedef struct RF_FUSED_ALIGN(16) rf_fused_task {
    rf_i32 feature; /* or the number of a tile */
    rf_i32 first_bag, last_bag;
    rf_i32 schedule; /* the number of its class */
    rf_i32 slice; /* of a row that is too wide for a warp; for a tile 1: its bags have more than one lookup */
    rf_i32 split; /* of each bag, in the low half; the high half is the number of tasks that share them */
    rf_i32 group; /* of the tasks that share bags */
    rf_i32 partials; /* position of the group's partial sums, in RF_FUSED_PARTIAL_FLOATS */
} rf_fused_task;
RF_SIZE_IS(rf_fused_task, 32);
enum { RF_FUSED_SPLIT_BITS = 16, RF_FUSED_WHOLE_BAGS = 1 << RF_FUSED_SPLIT_BITS }; /* of `split` */
RF_FUSED_FUNCTION int rf_fused_split_part(int split) { return split & (RF_FUSED_WHOLE_BAGS - 1); }
RF_FUSED_FUNCTION int rf_fused_splits(int split) { return split >> RF_FUSED_SPLIT_BITS; }

/* A lane of a tile: one vector of a feature's rows. */
typedef struct RF_FUSED_ALIGN(8) rf_fused_lane {
    rf_i32 feature; /* -1: unused */
    rf_i32 column;
} rf_fused_lane;
RF_SIZE_IS(rf_fused_lane, 8);

/* Of fused_embedding_bag.cu and staged/staged.cu. */
typedef struct rf_fused_args {
    RF_FUSED_ADDRESS(const RF_INDEX) indices; /* rounded down to a multiple of four elements */
    RF_FUSED_ADDRESS(const RF_OFFSET) offsets; /* [features * bags + 1] */
    RF_FUSED_ADDRESS(const float) sample_weights; /* as `indices`; NULL: no weights */
    RF_FUSED_ADDRESS(rf_u8) output;
    rf_i64 end; /* end of the lookups, relative to `indices`; the first has the number `lead` */
    rf_u32 output_pitch; /* bytes */
    rf_i32 lead, bags, n_features;
    rf_i32 limit; /* number of tiles; of staged tasks, a block */
    rf_i32 n_groups, n_partials; /* of tasks that share bags */
    rf_u32 tiles_a_task; /* in 2^-32, rounded up; 0: no tiles, or an earlier kernel computes it */
    RF_FUSED_ADDRESS(const rf_fused_descriptor) features;
    RF_FUSED_ADDRESS(const rf_fused_task) tasks;
    RF_FUSED_ADDRESS(const int) n_tasks; /* NULL: as many as blocks */
    RF_FUSED_ADDRESS(const rf_fused_lane) lanes; /* [tiles][32] */
    RF_FUSED_ADDRESS(float) partials; /* of tasks that share bags: see rf_shared_bags in pool/pool.cuh */
    RF_FUSED_ADDRESS(rf_u32) semaphores; /* [groups], zero before and after */
    RF_FUSED_ADDRESS(rf_u64) cycles; /* [features], with RF_TIMED */
    rf_error_word errors;
} rf_fused_args;
RF_SIZE_IS(rf_fused_args, 144);

#endif
