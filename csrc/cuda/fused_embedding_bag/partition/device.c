/* partition/map.cu: what it reads, the room for what it writes, its launch. */
#include "cuda/fused_embedding_bag/partition/device.h"
#include "cuda/fused_embedding_bag/kernel.h"
#include "cuda/fused_embedding_bag/partition/cost.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const rf__kernel_source source = {"fused_embedding_bag/partition/map.cu", "rf_fused_map"};

enum {
    MOST_BLOCKS = 16, /* that write tasks, each of which makes the whole plan */
    TASKS_OF_BLOCK = 512
};

typedef struct variant {
    int32_t offset_type, unused;
} variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const variant *variant_of_key = key;
    options->dynamic_shared = 0;
    snprintf(options->defines, sizeof options->defines, "-DRF_OFFSET=%s -DRF_BLOCK=%d",
             rf__kernel_integer(variant_of_key->offset_type), (int)RF_FUSED_MAP_BLOCK);
    return RF_OK;
}

rf_status rf__fused_map_compile(const char *arch) {
    static const variant every[] = {{RF_INT32, 0}, {RF_INT64, 0}};
    return rf__jit_compile_each(&source, every, sizeof every[0], sizeof every / sizeof every[0], describe,
                                arch);
}

static int32_t bags_at_once_of(const rf__fused_class *schedule) {
    return schedule->kind == RF_FUSED_CLASS_POOL ? RF_FUSED_BLOCK / schedule->threads : RF_FUSED_TILE_BAGS;
}

/* Blocks that one bag of a feature takes at once, and runs that it makes, at most. */
static double blocks_a_bag(const rf__fused_geometry *shape, const rf__fused_class *schedule, double *runs) {
    *runs = schedule->kind == RF_FUSED_CLASS_COLUMNS ? (double)shape->columns / RF_FUSED_TILE : shape->slices;
    return *runs / bags_at_once_of(schedule);
}

/* Counts what a feature needs; adds its columns to those of each of its classes. */
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
                   "recfuse.fused_embedding_bag: schedules[%" PRId64 "] has split=%d, and how long bags are "
                   "is not known ahead; must be 1 then: or give each feature's expected lookups, or a "
                   "mapping",
                   number, (int)schedule->split);
        const double blocks = blocks_a_bag(&feature->shape, schedule, &runs);
        table->blocks_a_bag[b][at] += blocks;
        if (runs > most_runs) most_runs = runs;
        if (blocks > most_blocks) most_blocks = blocks;
        const double of_few = blocks_a_bag(&feature->shape, &classes->of[feature->classes_of_few[b]], &runs);
        if (of_few > most_blocks) most_blocks = of_few;
        bool is_new = schedule->kind == RF_FUSED_CLASS_COLUMNS;
        for (int32_t before = 0; before < b; before++) is_new &= feature->classes[before] != at;
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
    int64_t columns[RF_FUSED_MOST_CLASSES] = {0}, all = 0;
    for (int64_t f = 0; f < n_features; f++)
        RF_CHECK(feature_count(&features[f], f, classes, table, columns));
    for (int32_t i = 0; i < classes->count; i++) {
        tiles[i] = (columns[i] + RF_FUSED_TILE - 1) / RF_FUSED_TILE;
        all += tiles[i];
        if (tiles[i] == 0) continue;
        table->runs += 1; /* the last one, which is not full */
        table->tasks_a_bag += 1.0 / RF_FUSED_TILE_BAGS;
    }
    RF_FAIL_IF(all > INT32_MAX / RF_FUSED_TILE, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: %" PRId64 " features have so wide rows that the GPU cannot "
               "share their work out; give their expected lookups, or fewer features a call",
               n_features);
    table->n_tiles = (int32_t)all;
    return RF_OK;
}

/* A byte for each class of a feature, by bucket. */
static rf_u64 bytes_of(const int32_t *classes) {
    rf_u64 bytes = 0;
    for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++)
        bytes |= (rf_u64)(classes[b] < 0 ? RF_FUSED_NO_CLASS : classes[b]) << 8 * b;
    return bytes;
}

/* In the order in which it lies on the device: features, classes, the classes of tiles. */
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

rf_status rf__fused_map_table_new(const rf__cuda_store *store, const rf__fused_feature *features,
                                  int64_t n_features, const rf__fused_classes *classes,
                                  rf__fused_map_table **made) {
    rf_status status = RF_OK;
    int64_t tiles[RF_FUSED_MOST_CLASSES] = {0};
    void *memory = NULL;
    rf__fused_map_table *table = calloc(1, sizeof *table);
    RF_FAIL_IF(table == NULL, RF_ERR_MEMORY, "no memory to map %" PRId64 " features", n_features);
    table->n_classes = classes->count;
    table->all = *classes;
    RF_TRY(count(features, n_features, classes, table, tiles));
    const size_t feature_bytes = (size_t)n_features * sizeof(rf_fused_map_feature);
    const size_t class_bytes = (size_t)classes->count * sizeof(rf_fused_map_class);
    memory = calloc(1, feature_bytes + class_bytes + (size_t)table->n_tiles + 1);
    if (memory == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features", n_features);
        goto out;
    }
    table_write(features, n_features, classes, tiles, memory);
    RF_TRY(rf__cuda_block_new(store, memory, feature_bytes + class_bytes + (size_t)table->n_tiles, true,
                              &table->block));
    table->features = table->block.memory;
    table->classes = table->features + feature_bytes;
    table->tile_classes = table->classes + class_bytes;
out:
    free(memory);
    if (status != RF_OK) {
        free(table);
        table = NULL;
    }
    *made = table;
    return status;
}

