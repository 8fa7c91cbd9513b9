/* The cost model (partition/fused_map_args.h) of a class and of a feature. */
#ifndef RECFUSE_CUDA_FUSED_COST_H
#define RECFUSE_CUDA_FUSED_COST_H

#include "families/fused_embedding_bag/features.h"
#include "families/fused_embedding_bag/partition/fused_map_args.h"

/* Returns the lookups of a bag in flight, for a class that pools. */
static inline double rf__fused_in_flight(const rf__fused_class *schedule) {
    return (double)schedule->threads / schedule->lanes * rf_fused_indices_at_once(schedule->distance);
}

/* Returns the cost of a block for the bags that it handles at once, of `mean` lookups. */
static inline double rf__fused_cost(const rf__fused_class *schedule, double mean, bool with_staged) {
    if (schedule->kind == RF_FUSED_CLASS_COLUMNS) return rf_fused_columns_cost(mean, with_staged);
    return rf_fused_pool_cost(mean, rf__fused_in_flight(schedule), schedule->split);
}

/* Returns the additional cost of a row from memory. */
static inline double rf__fused_cost_of_miss(const rf__fused_geometry *shape) {
    enum { SECTOR = 32, /* bytes of a row that are read, at least */ BYTES = 3000 /* that cost 1 */ };
    return (double)RF_FUSED_MAX((double)shape->row.bytes, SECTOR) / BYTES;
}

/* Returns the cost of all rows that this many lookups load from memory. */
static inline double rf__fused_misses(const rf__fused_geometry *shape, int64_t rows, double lookups) {
    return rf_fused_misses_cost((double)rows, lookups, rf__fused_cost_of_miss(shape));
}

/* Returns the target cost of a task, for all work on this many blocks that run at once. */
static inline double rf__fused_target(double total_cost, double blocks) {
    return rf_fused_task_cost(total_cost, blocks * RF_FUSED_TASKS_A_BLOCK,
                              blocks * RF_FUSED_LEAST_TASKS_A_BLOCK);
}

/* As above, for a tile out of `tiles`. */
static inline double rf__fused_tile_target(double target, double tiles, double blocks) {
    return rf_fused_tile_task_cost(target, tiles, blocks * RF_FUSED_LEAST_TASKS_A_BLOCK);
}

#endif
