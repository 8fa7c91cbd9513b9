/* Which block works on which bags of which feature (Pan et al., RecFlex, SC'24, section IV-B: thread mapping at run
 * time): from the number of bags and what is expected of them, or from the offsets of a batch.
 *
 * Work is estimated as the time that a block takes, in steps: of a batch of rows in flight, or of what a bag costs
 * beside. It is cut into tasks of about equal work, so many that each place for a block on the GPU gets several; where
 * bags of a feature cannot be cut so fine, its tasks take longer and come first.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused.h"

enum {
    BUCKETS = 64, /* of the work of tasks */
    FLOATS_A_PLACE = RF__FUSED_PLACE_BYTES / 4
};

static const double LONGER = 1.25; /* from bucket to bucket */

/* What is expected of a feature's bags. */
typedef struct estimate {
    double mean; /* lookups of a bag */
    double steps; /* that a block takes for the bags that it works on at once */
    int32_t number; /* of its class; -1: no task of these works on it */
} estimate;

/* Tasks of equal work: those of a feature's slice, or of a tile. */
typedef struct run {
    int32_t feature; /* or the number of a tile */
    int32_t schedule, slice, split;
    int32_t bags_each; /* a task */
    int32_t count; /* of tasks, with others that share their bags counted once; 0: not cut yet */
    float work; /* of a task */
    int64_t next; /* of its bucket; -1: none */
} run;

typedef struct builder {
    const rf__fused_feature *features;
    int64_t n_features;
    const rf__fused_classes *classes;
    const rf__fused_batch *batch;
    double target; /* work of a task */
    double *lookups; /* [n_features] */
    bool *staged; /* [n_features] */
    estimate *estimates; /* [n_features] */
    run *runs;
    int64_t n_runs, most_runs;
    rf__fused_lane *lanes; /* [tiles][32] */
    double *tile_mean; /* of the longest bags in it */
    int64_t n_tiles, most_tiles;
    int64_t n_tasks, n_groups, n_places;
} builder;

static int64_t offset_at(const rf__fused_batch *batch, int64_t place) {
    return batch->offset_type == RF_INT64 ? ((const int64_t *)batch->offsets)[place]
                                          : ((const int32_t *)batch->offsets)[place];
}

static rf_status count_lookups(builder *my) {
    const rf__fused_batch *batch = my->batch;
    int64_t begin = batch->offsets != NULL ? offset_at(batch, 0) : 0;
    if (begin != 0) {
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.fused_embedding_bag: offsets[0] is %" PRId64 "; the first bag must begin at 0", begin);
    }
    for (int64_t f = 0; f < my->n_features; f++) {
        if (batch->offsets == NULL) {
            const int32_t expected = my->features[f].expected;
            my->lookups[f] = expected > 0 ? expected / 16.0 * (double)batch->bags : 0;
            continue;
        }
        const int64_t end = offset_at(batch, (f + 1) * batch->bags);
        if (end < begin) {
            return rf__fail(RF_ERR_VALUE,
                            "recfuse.fused_embedding_bag: offsets[%" PRId64 "] is %" PRId64
                            ", less than %" PRId64 " where feature %" PRId64
                            " begins; offsets must not decrease",
                            (f + 1) * batch->bags, end, begin, f);
        }
        my->lookups[f] = (double)(end - begin);
        begin = end;
    }
    return RF_OK;
}

double rf__fused_in_flight(const rf__fused_class *made) {
    return (double)made->threads / made->lanes * (made->distance < 4 ? 4 : made->distance);
}

double rf__fused_steps(const rf__fused_class *made, double mean) {
    if (made->kind == RF__FUSED_COLUMNS) return mean > 1 ? mean : 1;
    const double batches = mean / rf__fused_in_flight(made);
    return 1 + (batches > 1 ? batches : 1) / made->split;
}

/* Of those that are not staged. */
static void estimate_all(builder *my) {
    const double bags = (double)my->batch->bags;
    for (int64_t f = 0; f < my->n_features; f++) {
        estimate *one = &my->estimates[f];
        one->mean = my->lookups[f] / bags;
        one->number = my->staged[f] ? -1 : my->features[f].class_of[rf__fused_bucket(one->mean)];
        one->steps = one->number < 0 ? 0 : rf__fused_steps(&my->classes->of[one->number], one->mean);
    }
}

