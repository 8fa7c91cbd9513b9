/* Which block works on which bags of which feature (Pan et al., RecFlex, SC'24, section IV-B: thread mapping at run
 * time): from the number of bags and what is expected of them, or from the offsets of a batch.
 *
 * Work (partition/work.c) is cut into tasks of about equal length, so many that each place for a block on the GPU gets
 * several; where bags of a feature cannot be cut so fine, its tasks take longer and come first (partition/map_write.c). The
 * last ones are short, so that all places are busy until the end.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "cuda/fused_embedding_bag/partition/cut.h"

static const double LAST = 0.15; /* of the work; its tasks are shorter: */
static const double LAST_TARGET = 0.5;

static int64_t offset_at(const rf__fused_batch *batch, int64_t place) {
    return batch->offset_type == RF_INT64 ? ((const int64_t *)batch->offsets)[place]
                                          : ((const int32_t *)batch->offsets)[place];
}

static rf_status count_lookups(rf__fused_cut *my, const rf__fused_batch *batch) {
    int64_t begin = batch->offsets != NULL ? offset_at(batch, 0) : 0;
    if (begin != 0) {
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.fused_embedding_bag: offsets[0] is %" PRId64 "; the first bag must begin at 0", begin);
    }
    for (int64_t f = 0; f < my->what.n_features; f++) {
        if (batch->offsets == NULL) {
            const int32_t expected = my->what.features[f].expected;
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

/* Of numbers of bags, which are less than 2^31: several times as fast as with 64 bits. */
static int32_t divide_up(int32_t value, int32_t by) {
    return (int32_t)(((uint32_t)value + (uint32_t)by - 1) / (uint32_t)by);
}

/* Cuts the bags of a run into tasks of about `target`; `together`: bags that a block works on at once, in so many
 * `steps`. */
static void run_cut(const rf__fused_cut *my, double steps, double misses, int32_t together, double target,
                    rf__fused_run *one) {
    const int32_t bags = my->bags, most = divide_up(bags, together);
    const double work = steps * most + misses, wanted = work / target;
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

static void pool_add(rf__fused_cut *my, int64_t f, double target) {
    const rf__fused_estimate *known = &my->estimates[f];
    const rf__fused_class *made = &my->what.classes->of[known->number];
    const int32_t slices = my->what.features[f].shape.slices;
    rf__fused_run one = {.feature = (int32_t)f, .schedule = known->number, .split = made->split};
    run_cut(my, known->steps, known->misses / made->split, RF__FUSED_BLOCK / made->threads, target, &one);
    for (one.slice = 0; one.slice < slices; one.slice++) my->runs[my->n_runs++] = one;
    const int64_t groups = (int64_t)one.count * slices;
    my->n_tasks += groups * one.split;
    if (one.split == 1) return;
    my->n_groups += groups;
    my->n_places += groups * rf__fused_places(made, one.bags_each);
}

/* The tile of a class that has room, and its filled lanes. */
typedef struct open_tile {
    int64_t tile;
    int32_t filled;
} open_tile;

static void tile_add(rf__fused_cut *my, open_tile *open, int32_t number) {
    open->tile = my->n_tiles++;
    open->filled = 0;
    for (int32_t i = 0; i < RF__FUSED_TILE; i++)
        my->lanes[open->tile * RF__FUSED_TILE + i] = (rf__fused_lane){-1, 0};
    my->tile_mean[open->tile] = 0;
    my->runs[my->n_runs++] = (rf__fused_run){.feature = (int32_t)open->tile, .schedule = number, .split = 1};
}

static void columns_add(rf__fused_cut *my, int64_t f, open_tile *open) {
    const rf__fused_estimate *known = &my->estimates[f];
    const int32_t columns = my->what.features[f].shape.columns;
    for (int32_t column = 0; column < columns; column++) {
        if (open->filled == 0 || open->filled == RF__FUSED_TILE) tile_add(my, open, known->number);
        my->lanes[open->tile * RF__FUSED_TILE + open->filled++] = (rf__fused_lane){(int32_t)f, column};
        if (known->mean > my->tile_mean[open->tile]) my->tile_mean[open->tile] = known->mean;
    }
}

/* Tiles get their tasks once all of their lanes are known. */
static void tiles_cut(rf__fused_cut *my) {
    for (int64_t i = 0; i < my->n_runs; i++) {
        rf__fused_run *one = &my->runs[i];
        if (one->count > 0) continue;
        const double mean = my->tile_mean[one->feature];
        run_cut(my, rf__fused_steps(&my->what.classes->of[one->schedule], mean, my->n_staged > 0), 0,
                RF__FUSED_TOGETHER, my->target, one);
        one->slice = mean > 1;
        my->n_tasks += one->count;
    }
}

static rf_status memory_new(rf__fused_cut *my) {
    int64_t lanes = 0, slices = 0;
    for (int64_t f = 0; f < my->what.n_features; f++) {
        lanes += my->what.features[f].shape.columns;
        slices += my->what.features[f].shape.slices;
    }
    my->most_tiles = lanes / RF__FUSED_TILE + my->what.classes->count + 1;
    my->most_runs = my->most_tiles + slices;
    my->lookups = malloc((size_t)(my->what.n_features + 1) * sizeof *my->lookups);
    my->staged = calloc((size_t)my->what.n_features + 1, sizeof *my->staged);
    my->estimates = malloc((size_t)(my->what.n_features + 1) * sizeof *my->estimates);
    my->order = malloc((size_t)(my->what.n_features + 1) * sizeof *my->order);
    my->runs = malloc((size_t)(my->most_runs + 1) * sizeof *my->runs);
    my->lanes = malloc((size_t)my->most_tiles * RF__FUSED_TILE * sizeof *my->lanes);
    my->tile_mean = malloc((size_t)my->most_tiles * sizeof *my->tile_mean);
    if (my->lookups != NULL && my->staged != NULL && my->estimates != NULL && my->order != NULL &&
        my->runs != NULL && my->lanes != NULL && my->tile_mean != NULL)
        return RF_OK;
    return rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features to blocks", my->what.n_features);
}

static bool is_tiled(const rf__fused_cut *my, int64_t f) {
    const int32_t number = my->estimates[f].number;
    return number >= 0 && my->what.classes->of[number].kind == RF__FUSED_COLUMNS;
}

/* The runs of all features; those of tiles are not cut yet. `all`: the work of all. */
static void features_add(rf__fused_cut *my, double all) {
    open_tile open[RF__FUSED_MOST_CLASSES] = {{0, 0}};
    double before = 0;
    for (int64_t f = 0; f < my->what.n_features; f++) {
        if (!is_tiled(my, f)) continue;
        columns_add(my, f, &open[my->estimates[f].number]);
        before += my->estimates[f].work;
    }
    for (int64_t i = 0; i < my->what.n_features; i++) {
        const int32_t f = my->order[i];
        if (my->estimates[f].number < 0 || is_tiled(my, f)) continue;
        pool_add(my, f, before < (1 - LAST) * all ? my->target : my->target * LAST_TARGET);
        before += my->estimates[f].work;
    }
}

static rf_status cut_all(rf__fused_cut *my, const rf__fused_batch *batch, int32_t sms,
                         int32_t blocks_per_sm) {
    rf_status status = RF_OK;
    const rf__fused_feature *features = my->what.features;
    const int64_t n_features = my->what.n_features;
    RF_TRY(memory_new(my));
    RF_TRY(count_lookups(my, batch));
    my->n_staged = rf__fused_stage(features, n_features, my->lookups, batch, sms, my->staged);
    const double all = rf__fused_estimate_all(my);
    my->target = rf__fused_target(all, (double)sms * blocks_per_sm);
    rf__fused_order(my);
    features_add(my, all);
    tiles_cut(my);
    if (my->n_staged > 0)
        RF_TRY(rf__fused_staged_lists(features, n_features, my->lookups, my->staged, my->n_staged, sms, batch,
                                      &my->lists, &my->list_rows));
    my->rows = rf__fused_rows_of(my->n_tasks, my->n_tiles) + my->list_rows;
    if (my->rows > INT32_MAX || my->n_places > INT32_MAX) {
        status = rf__fail(RF_ERR_UNSUPPORTED,
                          "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
                          " bags make %" PRId64 " tasks; at most %d are supported",
                          n_features, batch->bags, my->n_tasks, INT32_MAX);
    }
out:
    return status;
}

rf_status rf__fused_cut_new(const rf__fused_mappable *what, const rf__fused_batch *batch, int32_t sms,
                            int32_t blocks_per_sm, rf__fused_cut **cut, int64_t *rows) {
    *cut = NULL;
    if (batch->bags <= 0 || sms <= 0 || batch->bags > INT32_MAX - RF__FUSED_BLOCK) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.fused_embedding_bag: a mapping for %" PRId64
                        " bags and %d SMs; both must be 1 or more, and bags less than 2^31",
                        batch->bags, (int)sms);
    }
    rf__fused_cut *my = calloc(1, sizeof *my);
    if (my == NULL) return rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features", what->n_features);
    my->what = *what;
    my->bags = (int32_t)batch->bags;
    const rf_status status = cut_all(my, batch, sms, blocks_per_sm);
    if (status == RF_OK) {
        *cut = my;
        *rows = my->rows;
    } else {
        rf__fused_cut_free(my);
    }
    return status;
}

void rf__fused_cut_free(rf__fused_cut *my) {
    if (my == NULL) return;
    free(my->lists);
    free(my->tile_mean);
    free(my->lanes);
    free(my->runs);
    free(my->order);
    free(my->estimates);
    free(my->staged);
    free(my->lookups);
    free(my);
}
