/* Runs of the partition on the device: features and tiles with work, their cost, and the tasks into which they
 * are cut. Requires RF_BLOCK. */
#ifndef RECFUSE_FUSED_MAP_RUNS_CUH
#define RECFUSE_FUSED_MAP_RUNS_CUH

#include "families/fused_embedding_bag/fused.cuh"
#include "families/fused_embedding_bag/partition/fused_map_args.h"

enum { WARPS = 32, RANKS = 32, LONG_RANKS = 16, NO_BIN = -1, LONGER = 1 << 8 };
static_assert(RF_BLOCK == 32 * WARPS, "a lane of one warp for each warp");
static_assert(RF_FUSED_MOST_CLASSES % WARPS == 0 && RF_FUSED_MOST_CLASSES <= RF_FUSED_NO_CLASS &&
                  RANKS <= RF_FUSED_MOST_CLASSES,
              "bins");

/* The common fields of a run's tasks. */
struct run_tasks {
    int first, number, count, bags_a_task, total; /* count: per slice */
    int schedule; /* LONGER is set for a tile whose bags have more than one lookup */
};

struct shared_data {
    rf_fused_map_class classes[RF_FUSED_MOST_CLASSES];
    int lane_end[RF_FUSED_MOST_CLASSES]; /* end of the lanes that each class has filled */
    int totals[RF_FUSED_MOST_CLASSES][WARPS + 1];
    int task_end[RF_FUSED_MOST_CLASSES]; /* end of the tasks of each rank; the first RANKS entries */
    int rank_total[RANKS];
    float sums[WARPS];
    run_tasks runs[RF_BLOCK];
};

/* A feature or a tile with work. */
struct run {
    int schedule; /* -1: no work */
    bool longer; /* a tile whose bags have more than one lookup */
    int slices;
    float cost; /* cost of the bags that a block works on at once */
    float misses; /* cost of all bags of a slice if their rows come from memory */
    float rows_a_lookup;
};

RF_INLINE rf_fused_map_feature load_feature(const rf_fused_map_args &args, int f) {
    const rf_bytes<16> *from = (const rf_bytes<16> *)(args.features + f);
    const rf_bytes<16> word = rf_load(from), second = rf_load(from + 1);
    return {word.word[0] | (rf_u64)word.word[1] << 32,
            word.word[2] | (rf_u64)word.word[3] << 32,
            (int)second.word[0],
            (int)second.word[1],
            __uint_as_float(second.word[2]),
            __uint_as_float(second.word[3])};
}

/* Returns the mean length of the bags of a feature, or 0 if its offsets are invalid. */
RF_INLINE float mean_length(const rf_fused_map_args &args, int f) {
    const rf_i64 position = (rf_i64)f * args.bags;
    const rf_i64 from = rf_load(args.offsets + position), to = rf_load(args.offsets + position + args.bags);
    const rf_i64 begin = min(max(from, 0ll), args.lookups), end = min(max(to, 0ll), args.lookups);
    return end > begin ? (float)(end - begin) / (float)args.bags : 0.0f;
}

/* Returns the number of a class. */
RF_INLINE int class_number(const rf_fused_map_args &args, const rf_fused_map_feature &feature, float mean) {
    const rf_u64 classes = args.bags <= RF_FUSED_FEW_BAGS ? feature.classes_of_few : feature.classes;
    const int number = (int)(classes >> 8 * rf_fused_bucket(mean) & 255);
    return number == RF_FUSED_NO_CLASS ? -1 : number;
}

RF_INLINE float cost_of(const rf_fused_map_class &schedule, float mean) {
    if (schedule.first_tile < 0) return rf_fused_pool_cost(mean, schedule.in_flight, 1.0f);
    return rf_fused_columns_cost(mean, 0);
}

RF_INLINE int ceil_divide(int value, int by) { return (int)(((rf_u32)value + (rf_u32)by - 1) / (rf_u32)by); }

/* Returns run `r`. The lanes of a tile must be known. */
RF_INLINE run run_of(const rf_fused_map_args &args, const shared_data &shared, const rf_u32 *tile_means,
                     int r) {
    run result = {-1, false, 1, 0.0f, 0.0f, 0.0f}; /* tiles come last */
    float mean = 0.0f;
    if (r < args.n_features) {
        const rf_fused_map_feature feature = load_feature(args, r);
        mean = mean_length(args, r);
        result.schedule = class_number(args, feature, mean);
        result.slices = feature.slices;
        const float lookups = mean * (float)args.bags, rows = feature.rows;
        result.rows_a_lookup = rows / (lookups + 1.0f);
        result.misses = rf_fused_misses_cost(rows, lookups, feature.cost_of_miss) / (float)feature.slices;
        if (result.schedule >= 0 && shared.classes[result.schedule].first_tile >= 0) result.schedule = -1;
    } else if (r - args.n_features < args.n_tiles) {
        const int tile = r - args.n_features, number = args.tile_classes[tile];
        mean = __uint_as_float(*(const volatile rf_u32 *)(tile_means + tile));
        if (tile * 32 < shared.lane_end[number]) result.schedule = number;
        result.longer = mean > 1.0f;
    }
    if (result.schedule >= 0) result.cost = cost_of(shared.classes[result.schedule], mean);
    return result;
}

/* Returns the work of one slice of a run. */
RF_INLINE float work_of(const rf_fused_map_args &args, const shared_data &shared, const run &item) {
    if (item.schedule < 0) return 0.0f;
    return item.cost * (float)ceil_divide(args.bags, shared.classes[item.schedule].bags_at_once) +
           item.misses;
}

/* Returns the exponent and the first `bits` bits of the mantissa of a positive number; `least` (a power of
 * two) gives 0. */
RF_INLINE int logarithm(float value, float least, int bits) {
    return (int)(__float_as_uint(value) >> (23 - bits)) - (int)(__float_as_uint(least) >> (23 - bits));
}

/* The target cost of a task. */
struct task_costs {
    float of_feature, of_tile;
};

/* Cuts a run into tasks of about that cost; returns their rank among RANKS. */
RF_INLINE int cut(const rf_fused_map_args &args, const shared_data &shared, const run &item,
                  const task_costs &targets, run_tasks &tasks) {
    tasks.schedule = item.longer ? item.schedule | LONGER : item.schedule;
    tasks.total = 0;
    if (item.schedule < 0) return NO_BIN;
    const int bags_at_once = shared.classes[item.schedule].bags_at_once;
    const bool tiled = shared.classes[item.schedule].first_tile >= 0;
    const float target = tiled ? targets.of_tile : targets.of_feature;
    const float work = work_of(args, shared, item);
    const int exact = (int)fminf(ceilf(work / target), (float)(1 << 30));
    const int n_parts = max(1, min(exact, ceil_divide(args.bags, bags_at_once)));
    tasks.bags_a_task =
        min(ceil_divide(ceil_divide(args.bags, n_parts), bags_at_once) * bags_at_once, args.bags);
    tasks.count = ceil_divide(args.bags, tasks.bags_a_task);
    tasks.total = tasks.count * item.slices;
    const float size = work / (float)tasks.count / target;
    if (size > (float)RF_FUSED_LONG)
        return LONG_RANKS + min(logarithm(size, (float)RF_FUSED_LONG, 2), RANKS - LONG_RANKS - 1);
    return min(max(logarithm(item.rows_a_lookup, 1.0f / 32, 1), 0), LONG_RANKS - 1);
}

#endif
