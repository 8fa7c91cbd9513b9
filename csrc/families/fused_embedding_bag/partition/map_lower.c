/* partition/map.cu lowered: its table, the room for its tasks, its launch. */
#include "families/fused_embedding_bag/partition/map_lower.h"
#include "families/fused_embedding_bag/fused_kernel.h"
#include "families/fused_embedding_bag/partition/cost.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const rf__kernel_source source = {"families/fused_embedding_bag/partition/map.cu", "rf_fused_map"};

enum {
    MOST_BLOCKS = 16, /* that write tasks; each computes the whole partition */
    TASKS_OF_BLOCK = 512
};

static rf_status describe(const void *key, rf__kernel_options *options) {
    const int32_t *offset_type = key;
    options->dynamic_shared = 0;
    snprintf(options->defines, sizeof options->defines, "-DRF_OFFSET=%s -DRF_BLOCK=%d",
             rf__kernel_integer(*offset_type), (int)RF_FUSED_MAP_BLOCK);
    return RF_OK;
}

static int32_t bags_at_once_of(const rf__fused_class *schedule) {
    return schedule->kind == RF_FUSED_CLASS_POOL ? RF_FUSED_BLOCK / schedule->threads : RF_FUSED_TILE_BAGS;
}

/* Blocks that one bag of a feature takes at once, and runs that it makes, at most. */
static double blocks_a_bag(const rf__fused_geometry *shape, const rf__fused_class *schedule, double *runs) {
    *runs = schedule->kind == RF_FUSED_CLASS_COLUMNS ? (double)shape->columns / RF_FUSED_TILE : shape->slices;
    return *runs / bags_at_once_of(schedule);
}

/* Counts the needs of a feature; adds its columns to those of each of its classes. */
static rf_status feature_count(const rf__fused_feature *feature, int64_t number,
                               const rf__fused_classes *classes, rf__fused_map_table *table,
                               int64_t *columns) {
    double most_runs = 0, most_blocks = 0;
    for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++) {
        const int32_t at = feature->classes[b];
        double runs;
        if (at < 0) continue;
        const rf__fused_class *schedule = &classes->of[at];
        RF_FAIL_IF(schedule->split > 1, RF_ERR_VALUE,
                   "recfuse.fused_embedding_bag: schedules[%" PRId64
                   "] has split=%d, but the lengths of bags are unknown; expected 1. Pass each feature's "
                   "expected lookups, or a mapping, for another split.",
                   number, (int)schedule->split);
        const double blocks = blocks_a_bag(&feature->shape, schedule, &runs);
        table->blocks_a_bag[b][at] += blocks;
        if (runs > most_runs) most_runs = runs;
        if (blocks > most_blocks) most_blocks = blocks;
        const double of_few = blocks_a_bag(&feature->shape, &classes->of[feature->classes_of_few[b]], &runs);
        if (of_few > most_blocks) most_blocks = of_few;
        bool is_new = schedule->kind == RF_FUSED_CLASS_COLUMNS;
        for (int32_t earlier = 0; earlier < b; earlier++) is_new &= feature->classes[earlier] != at;
        if (is_new) columns[at] += feature->shape.columns;
    }
    table->runs += most_runs;
    table->tasks_a_bag += most_blocks;
    for (int32_t i = 0; i < RF__FUSED_LOGARITHMS; i++)
        table->misses[i] += rf__fused_misses(&feature->shape, feature->rows, (double)(1ll << i));
    return RF_OK;
}

static rf_status count(const rf__fused_feature *features, int64_t n_features,
                       const rf__fused_classes *classes, rf__fused_map_table *table, int64_t *tiles) {
    int64_t columns[RF_FUSED_MOST_CLASSES] = {0}, total = 0;
    for (int64_t f = 0; f < n_features; f++)
        RF_CHECK(feature_count(&features[f], f, classes, table, columns));
    for (int32_t i = 0; i < classes->count; i++) {
        tiles[i] = (columns[i] + RF_FUSED_TILE - 1) / RF_FUSED_TILE;
        total += tiles[i];
        if (tiles[i] == 0) continue;
        table->runs += 1; /* the last one, which is not full */
        table->tasks_a_bag += 1.0 / RF_FUSED_TILE_BAGS;
    }
    RF_FAIL_IF(total > INT32_MAX / RF_FUSED_TILE, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: %" PRId64
               " features have so wide rows that the GPU cannot share their work out. Give their expected "
               "lookups, or fewer features a call.",
               n_features);
    table->n_tiles = (int32_t)total;
    return RF_OK;
}

