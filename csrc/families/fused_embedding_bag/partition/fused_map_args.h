/* The partition's numbers, cost model and the arguments of partition/map.cu. Read by C11 and by NVRTC.
 *
 * The unit of cost is a batch of rows in flight from L2: 0.6 µs on an H200 with all its SMs busy. From the
 * begins and ends of tasks there: 1.1 µs to begin a task, 0.2 µs per KB of rows from memory, 4 µs for eight
 * bags of a tile whose lanes go through them separately. The error is 18 % for tasks of the benchmark's
 * models.
 */
#ifndef RECFUSE_CUDA_FUSED_PARTITION_ARGS_H
#define RECFUSE_CUDA_FUSED_PARTITION_ARGS_H

#include "families/fused_embedding_bag/fused_args.h"

enum {
    RF_FUSED_TASKS_A_BLOCK = 14, /* for each block that the GPU runs at once */
    RF_FUSED_LEAST_TASKS_A_BLOCK = 3, /* of small batches, whose tasks are smaller for that */
    RF_FUSED_LEAST_COST = 8, /* of a task: beginning a task costs two */
    RF_FUSED_LEAST_COST_OF_SMALL = 4, /* the same of small batches */
    RF_FUSED_LEAST_COST_AT_ONCE = 2, /* if all run at once, so that none waits */
    RF_FUSED_TILES_AT_ONCE = 8, /* of tiles, if this many times as many could: they share an SM less well */
    RF_FUSED_LONG = 2, /* a task counts as long if it costs this many times its target */
    RF_FUSED_COLUMN_COST = 2, /* of RF_FUSED_TILE_BAGS, if bags have at most one lookup */
    RF_FUSED_LONGER_COST = 6, /* of each lookup if they have more, and with staged tables */
    RF_FUSED_MAP_BLOCK = 1024, /* threads of partition/map.cu's blocks */
    RF_FUSED_NO_CLASS = 255 /* in a byte of rf_fused_map_feature */
};

#ifdef __CUDACC__
#define RF_FUSED_MAX(a, b) fmaxf(a, b)
#define RF_FUSED_MIN(a, b) fminf(a, b)
#define RF_FUSED_COST static __device__ __forceinline__ float
#else
#define RF_FUSED_MAX(a, b) ((a) > (b) ? (a) : (b))
#define RF_FUSED_MIN(a, b) ((a) < (b) ? (a) : (b))
#define RF_FUSED_COST static inline double
#endif

/* The cost of a block for the bags that it pools at once, of `mean` lookups with `in_flight` in flight;
 * `split` blocks share them. */
RF_FUSED_COST rf_fused_pool_cost(rf_fused_number mean, rf_fused_number in_flight, rf_fused_number split) {
    return 1 + RF_FUSED_MAX(mean / in_flight, (rf_fused_number)1) / split;
}

/* As above, for a tile. */
RF_FUSED_COST rf_fused_columns_cost(rf_fused_number mean, int with_staged) {
    if (mean > 1) return RF_FUSED_LONGER_COST * mean;
    return with_staged ? RF_FUSED_LONGER_COST : RF_FUSED_COLUMN_COST;
}

/* The additional cost of the rows of a table that this many lookups load from memory: of r rows, l lookups
 * read about r l / (r + l) different ones. */
RF_FUSED_COST rf_fused_misses_cost(rf_fused_number rows, rf_fused_number lookups,
                                   rf_fused_number cost_of_miss) {
    return lookups > 0 ? rows * lookups / (rows + lookups) * cost_of_miss : 0;
}

/* The target cost of a task, out of `total_cost` work: for `task_limit` tasks, or for at least `least_tasks` if there is little
 * work. */
RF_FUSED_COST rf_fused_task_cost(rf_fused_number total_cost, rf_fused_number task_limit,
                                 rf_fused_number least_tasks) {
    const rf_fused_number a_block =
        total_cost / least_tasks * RF_FUSED_LEAST_TASKS_A_BLOCK; /* if each has one task */
    const rf_fused_number at_once = RF_FUSED_MAX(a_block, (rf_fused_number)RF_FUSED_LEAST_COST_AT_ONCE);
    const rf_fused_number small = RF_FUSED_MAX(
        total_cost / least_tasks, RF_FUSED_MIN(at_once, (rf_fused_number)RF_FUSED_LEAST_COST_OF_SMALL));
    return RF_FUSED_MAX(total_cost / task_limit, RF_FUSED_MIN(small, (rf_fused_number)RF_FUSED_LEAST_COST));
}

/* As above, for a tile out of `tiles`. */
RF_FUSED_COST rf_fused_tile_task_cost(rf_fused_number task_cost, rf_fused_number tiles,
                                      rf_fused_number least_tasks) {
    const rf_fused_number a_block = tiles / least_tasks * RF_FUSED_LEAST_TASKS_A_BLOCK;
    return RF_FUSED_MAX(task_cost, RF_FUSED_MIN(a_block * RF_FUSED_TILES_AT_ONCE,
                                                (rf_fused_number)RF_FUSED_LEAST_COST_OF_SMALL));
}

/* A feature, for the kernel. A byte a bucket, the first one lowest. */
typedef struct RF_FUSED_ALIGN(16) rf_fused_map_feature {
    rf_u64 classes, classes_of_few; /* of_few: in batches of few bags */
    rf_i32 columns, slices;
    float rows, cost_of_miss; /* of a row from memory */
} rf_fused_map_feature;
RF_SIZE_IS(rf_fused_map_feature, 32);

typedef struct RF_FUSED_ALIGN(16) rf_fused_map_class {
    rf_i32 first_tile; /* the first of its possible tiles; -1: it pools */
    rf_i32 bags_at_once; /* that a block works on */
    float in_flight; /* lookups of a bag */
    rf_i32 unused;
} rf_fused_map_class;
RF_SIZE_IS(rf_fused_map_class, 16);

typedef struct rf_fused_map_args {
    RF_FUSED_ADDRESS(const RF_OFFSET) offsets; /* [n_features * bags + 1] */
    RF_FUSED_ADDRESS(const rf_fused_map_feature) features;
    RF_FUSED_ADDRESS(const rf_fused_map_class) classes;
    RF_FUSED_ADDRESS(const rf_u8) tile_classes; /* [n_tiles] */
    rf_i64 lookups;
    rf_i32 n_features, bags, n_classes, n_tiles;
    rf_i32 most_tasks; /* room for them */
    float most_cuts, least_cuts; /* tasks but for those that runs begin */
    RF_FUSED_ADDRESS(int) n_tasks;
    RF_FUSED_ADDRESS(rf_fused_task) tasks; /* [most_tasks] */
    RF_FUSED_ADDRESS(rf_fused_lane) lanes; /* [n_tiles][32] */
    RF_FUSED_ADDRESS(rf_u32) tile_means; /* [blocks][n_tiles], as bits */
} rf_fused_map_args;
RF_SIZE_IS(rf_fused_map_args, 104);

#endif
