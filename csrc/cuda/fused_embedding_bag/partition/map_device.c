/* partition/map.cu: what it reads, the room for what it writes, its launch. */
#include "cuda/fused_embedding_bag/partition/map_device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const rf__kernel_source source = {"fused_embedding_bag/partition/map.cu", "rf_fused_map"};

enum {
    BLOCK = 1024,
    MOST_BLOCKS = 16, /* that write tasks, each of which makes the whole plan */
    TASKS_A_BLOCK = 512,
    NO_CLASS = 255
};

typedef struct variant {
    int32_t offset_type, unused;
} variant;

/* As in partition/map.cu. */
typedef struct map_feature {
    uint8_t class_of[RF__FUSED_BUCKETS], few_of[RF__FUSED_BUCKETS];
    int32_t columns, slices;
    float rows, steps_of_miss;
} map_feature;
typedef struct map_class {
    int32_t first_tile, together;
    float in_flight;
    int32_t unused;
} map_class;
typedef struct arguments {
    const void *offsets;
    rf__cu_pointer features, classes, tile_classes;
    int64_t lookups;
    int32_t n_features, bags, n_classes, n_tiles, most_tasks;
    float most_turns, least_turns;
    int32_t unused;
    rf__cu_pointer n_tasks, tasks, lanes, tile_means;
} arguments;
_Static_assert(sizeof(map_feature) == 32 && sizeof(map_class) == 16 &&
                   (int)RF__FUSED_MOST_CLASSES <= (int)NO_CLASS,
               "as in partition/map.cu");

static rf_status describe(const void *key, const rf__cuda_device *device, rf__kernel_options *options) {
    (void)device;
    const variant *made = key;
    char ends[128] = "";
    size_t used = 0;
    for (int32_t b = 0; b < RF__FUSED_BUCKETS - 1 && used < sizeof ends; b++)
        used += (size_t)snprintf(ends + used, sizeof ends - used, "%s%g", b > 0 ? "," : "",
                                 rf__fused_bucket_end(b));
    options->dynamic_shared = 0;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_OFFSET=%s -DRF_BLOCK=%d -DRF_BUCKET_ENDS=%s -DRF_MOST_CLASSES=%d -DRF_LEAST_WORK=%d "
             "-DRF_LEAST_WORK_OF_ALL=%d -DRF_LONG=%d -DRF_COLUMN_STEPS=%d "
             "-DRF_LONGER_STEPS=%d -DRF_FEW_BAGS=%d",
             rf__kernel_integer(made->offset_type), (int)BLOCK, ends, (int)RF__FUSED_MOST_CLASSES,
             (int)RF__FUSED_LEAST_WORK, (int)RF__FUSED_LEAST_WORK_OF_ALL, (int)RF__FUSED_LONG,
             (int)RF__FUSED_COLUMN_STEPS, (int)RF__FUSED_LONGER_STEPS, (int)RF__FUSED_FEW_BAGS);
    return RF_OK;
}

rf_status rf__fused_map_compile(const char *arch) {
    static const variant every[] = {{RF_INT32, 0}, {RF_INT64, 0}};
    return rf__jit_compile_each(&source, every, sizeof every[0], sizeof every / sizeof every[0], describe,
                                arch);
}

static int32_t together_of(const rf__fused_class *made) {
    return made->kind == RF__FUSED_POOL ? RF__FUSED_BLOCK / made->threads : RF__FUSED_TOGETHER;
}

/* Blocks that one bag of a feature takes at once, and runs that it makes, at most. */
static double blocks_a_bag(const rf__fused_geometry *shape, const rf__fused_class *made, double *runs) {
    *runs = made->kind == RF__FUSED_COLUMNS ? (double)shape->columns / RF__FUSED_TILE : shape->slices;
    return *runs / together_of(made);
}