/* A byte for each class of a feature, by bucket. */
static rf_u64 bytes_of(const int32_t *classes) {
    rf_u64 bytes = 0;
    for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++)
        bytes |= (rf_u64)(classes[b] < 0 ? RF_FUSED_NO_CLASS : classes[b]) << 8 * b;
    return bytes;
}

/* In the order of its places on the device: features, classes, the classes of tiles. */
static void table_write(const rf__fused_feature *features, int64_t n_features,
                        const rf__fused_classes *classes, const int64_t *tiles, void *memory) {
    rf_fused_map_feature *feature = memory;
    rf_fused_map_class *of = (rf_fused_map_class *)(feature + n_features);
    uint8_t *tile_class = (uint8_t *)(of + classes->count);
    int32_t first_tile = 0;
    for (int64_t f = 0; f < n_features; f++) {
        const rf__fused_geometry *shape = &features[f].shape;
        feature[f] = (rf_fused_map_feature){bytes_of(features[f].classes),
                                            bytes_of(features[f].classes_of_few),
                                            shape->columns,
                                            shape->slices,
                                            (float)features[f].rows,
                                            (float)rf__fused_cost_of_miss(shape)};
    }
    for (int32_t i = 0; i < classes->count; i++) {
        const rf__fused_class *schedule = &classes->of[i];
        const bool pools = schedule->kind == RF_FUSED_CLASS_POOL;
        of[i] = (rf_fused_map_class){pools ? -1 : first_tile, bags_at_once_of(schedule),
                                     pools ? (float)rf__fused_in_flight(schedule) : 1, 0};
        for (int64_t k = 0; k < tiles[i]; k++) tile_class[first_tile + k] = (uint8_t)i;
        first_tile += (int32_t)tiles[i];
    }
}

rf_status rf__fused_map_table_fill(const rf__fused_feature *features, int64_t n_features,
                                   const rf__fused_classes *classes, rf__fused_map_table *table,
                                   void **upload, int64_t *upload_bytes) {
    int64_t tiles[RF_FUSED_MOST_CLASSES] = {0};
    table->n_classes = classes->count;
    table->all_classes = *classes;
    RF_CHECK(count(features, n_features, classes, table, tiles));
    table->classes_at = n_features * (int64_t)sizeof(rf_fused_map_feature);
    table->tile_classes_at = table->classes_at + classes->count * (int64_t)sizeof(rf_fused_map_class);
    *upload_bytes = table->tile_classes_at + table->n_tiles;
    *upload = calloc(1, (size_t)*upload_bytes + 1);
    RF_FAIL_IF(*upload == NULL, RF_ERR_MEMORY, "no memory to map %" PRId64 " features", n_features);
    table_write(features, n_features, classes, tiles, *upload);
    return RF_OK;
}

/* Returns the number of worthwhile tasks, except for those that runs begin. The estimate assumes equally long
 * bags: with more work, tasks are longer, and with less, blocks end at once, which costs little. */
static double most_cuts(const rf__gpu *gpu, const rf__fused_map_table *table, int64_t bags, int64_t lookups,
                        int64_t n_features) {
    const double blocks_at_once = (double)gpu->sms * RF__FUSED_BLOCKS;
    const double mean = (double)lookups / ((double)bags * (double)n_features);
    const double *blocks = table->blocks_a_bag[rf_fused_bucket(mean)];
    double total = rf__fused_interpolate(table->misses, (double)lookups / (double)n_features);
    for (int32_t i = 0; i < table->n_classes; i++)
        if (blocks[i] > 0)
            total += blocks[i] * (double)bags * rf__fused_cost(&table->all_classes.of[i], mean, false);
    const double cuts = total / rf__fused_target(total, blocks_at_once);
    return cuts > 2 * blocks_at_once ? cuts : 2 * blocks_at_once;
}