void rf__fused_map_table_free(const rf__cuda_store *store, rf__fused_map_table *table) {
    if (table == NULL) return;
    rf__cuda_block_free(store, &table->block);
    free(table);
}

/* The cost of all rows that come from memory, if all features have so many lookups. */
static double misses_of(const rf__fused_map_table *table, double lookups) {
    int32_t i = 0;
    while (i < RF__FUSED_LOGARITHMS - 1 && (double)(2ll << i) <= lookups) i++;
    if (i == RF__FUSED_LOGARITHMS - 1) return table->misses[i];
    if (lookups < 1) return table->misses[0] * lookups;
    return table->misses[i] + (table->misses[i + 1] - table->misses[i]) * (lookups / (double)(1ll << i) - 1);
}

/* Tasks that are worth while, but for those that runs begin. That is estimated as if all bags were about equally long:
 * where there is more work, tasks have more, and where there is less, blocks end at once, which costs a little. */
static double most_cuts(const rf__cuda_device *device, const rf__fused_map_table *table, int64_t bags,
                        int64_t lookups, int64_t n_features) {
    const double blocks_at_once = (double)device->gpu.sms * RF__FUSED_BLOCKS;
    const double mean = (double)lookups / ((double)bags * (double)n_features);
    const double *blocks = table->blocks_a_bag[rf_fused_bucket(mean)];
    double all = misses_of(table, (double)lookups / (double)n_features);
    for (int32_t i = 0; i < table->n_classes; i++)
        if (blocks[i] > 0) all += blocks[i] * (double)bags * rf__fused_cost(&table->all.of[i], mean, false);
    const double cuts = all / rf__fused_target(all, blocks_at_once);
    return cuts > 2 * blocks_at_once ? cuts : 2 * blocks_at_once;
}

rf_status rf__fused_map_prepare(const rf__cuda_device *device, const rf__fused_map_table *table,
                                const rf_fused_embedding_bag_params *params, rf__fused_device_map *map) {
    const variant key = {(int32_t)params->offset_type, 0};
    const double cuts = most_cuts(device, table, params->bags, params->lookups, params->n_features);
    /* A run of some work has less than work / target + 1 tasks; `work` and so the sum are rounded in float32. No run
     * has more than its bags allow. */
    const double by_work = cuts * (1 + 1.0 / 1024) + table->runs + 2;
    const double by_bags = (double)params->bags * table->tasks_a_bag + table->runs + 2;
    const double most = by_work < by_bags ? by_work : by_bags;
    RF_FAIL_IF(most > INT32_MAX / 2, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64 " bags make up to %.0f tasks; "
               "at most %d are supported",
               params->n_features, params->bags, most, INT32_MAX / 2);
    *map = (rf__fused_device_map){.table = table, .most_tasks = (int32_t)most, .most_cuts = cuts};
    map->blocks = map->most_tasks / TASKS_OF_BLOCK;
    if (map->blocks > MOST_BLOCKS) map->blocks = MOST_BLOCKS;
    if (map->blocks > device->gpu.sms) map->blocks = device->gpu.sms;
    if (map->blocks < 1) map->blocks = 1;
    map->workspace_bytes = 16 + (int64_t)sizeof(rf_fused_task) * map->most_tasks +
                           (int64_t)table->n_tiles * (RF_FUSED_TILE * (int64_t)sizeof(rf_fused_lane) +
                                                      map->blocks * (int64_t)sizeof(uint32_t));
    return rf__jit_kernel(device, &source, &key, sizeof key, describe, &map->kernel);
}

rf_status rf__fused_map_launch(const rf__cuda_device *device, const rf__fused_device_map *map,
                               const rf_fused_embedding_bag_params *params, void *workspace, void *stream,
                               rf__fused_device_mapping *mapping) {
    const rf__fused_map_table *table = map->table;
    mapping->n_tasks = (uintptr_t)workspace;
    mapping->tasks = mapping->n_tasks + 16;
    mapping->lanes = mapping->tasks + sizeof(rf_fused_task) * (uint64_t)map->most_tasks;
    rf_fused_map_args values = {
        .offsets = (uintptr_t)params->offsets,
        .features = table->features,
        .classes = table->classes,
        .tile_classes = table->tile_classes,
        .lookups = params->lookups,
        .n_features = (int32_t)params->n_features,
        .bags = (int32_t)params->bags,
        .n_classes = table->n_classes,
        .n_tiles = table->n_tiles,
        .most_tasks = map->most_tasks,
        .most_cuts = (float)map->most_cuts,
        .least_cuts = (float)device->gpu.sms * RF__FUSED_BLOCKS * RF_FUSED_LEAST_TASKS_A_BLOCK,
        .n_tasks = mapping->n_tasks,
        .tasks = mapping->tasks,
        .lanes = mapping->lanes,
        .tile_means = mapping->lanes + (uint64_t)table->n_tiles * RF_FUSED_TILE * sizeof(rf_fused_lane)};
    const rf__launch_config launch = {.function = map->kernel->function,
                                      .grid = {(uint32_t)map->blocks},
                                      .block = {RF_FUSED_MAP_BLOCK},
                                      .programmatic = true,
                                      .stream = stream};
    return rf__launch(device, &launch, &values);
}