/* Counts what a feature needs; adds its columns to those of each of its classes. */
static rf_status feature_count(const rf__fused_feature *feature, int64_t number,
                               const rf__fused_classes *classes, rf__fused_map_table *table,
                               int64_t *columns) {
    double most_runs = 0, most_blocks = 0;
    for (int32_t b = 0; b < RF__FUSED_BUCKETS; b++) {
        const int32_t at = feature->class_of[b];
        double runs;
        if (at < 0) continue;
        const rf__fused_class *made = &classes->of[at];
        if (made->split > 1) {
            return rf__fail(
                RF_ERR_VALUE,
                "recfuse.fused_embedding_bag: schedules[%" PRId64 "] has split=%d, and how long bags are "
                "is not known ahead; must be 1 then: or give each feature's expected lookups, or a "
                "mapping",
                number, (int)made->split);
        }
        const double blocks = blocks_a_bag(&feature->shape, made, &runs);
        table->blocks_a_bag[b][at] += blocks;
        if (runs > most_runs) most_runs = runs;
        if (blocks > most_blocks) most_blocks = blocks;
        const double of_few = blocks_a_bag(&feature->shape, &classes->of[feature->few_of[b]], &runs);
        if (of_few > most_blocks) most_blocks = of_few;
        bool is_new = made->kind == RF__FUSED_COLUMNS;
        for (int32_t before = 0; before < b; before++) is_new &= feature->class_of[before] != at;
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
    rf_status status = RF_OK;
    int64_t columns[RF__FUSED_MOST_CLASSES] = {0}, all = 0;
    for (int64_t f = 0; f < n_features; f++) RF_TRY(feature_count(&features[f], f, classes, table, columns));
    for (int32_t i = 0; i < classes->count; i++) {
        tiles[i] = (columns[i] + RF__FUSED_TILE - 1) / RF__FUSED_TILE;
        all += tiles[i];
        if (tiles[i] == 0) continue;
        table->runs += 1; /* the last one, which is not full */
        table->tasks_a_bag += 1.0 / RF__FUSED_TOGETHER;
    }
    if (all > INT32_MAX / RF__FUSED_TILE) {
        status = rf__fail(RF_ERR_UNSUPPORTED,
                          "recfuse.fused_embedding_bag: %" PRId64
                          " features have so wide rows that the GPU cannot "
                          "share their work out; give their expected lookups, or fewer features a call",
                          n_features);
    }
    table->n_tiles = (int32_t)all;
out:
    return status;
}

/* In the order in which it lies on the device: features, classes, the classes of tiles. */
static void table_write(const rf__fused_feature *features, int64_t n_features,
                        const rf__fused_classes *classes, const int64_t *tiles, void *memory) {
    map_feature *feature = memory;
    map_class *of = (map_class *)(feature + n_features);
    uint8_t *tile_class = (uint8_t *)(of + classes->count);
    int32_t first_tile = 0;
    for (int64_t f = 0; f < n_features; f++) {
        for (int32_t b = 0; b < RF__FUSED_BUCKETS; b++) {
            const int32_t at = features[f].class_of[b];
            feature[f].class_of[b] = (uint8_t)(at < 0 ? NO_CLASS : at);
            feature[f].few_of[b] = (uint8_t)(at < 0 ? NO_CLASS : features[f].few_of[b]);
        }
        feature[f].columns = features[f].shape.columns;
        feature[f].slices = features[f].shape.slices;
        feature[f].rows = (float)features[f].rows;
        feature[f].steps_of_miss = (float)rf__fused_steps_of_miss(&features[f].shape);
    }
    for (int32_t i = 0; i < classes->count; i++) {
        const rf__fused_class *made = &classes->of[i];
        const bool pools = made->kind == RF__FUSED_POOL;
        of[i] = (map_class){pools ? -1 : first_tile, together_of(made),
                            pools ? (float)rf__fused_in_flight(made) : 1, 0};
        for (int64_t k = 0; k < tiles[i]; k++) tile_class[first_tile + k] = (uint8_t)i;
        first_tile += (int32_t)tiles[i];
    }
}

rf_status rf__fused_map_table_new(const rf__cuda_store *store, const rf__fused_feature *features,
                                  int64_t n_features, const rf__fused_classes *classes,
                                  rf__fused_map_table **made) {
    rf_status status = RF_OK;
    int64_t tiles[RF__FUSED_MOST_CLASSES] = {0};
    void *memory = NULL;
    rf__fused_map_table *table = calloc(1, sizeof *table);
    if (table == NULL) return rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features", n_features);
    table->n_classes = classes->count;
    table->made = *classes;
    RF_TRY(count(features, n_features, classes, table, tiles));
    const size_t feature_bytes = (size_t)n_features * sizeof(map_feature);
    const size_t class_bytes = (size_t)classes->count * sizeof(map_class);
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

/* Steps of all rows that come from memory, if all features have so many lookups. */
static double misses_of(const rf__fused_map_table *table, double lookups) {
    int32_t i = 0;
    while (i < RF__FUSED_LOGARITHMS - 1 && (double)(2ll << i) <= lookups) i++;
    if (i == RF__FUSED_LOGARITHMS - 1) return table->misses[i];
    if (lookups < 1) return table->misses[0] * lookups;
    return table->misses[i] + (table->misses[i + 1] - table->misses[i]) * (lookups / (double)(1ll << i) - 1);
}

/* Tasks that are worth while, but for those that runs begin. That is estimated as if all bags were about equally long:
 * where there is more work, tasks have more, and where there is less, blocks end at once, which costs a little. */
static double most_turns(const rf__cuda_device *device, const rf__fused_map_table *table, int64_t bags,
                         int64_t lookups, int64_t n_features) {
    const double places = (double)device->sms * RF__FUSED_BLOCKS;
    const double mean = (double)lookups / ((double)bags * (double)n_features);
    const double *blocks = table->blocks_a_bag[rf__fused_bucket(mean)];
    double all = misses_of(table, (double)lookups / (double)n_features);
    for (int32_t i = 0; i < table->n_classes; i++)
        if (blocks[i] > 0) all += blocks[i] * (double)bags * rf__fused_steps(&table->made.of[i], mean, false);
    const double turns = all / rf__fused_target(all, places);
    return turns > 2 * places ? turns : 2 * places;
}

rf_status rf__fused_map_prepare(const rf__cuda_device *device, const rf__fused_map_table *table,
                                const rf_fused_embedding_bag_params *params, rf__fused_device_map *map) {
    rf_status status = RF_OK;
    const variant made = {(int32_t)params->offset_type, 0};
    const double turns = most_turns(device, table, params->bags, params->lookups, params->n_features);
    /* A run of some work has less than work / target + 1 tasks; `work` and so the sum are rounded in float32. No run
     * has more than its bags allow. */
    const double by_work = turns * (1 + 1.0 / 1024) + table->runs + 2;
    const double by_bags = (double)params->bags * table->tasks_a_bag + table->runs + 2;
    const double most = by_work < by_bags ? by_work : by_bags;
    if (most > INT32_MAX / 2) {
        return rf__fail(RF_ERR_UNSUPPORTED,
                        "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
                        " bags make up to %.0f tasks; "
                        "at most %d are supported",
                        params->n_features, params->bags, most, INT32_MAX / 2);
    }
    *map = (rf__fused_device_map){.table = table, .most_tasks = (int32_t)most, .most_turns = turns};
    map->blocks = map->most_tasks / TASKS_A_BLOCK;
    if (map->blocks > MOST_BLOCKS) map->blocks = MOST_BLOCKS;
    if (map->blocks > device->sms) map->blocks = device->sms;
    if (map->blocks < 1) map->blocks = 1;
    map->workspace_bytes = 16 + (int64_t)sizeof(rf__fused_task) * map->most_tasks +
                           (int64_t)table->n_tiles * (RF__FUSED_TILE * (int64_t)sizeof(rf__fused_lane) +
                                                      map->blocks * (int64_t)sizeof(uint32_t));
    RF_TRY(rf__jit_kernel(device, &source, &made, sizeof made, describe, &map->kernel));
out:
    return status;
}

rf_status rf__fused_map_launch(const rf__cuda_device *device, const rf__fused_device_map *map,
                               const rf_fused_embedding_bag_params *params, void *workspace, void *stream,
                               rf__fused_device_mapping *mapping) {
    rf_status status = RF_OK;
    const rf__fused_map_table *table = map->table;
    mapping->n_tasks = (uintptr_t)workspace;
    mapping->tasks = mapping->n_tasks + 16;
    mapping->lanes = mapping->tasks + sizeof(rf__fused_task) * (uint64_t)map->most_tasks;
    arguments values = {.offsets = params->offsets,
                        .features = table->features,
                        .classes = table->classes,
                        .tile_classes = table->tile_classes,
                        .lookups = params->lookups,
                        .n_features = (int32_t)params->n_features,
                        .bags = (int32_t)params->bags,
                        .n_classes = table->n_classes,
                        .n_tiles = table->n_tiles,
                        .most_tasks = map->most_tasks,
                        .most_turns = (float)map->most_turns,
                        .least_turns = (float)device->sms * RF__FUSED_BLOCKS * RF__FUSED_LEAST_TURNS,
                        .n_tasks = mapping->n_tasks,
                        .tasks = mapping->tasks,
                        .lanes = mapping->lanes,
                        .tile_means = mapping->lanes +
                                      (uint64_t)table->n_tiles * RF__FUSED_TILE * sizeof(rf__fused_lane)};
    const rf__launch_config launch = {.function = map->kernel->function,
                                      .grid = {(uint32_t)map->blocks},
                                      .block = {BLOCK},
                                      .programmatic = true,
                                      .stream = stream};
    RF_TRY(rf__launch(device, &launch, &values));
out:
    return status;
}