/* Of a batch, at most. */
static rf_status most_tasks(const rf__fused_map_table *table, const rf_fused_embedding_bag_params *params,
                            double cuts, int32_t *tasks) {
    /* A run of some work has less than work / target + 1 tasks; `work` and so the sum are rounded in float32.
     * No run has more than its bags allow. */
    const double by_work = cuts * (1 + 1.0 / 1024) + table->runs + 2;
    const double by_bags = (double)params->bags * table->tasks_a_bag + table->runs + 2;
    const double task_bound = by_work < by_bags ? by_work : by_bags;
    RF_FAIL_IF(task_bound > INT32_MAX / 2, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
               " bags make up to %.0f tasks; expected at most %d",
               params->n_features, params->bags, task_bound, INT32_MAX / 2);
    *tasks = (int32_t)task_bound;
    return RF_OK;
}

static int32_t blocks_for(const rf__gpu *gpu, int32_t tasks) {
    int32_t blocks = tasks / TASKS_OF_BLOCK;
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    if (blocks > gpu->sms) blocks = gpu->sms;
    return blocks < 1 ? 1 : blocks;
}

static void bind(rf__launches *launches) {
    static const size_t of_table[] = {offsetof(rf_fused_map_args, features),
                                      offsetof(rf_fused_map_args, classes),
                                      offsetof(rf_fused_map_args, tile_classes)};
    static const size_t of_workspace[] = {
        offsetof(rf_fused_map_args, n_tasks), offsetof(rf_fused_map_args, tasks),
        offsetof(rf_fused_map_args, lanes), offsetof(rf_fused_map_args, tile_means)};
    for (size_t i = 0; i < sizeof of_table / sizeof of_table[0]; i++)
        rf__launches_bind_upload(launches, RF__FUSED_UPLOAD_PARTITION, of_table[i]);
    for (size_t i = 0; i < sizeof of_workspace / sizeof of_workspace[0]; i++)
        rf__launches_bind_workspace(launches, of_workspace[i]);
}

rf_status rf__fused_map_lower(const rf__gpu *gpu, const rf__fused_map_table *table,
                              const rf_fused_embedding_bag_params *params, rf__launches *launches,
                              rf__fused_device_mapping *mapping) {
    const double cuts = most_cuts(gpu, table, params->bags, params->lookups, params->n_features);
    const int32_t offset_type = (int32_t)params->offset_type;
    RF_CHECK(most_tasks(table, params, cuts, &mapping->most_tasks));
    const int32_t blocks = blocks_for(gpu, mapping->most_tasks);
    mapping->n_tasks = (uint64_t)launches->workspace_bytes;
    mapping->tasks = mapping->n_tasks + 16;
    mapping->lanes = mapping->tasks + sizeof(rf_fused_task) * (uint64_t)mapping->most_tasks;
    const uint64_t tile_means =
        mapping->lanes + (uint64_t)table->n_tiles * RF_FUSED_TILE * sizeof(rf_fused_lane);
    const rf_fused_map_args args = {.offsets = (uintptr_t)params->offsets,
                                    .classes = (uint64_t)table->classes_at,
                                    .tile_classes = (uint64_t)table->tile_classes_at,
                                    .lookups = params->lookups,
                                    .n_features = (int32_t)params->n_features,
                                    .bags = (int32_t)params->bags,
                                    .n_classes = table->n_classes,
                                    .n_tiles = table->n_tiles,
                                    .most_tasks = mapping->most_tasks,
                                    .most_cuts = (float)cuts,
                                    .least_cuts =
                                        (float)gpu->sms * RF__FUSED_BLOCKS * RF_FUSED_LEAST_TASKS_A_BLOCK,
                                    .n_tasks = mapping->n_tasks,
                                    .tasks = mapping->tasks,
                                    .lanes = mapping->lanes,
                                    .tile_means = tile_means};
    const int64_t offset_bytes = params->offset_type == RF_INT64 ? 8 : 4;
    const rf__kernel_launch launch = {
        .source = &source,
        .describe = describe,
        .grid = {(uint32_t)blocks},
        .block = {RF_FUSED_MAP_BLOCK},
        .overlap = RF__OVERLAP_ALWAYS,
        .read_bytes =
            (params->n_features * params->bags + 1) * offset_bytes + table->tile_classes_at + table->n_tiles,
        .written_bytes = (int64_t)(tile_means - mapping->n_tasks)}; /* as if all tasks existed */
    RF_CHECK(rf__launches_add(launches, &launch, &offset_type, sizeof offset_type, &args, sizeof args));
    bind(launches);
    launches->workspace_bytes =
        (int64_t)tile_means + (int64_t)table->n_tiles * blocks * (int64_t)sizeof(uint32_t);
    return RF_OK;
}