/* Of all bags of a feature. */
static double work_of(const builder *my, int64_t f) {
    const estimate *one = &my->estimates[f];
    if (one->number < 0) return 0;
    const rf__fused_class *made = &my->classes->of[one->number];
    const rf__fused_geometry *shape = &my->features[f].shape;
    const double bags = (double)my->batch->bags;
    if (made->kind == RF__FUSED_COLUMNS)
        return bags / RF__FUSED_TOGETHER * one->steps * shape->columns / RF__FUSED_TILE;
    return bags / (RF__FUSED_BLOCK / made->threads) * one->steps * made->split * shape->slices;
}

/* Of numbers of bags, which are less than 2^31: several times as fast as with 64 bits. */
static int32_t divide_up(int32_t value, int32_t by) {
    return (int32_t)(((uint32_t)value + (uint32_t)by - 1) / (uint32_t)by);
}

/* Cuts the bags of a run into tasks of about the target; `together`: bags that a block works on at once. */
static void run_cut(const builder *my, double steps, int32_t together, run *one) {
    const int32_t bags = (int32_t)my->batch->bags, most = divide_up(bags, together);
    const double work = steps * most, wanted = work / my->target;
    int32_t tasks = most;
    if (wanted < most) { /* rounded up, at least 1 */
        tasks = (int32_t)wanted;
        tasks += tasks < wanted || tasks == 0;
    }
    const int32_t each = divide_up(divide_up(bags, tasks), together) * together;
    one->bags_each = each < bags ? each : bags;
    one->count = divide_up(bags, one->bags_each);
    one->work = (float)(work / one->count);
}

/* Places that the partial sums of a group of tasks take, which share `bags`. */
static int64_t places_of(const rf__fused_class *made, int64_t bags) {
    const int64_t elements = made->align / (made->dtype == RF_FLOAT32 ? 4 : 2);
    const int64_t floats = (made->lanes * made->vectors * elements + 1) * bags * made->split;
    return (floats + FLOATS_A_PLACE - 1) / FLOATS_A_PLACE;
}

static void pool_add(builder *my, int64_t f) {
    const estimate *known = &my->estimates[f];
    const rf__fused_class *made = &my->classes->of[known->number];
    const int32_t slices = my->features[f].shape.slices;
    run one = {.feature = (int32_t)f, .schedule = known->number, .split = made->split};
    run_cut(my, known->steps, RF__FUSED_BLOCK / made->threads, &one);
    for (one.slice = 0; one.slice < slices; one.slice++) my->runs[my->n_runs++] = one;
    const int64_t groups = (int64_t)one.count * slices;
    my->n_tasks += groups * one.split;
    if (one.split == 1) return;
    my->n_groups += groups;
    my->n_places += groups * places_of(made, one.bags_each);
}

/* The tile of a class that has room, and its filled lanes. */
typedef struct open_tile {
    int64_t tile;
    int32_t filled;
} open_tile;

static void tile_add(builder *my, open_tile *open, int32_t number) {
    open->tile = my->n_tiles++;
    open->filled = 0;
    for (int32_t i = 0; i < RF__FUSED_TILE; i++)
        my->lanes[open->tile * RF__FUSED_TILE + i] = (rf__fused_lane){-1, 0};
    my->tile_mean[open->tile] = 0;
    my->runs[my->n_runs++] = (run){.feature = (int32_t)open->tile, .schedule = number, .split = 1};
}

static void columns_add(builder *my, int64_t f, open_tile *open) {
    const estimate *known = &my->estimates[f];
    const int32_t columns = my->features[f].shape.columns;
    for (int32_t column = 0; column < columns; column++) {
        if (open->filled == 0 || open->filled == RF__FUSED_TILE) tile_add(my, open, known->number);
        my->lanes[open->tile * RF__FUSED_TILE + open->filled++] = (rf__fused_lane){(int32_t)f, column};
        if (known->mean > my->tile_mean[open->tile]) my->tile_mean[open->tile] = known->mean;
    }
}

/* Tiles get their tasks once all of their lanes are known. */
static void tiles_cut(builder *my) {
    for (int64_t i = 0; i < my->n_runs; i++) {
        run *one = &my->runs[i];
        if (one->count > 0) continue;
        run_cut(my, rf__fused_steps(&my->classes->of[one->schedule], my->tile_mean[one->feature]),
                RF__FUSED_TOGETHER, one);
        my->n_tasks += one->count;
    }
}

