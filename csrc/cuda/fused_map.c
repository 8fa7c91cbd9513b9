/* Which block works on which bags of which feature (Pan et al., RecFlex, SC'24, section IV-B: thread mapping at run
 * time): from the number of bags and what is expected of them, or from the offsets of a batch.
 *
 * Work is estimated as the time that a block takes, in steps: of a batch of rows in flight, of what a bag costs
 * beside, of rows that nobody has read before. It is cut into tasks of about equal work, so many that each place for a
 * block on the GPU gets several; where bags of a feature cannot be cut so fine, its tasks take longer and come first.
 * Of the others, those come first whose rows come from memory, and last those whose rows are in L2; and the last ones
 * are short, so that all places are busy until the end.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_cut.h"

enum { ORDER_KEYS = 128 };

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

double rf__fused_in_flight(const rf__fused_class *made) {
    return (double)made->threads / made->lanes * (made->distance < 4 ? 4 : made->distance);
}

double rf__fused_steps(const rf__fused_class *made, double mean) {
    if (made->kind == RF__FUSED_COLUMNS) return RF__FUSED_COLUMN_STEPS * (mean > 1 ? mean : 1);
    const double batches = mean / rf__fused_in_flight(made);
    return 1 + (batches > 1 ? batches : 1) / made->split;
}

double rf__fused_steps_of_miss(const rf__fused_geometry *shape) {
    const int32_t bytes = shape->row_bytes > RF__FUSED_SECTOR ? shape->row_bytes : RF__FUSED_SECTOR;
    return (double)bytes / RF__FUSED_BYTES_A_STEP;
}

double rf__fused_target(double all, double places) {
    double least = all / (places * RF__FUSED_LEAST_TURNS);
    if (least > RF__FUSED_LEAST_WORK) least = RF__FUSED_LEAST_WORK;
    if (least < RF__FUSED_LEAST_WORK_OF_ALL) least = RF__FUSED_LEAST_WORK_OF_ALL;
    const double target = all / (places * RF__FUSED_TURNS);
    return target > least ? target : least;
}

static void estimate(const rf__fused_cut *my, int64_t f, rf__fused_estimate *one) {
    const rf__fused_feature *feature = &my->what.features[f];
    const double bags = my->bags, lookups = my->lookups[f], rows = (double)feature->rows;
    *one = (rf__fused_estimate){.mean = lookups / bags, .number = -1};
    if (!my->staged[f]) one->number = feature->class_of[rf__fused_bucket(one->mean)];
    if (one->number < 0) return;
    const rf__fused_class *made = &my->what.classes->of[one->number];
    one->steps = rf__fused_steps(made, one->mean);
    if (made->kind == RF__FUSED_COLUMNS) {
        one->work = bags / RF__FUSED_TOGETHER * one->steps * feature->shape.columns / RF__FUSED_TILE;
        return;
    }
    /* Of r rows, l lookups read about r l / (r + l) different ones. */
    if (lookups > 0)
        one->misses = rows * lookups / (rows + lookups) * rf__fused_steps_of_miss(&feature->shape) /
                      feature->shape.slices;
    one->work = (bags / (RF__FUSED_BLOCK / made->threads) * one->steps * made->split + one->misses) *
                feature->shape.slices;
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
        run_cut(my, rf__fused_steps(&my->what.classes->of[one->schedule], my->tile_mean[one->feature]), 0,
                RF__FUSED_TOGETHER, my->target, one);
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

/* How many rows there are for a lookup, in quarters of powers of two. */
static uint32_t rows_a_lookup(const rf__fused_cut *my, int64_t f) {
    enum { QUARTERS = 21, LEAST = (127 - ORDER_KEYS / 8) * 4 }; /* of the bits of a float */
    const float ratio = (float)((double)my->what.features[f].rows / (my->lookups[f] + 1));
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    const int32_t key = (int32_t)(bits >> QUARTERS) - LEAST;
    return (uint32_t)(key < 0 ? 0 : key < ORDER_KEYS ? key : ORDER_KEYS - 1);
}

/* Features with most rows for a lookup come first: those rows come from memory, and take longest. */
static void order_set(rf__fused_cut *my) {
    int32_t place[ORDER_KEYS + 1] = {0};
    for (int64_t f = 0; f < my->what.n_features; f++) place[ORDER_KEYS - 1 - rows_a_lookup(my, f) + 1]++;
    for (int32_t key = 0; key < ORDER_KEYS; key++) place[key + 1] += place[key];
    for (int64_t f = 0; f < my->what.n_features; f++)
        my->order[place[ORDER_KEYS - 1 - rows_a_lookup(my, f)]++] = (int32_t)f;
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
    double all = 0;
    RF_TRY(memory_new(my));
    RF_TRY(count_lookups(my, batch));
    const int64_t n_staged = rf__fused_stage(features, n_features, my->lookups, batch, sms, my->staged);
    for (int64_t f = 0; f < n_features; f++) {
        estimate(my, f, &my->estimates[f]);
        all += my->estimates[f].work;
    }
    my->target = rf__fused_target(all, (double)sms * blocks_per_sm);
    order_set(my);
    features_add(my, all);
    tiles_cut(my);
    if (n_staged > 0)
        RF_TRY(rf__fused_staged_lists(features, n_features, my->lookups, my->staged, n_staged, sms, batch,
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