/* Tasks that take long come first. Those about as long as they should be stay in the order of features: rows of a
 * feature are then in L2 together, and features that wait for memory run beside those that compute. */
static uint32_t bucket_of(double work, double long_work) {
    uint32_t bucket = 0;
    while (work > long_work && bucket < BUCKETS - 1) {
        work /= LONGER;
        bucket++;
    }
    return bucket;
}

/* Runs of each bucket in a list, in their order: sets first [BUCKETS], -1 where there is none. */
static void runs_sort(builder *my, int64_t *first) {
    int64_t last[BUCKETS];
    for (int32_t bucket = 0; bucket < BUCKETS; bucket++) first[bucket] = -1;
    for (int64_t i = 0; i < my->n_runs; i++) {
        const uint32_t bucket = bucket_of(my->runs[i].work, 1.5 * my->target);
        my->runs[i].next = -1;
        if (first[bucket] < 0) {
            first[bucket] = i;
        } else {
            my->runs[last[bucket]].next = i;
        }
        last[bucket] = i;
    }
}

/* Where tasks are written to, and the number and the place of sums that the next group of them shares. */
typedef struct writer {
    rf__fused_task *to;
    int32_t bags, group, place;
} writer;

/* Half a task, in one store: eight small ones a task took most of the time that a mapping takes. */
typedef int32_t half __attribute__((vector_size(16)));
_Static_assert(2 * sizeof(half) == sizeof(rf__fused_task), "two make a task");

/* Tasks that have their bags for themselves. */
static void tasks_write(writer *my, const run *one) {
    half bags = {one->feature, 0, one->bags_each, one->schedule};
    const half step = {0, one->bags_each, one->bags_each, 0},
               rest = {one->slice, 1 << 16, my->group, my->place};
    for (int32_t i = 0; i < one->count; i++) {
        memcpy(my->to + i, &bags, sizeof bags);
        memcpy((char *)(my->to + i) + sizeof bags, &rest, sizeof rest);
        bags += step;
    }
    my->to += one->count;
    my->to[-1].last_bag = my->bags;
}

/* Tasks of which each `split` share their bags. */
static void groups_write(writer *my, const run *one, const rf__fused_class *made) {
    for (int64_t bag = 0; bag < my->bags; bag += one->bags_each) {
        const int64_t end = bag + one->bags_each;
        for (int32_t part = 0; part < one->split; part++) {
            *my->to++ = (rf__fused_task){.feature = one->feature,
                                         .first_bag = (int32_t)bag,
                                         .last_bag = (int32_t)(end < my->bags ? end : my->bags),
                                         .schedule = one->schedule,
                                         .slice = one->slice,
                                         .part = part | one->split << 16,
                                         .group = my->group,
                                         .place = my->place};
        }
        my->group++;
        my->place += (int32_t)places_of(made, one->bags_each);
    }
}

/* Writes the tasks of all runs, those with most work first. */
static void runs_write(builder *my, rf__fused_task *to) {
    int64_t first[BUCKETS];
    writer tasks = {.to = to, .bags = (int32_t)my->batch->bags};
    runs_sort(my, first);
    for (int32_t bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        for (int64_t i = first[bucket]; i >= 0; i = my->runs[i].next) {
            const run *one = &my->runs[i];
            if (one->split == 1) {
                tasks_write(&tasks, one);
            } else {
                groups_write(&tasks, one, &my->classes->of[one->schedule]);
            }
        }
    }
}

static uint64_t hash_fields(uint64_t hash, const int32_t *fields, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof *fields; i++) hash = (hash ^ (uint32_t)fields[i]) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

int32_t rf__fused_signature(const rf__fused_feature *features, int64_t n_features,
                            const rf__fused_classes *classes) {
    uint64_t hash = hash_fields((uint64_t)classes->count, (const int32_t *)classes->of,
                                (size_t)classes->count * sizeof classes->of[0]);
    for (int64_t f = 0; f < n_features; f++) {
        const int32_t wide[] = {features[f].shape.columns, features[f].shape.slices};
        hash = hash_fields(hash, wide, sizeof wide);
        hash = hash_fields(hash, features[f].class_of, sizeof features[f].class_of);
        hash = hash_fields(hash, features[f].staged_of, sizeof features[f].staged_of);
    }
    return (int32_t)(hash & 0x7fffffff);
}

static rf_status builder_new(builder *my) {
    int64_t lanes = 0, slices = 0;
    for (int64_t f = 0; f < my->n_features; f++) {
        lanes += my->features[f].shape.columns;
        slices += my->features[f].shape.slices;
    }
    my->most_tiles = lanes / RF__FUSED_TILE + my->classes->count + 1;
    my->most_runs = my->most_tiles + slices;
    my->lookups = malloc((size_t)(my->n_features + 1) * sizeof *my->lookups);
    my->staged = calloc((size_t)my->n_features + 1, sizeof *my->staged);
    my->estimates = malloc((size_t)(my->n_features + 1) * sizeof *my->estimates);
    my->runs = malloc((size_t)(my->most_runs + 1) * sizeof *my->runs);
    my->lanes = malloc((size_t)my->most_tiles * RF__FUSED_TILE * sizeof *my->lanes);
    my->tile_mean = malloc((size_t)my->most_tiles * sizeof *my->tile_mean);
    if (my->lookups != NULL && my->staged != NULL && my->estimates != NULL && my->runs != NULL &&
        my->lanes != NULL && my->tile_mean != NULL)
        return RF_OK;
    return rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features to blocks", my->n_features);
}

rf_status rf__fused_map(const rf__fused_feature *features, int64_t n_features,
                        const rf__fused_classes *classes, const rf__fused_batch *batch, int32_t sms,
                        int32_t blocks_per_sm, rf__fused_mapping **mapping, int64_t *rows) {
    rf_status status = RF_OK;
    builder my = {.features = features, .n_features = n_features, .classes = classes, .batch = batch};
    open_tile open[RF__FUSED_MOST_CLASSES] = {{0, 0}};
    double all = 0;
    rf__fused_staged *lists = NULL;
    int64_t n_staged = 0, list_rows = 0;
    *mapping = NULL;
    RF_TRY(builder_new(&my));
    RF_TRY(count_lookups(&my));
    n_staged = rf__fused_stage(features, n_features, batch, my.staged);
    estimate_all(&my);
    for (int64_t f = 0; f < n_features; f++) all += work_of(&my, f);
    my.target = all / ((double)sms * blocks_per_sm * RF__FUSED_TURNS);
    if (my.target < RF__FUSED_LEAST_WORK) my.target = RF__FUSED_LEAST_WORK;
    for (int64_t f = 0; f < n_features; f++) {
        const int32_t number = my.estimates[f].number;
        if (number < 0) continue;
        if (classes->of[number].kind == RF__FUSED_POOL) {
            pool_add(&my, f);
        } else {
            columns_add(&my, f, &open[number]);
        }
    }
    tiles_cut(&my);
    if (n_staged > 0)
        RF_TRY(rf__fused_staged_lists(features, n_features, my.lookups, my.staged, n_staged, sms, batch,
                                      &lists, &list_rows));
    *rows = 1 + my.n_tasks + my.n_tiles * (RF__FUSED_TILE * (int64_t)sizeof(rf__fused_lane) / 32) + list_rows;
    if (*rows > INT32_MAX || my.n_places > INT32_MAX) {
        status = rf__fail(RF_ERR_UNSUPPORTED,
                          "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
                          " bags make %" PRId64 " tasks; at most %d are supported",
                          n_features, batch->bags, my.n_tasks, INT32_MAX);
        goto out;
    }
    *mapping = malloc((size_t)*rows * sizeof **mapping);
    if (*mapping == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a mapping of %" PRId64 " rows", *rows);
        goto out;
    }
    **mapping = (rf__fused_mapping){.version = RF__FUSED_MAPPING_VERSION,
                                    .n_tasks = (int32_t)my.n_tasks,
                                    .n_tiles = (int32_t)my.n_tiles,
                                    .n_groups = (int32_t)my.n_groups,
                                    .places = (int32_t)my.n_places,
                                    .bags = (int32_t)batch->bags,
                                    .n_features = (int32_t)n_features,
                                    .signature = rf__fused_signature(features, n_features, classes)};
    runs_write(&my, (rf__fused_task *)(*mapping + 1));
    memcpy(*mapping + 1 + my.n_tasks, my.lanes, (size_t)my.n_tiles * RF__FUSED_TILE * sizeof *my.lanes);
    if (list_rows > 0) memcpy(*mapping + *rows - list_rows, lists, (size_t)list_rows * sizeof *lists);
out:
    free(lists);
    free(my.tile_mean);
    free(my.lanes);
    free(my.runs);
    free(my.estimates);
    free(my.staged);
    free(my.lookups);
    return status;
}
