/* The partition (Pan et al., RecFlex, SC'24, section IV-B: thread mapping at run time): from the number of
 * bags and their expected lookups, or from the offsets of a batch.
 *
 * Work (partition/cost.c) is cut into tasks of about equal length, so many that each slot for a block on the
 * GPU gets several; if bags of a feature cannot be cut that fine, its tasks take longer and come first
 * (write.c). The last tasks are short, so that all slots are busy until the end.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "families/fused_embedding_bag/partition/cost.h"
#include "families/fused_embedding_bag/partition/cut.h"

static const double LAST = 0.15; /* of the work; its tasks are shorter: */
static const double LAST_TARGET = 0.5;

static int64_t offset_at(const rf__fused_batch *batch, int64_t position) {
    return batch->offset_type == RF_INT64 ? ((const int64_t *)batch->offsets)[position]
                                          : ((const int32_t *)batch->offsets)[position];
}

static rf_status count_lookups(rf__fused_cut *cut, const rf__fused_batch *batch) {
    int64_t begin = batch->offsets != NULL ? offset_at(batch, 0) : 0;
    RF_FAIL_IF(begin != 0, RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: offsets[0] is %" PRId64
               "; expected 0, where the first bag begins",
               begin);
    for (int64_t f = 0; f < cut->input.n_features; f++) {
        if (batch->offsets == NULL) {
            const int32_t expected = cut->input.features[f].expected_sixteenths;
            cut->lookups[f] = expected > 0 ? expected / 16.0 * (double)batch->bags : 0;
            continue;
        }
        const int64_t end = offset_at(batch, (f + 1) * batch->bags);
        RF_FAIL_IF(end < begin, RF_ERR_VALUE,
                   "recfuse.fused_embedding_bag: offsets[%" PRId64 "] is %" PRId64 ", less than %" PRId64
                   " where feature %" PRId64 " begins; expected offsets that never decrease",
                   (f + 1) * batch->bags, end, begin, f);
        cut->lookups[f] = (double)(end - begin);
        begin = end;
    }
    return RF_OK;
}

/* Of numbers of bags, which are less than 2^31: several times as fast as with 64 bits. */
static int32_t divide_up(int32_t value, int32_t by) {
    return (int32_t)(((uint32_t)value + (uint32_t)by - 1) / (uint32_t)by);
}

/* Cuts the bags of a run into tasks of about `target`; `bags_at_once`: bags that a block works on at once,
 * that cost so much. */
static void run_cut(const rf__fused_cut *cut, double cost, double misses, int32_t bags_at_once, double target,
                    rf__fused_run *run) {
    const int32_t bags = cut->bags, most_tasks = divide_up(bags, bags_at_once);
    const double work = cost * most_tasks + misses, exact_tasks = work / target;
    int32_t tasks = most_tasks;
    if (exact_tasks < most_tasks) { /* rounded up, at least 1 */
        tasks = (int32_t)exact_tasks;
        tasks += tasks < exact_tasks || tasks == 0;
    }
    const int32_t bags_a_task = divide_up(divide_up(bags, tasks), bags_at_once) * bags_at_once;
    run->bags_a_task = bags_a_task < bags ? bags_a_task : bags;
    run->count = divide_up(bags, run->bags_a_task);
    run->work = (float)(work / run->count);
}

static void pool_add(rf__fused_cut *cut, int64_t f, double target) {
    const rf__fused_estimate *estimate = &cut->estimates[f];
    const rf__fused_class *schedule = &cut->input.classes->of[estimate->number];
    const int32_t slices = cut->input.features[f].shape.slices;
    rf__fused_run run = {.feature = (int32_t)f, .schedule = estimate->number, .split = schedule->split};
    run_cut(cut, estimate->cost, estimate->misses / schedule->split, RF_FUSED_BLOCK / schedule->threads,
            target, &run);
    for (run.slice = 0; run.slice < slices; run.slice++) cut->runs[cut->n_runs++] = run;
    const int64_t groups = (int64_t)run.count * slices;
    cut->n_tasks += groups * run.split;
    if (run.split == 1) return;
    cut->n_groups += groups;
    cut->n_partials += groups * rf__fused_partials(schedule, run.bags_a_task);
}

/* The tile of a class that has room, and its filled lanes. */
typedef struct open_tile {
    int64_t tile;
    int32_t n_lanes;
} open_tile;

static void tile_add(rf__fused_cut *cut, open_tile *open, int32_t number) {
    open->tile = cut->n_tiles++;
    open->n_lanes = 0;
    for (int32_t i = 0; i < RF_FUSED_TILE; i++)
        cut->lanes[open->tile * RF_FUSED_TILE + i] = (rf_fused_lane){-1, 0};
    cut->tile_mean[open->tile] = 0;
    cut->runs[cut->n_runs++] =
        (rf__fused_run){.feature = (int32_t)open->tile, .schedule = number, .split = 1};
}

static void columns_add(rf__fused_cut *cut, int64_t f, open_tile *open) {
    const rf__fused_estimate *estimate = &cut->estimates[f];
    const int32_t columns = cut->input.features[f].shape.columns;
    for (int32_t column = 0; column < columns; column++) {
        if (open->n_lanes == 0 || open->n_lanes == RF_FUSED_TILE) tile_add(cut, open, estimate->number);
        cut->lanes[open->tile * RF_FUSED_TILE + open->n_lanes++] = (rf_fused_lane){(int32_t)f, column};
        if (estimate->mean > cut->tile_mean[open->tile]) cut->tile_mean[open->tile] = estimate->mean;
    }
}

/* Tiles are cut after all of their lanes are known. */
static void tiles_cut(rf__fused_cut *cut) {
    for (int64_t i = 0; i < cut->n_runs; i++) {
        rf__fused_run *run = &cut->runs[i];
        if (run->count > 0) continue;
        const double mean = cut->tile_mean[run->feature];
        run_cut(cut, rf__fused_cost(&cut->input.classes->of[run->schedule], mean, cut->n_staged > 0), 0,
                RF_FUSED_TILE_BAGS, cut->tile_target, run);
        run->slice = mean > 1;
        cut->n_tasks += run->count;
    }
}

static rf_status memory_new(rf__fused_cut *cut) {
    int64_t lanes = 0, slices = 0;
    for (int64_t f = 0; f < cut->input.n_features; f++) {
        lanes += cut->input.features[f].shape.columns;
        slices += cut->input.features[f].shape.slices;
    }
    const int64_t most_tiles = lanes / RF_FUSED_TILE + cut->input.classes->count + 1;
    const int64_t most_runs = most_tiles + slices;
    cut->lookups = malloc((size_t)(cut->input.n_features + 1) * sizeof *cut->lookups);
    cut->staged = calloc((size_t)cut->input.n_features + 1, sizeof *cut->staged);
    cut->estimates = malloc((size_t)(cut->input.n_features + 1) * sizeof *cut->estimates);
    cut->order = malloc((size_t)(cut->input.n_features + 1) * sizeof *cut->order);
    cut->runs = malloc((size_t)(most_runs + 1) * sizeof *cut->runs);
    cut->lanes = malloc((size_t)most_tiles * RF_FUSED_TILE * sizeof *cut->lanes);
    cut->tile_mean = malloc((size_t)most_tiles * sizeof *cut->tile_mean);
    if (cut->lookups != NULL && cut->staged != NULL && cut->estimates != NULL && cut->order != NULL &&
        cut->runs != NULL && cut->lanes != NULL && cut->tile_mean != NULL)
        return RF_OK;
    return rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features to blocks", cut->input.n_features);
}

static bool is_tiled(const rf__fused_cut *cut, int64_t f) {
    const int32_t number = cut->estimates[f].number;
    return number >= 0 && cut->input.classes->of[number].kind == RF_FUSED_CLASS_COLUMNS;
}

/* The runs of all features; those of tiles are not cut yet. `total_work`: the work of all; `blocks`: that run at
 * once. */
static void features_add(rf__fused_cut *cut, double total_work, double blocks) {
    open_tile open[RF_FUSED_MOST_CLASSES] = {{0, 0}};
    double previous_work = 0;
    for (int64_t f = 0; f < cut->input.n_features; f++) {
        if (!is_tiled(cut, f)) continue;
        columns_add(cut, f, &open[cut->estimates[f].number]);
        previous_work += cut->estimates[f].work;
    }
    cut->tile_target = rf__fused_tile_target(cut->target, previous_work, blocks);
    for (int64_t i = 0; i < cut->input.n_features; i++) {
        const int32_t f = cut->order[i];
        if (cut->estimates[f].number < 0 || is_tiled(cut, f)) continue;
        pool_add(cut, f, previous_work < (1 - LAST) * total_work ? cut->target : cut->target * LAST_TARGET);
        previous_work += cut->estimates[f].work;
    }
}

static rf_status cut_all(rf__fused_cut *cut, const rf__fused_batch *batch, int32_t sms,
                         int32_t blocks_per_sm) {
    rf_status status = RF_OK;
    const int64_t n_features = cut->input.n_features;
    RF_TRY(memory_new(cut));
    RF_TRY(count_lookups(cut, batch));
    const rf__fused_staging_problem staging = {.features = cut->input.features,
                                               .n_features = n_features,
                                               .lookups = cut->lookups,
                                               .batch = batch,
                                               .sms = sms,
                                               .staged = cut->staged};
    cut->n_staged = rf__fused_stage(&staging);
    const double total_work = rf__fused_estimate_all(cut), blocks = (double)sms * blocks_per_sm;
    cut->target = rf__fused_target(total_work, blocks);
    rf__fused_order(cut);
    features_add(cut, total_work, blocks);
    tiles_cut(cut);
    if (cut->n_staged > 0)
        RF_TRY(rf__fused_staged_lists(&staging, cut->n_staged, &cut->lists, &cut->list_rows));
    cut->rows = rf__fused_rows_of(cut->n_tasks, cut->n_tiles) + cut->list_rows;
    if (cut->rows > INT32_MAX || cut->n_partials > INT32_MAX) {
        status = rf__fail(RF_ERR_UNSUPPORTED,
                          "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
                          " bags make %" PRId64 " tasks; expected at most %d",
                          n_features, batch->bags, cut->n_tasks, INT32_MAX);
    }
out:
    return status;
}

rf_status rf__fused_cut_new(const rf__fused_mappable *input, const rf__fused_batch *batch, int32_t sms,
                            int32_t blocks_per_sm, rf__fused_cut **result, int64_t *rows) {
    *result = NULL;
    RF_FAIL_IF(batch->bags <= 0 || sms <= 0 || batch->bags > INT32_MAX - RF_FUSED_BLOCK, RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: a mapping is made for %" PRId64
               " bags and %d SMs; expected 1 or more of both, and less than 2^31 bags",
               batch->bags, (int)sms);
    rf__fused_cut *cut = calloc(1, sizeof *cut);
    RF_FAIL_IF(cut == NULL, RF_ERR_MEMORY, "no memory to map %" PRId64 " features", input->n_features);
    cut->input = *input;
    cut->bags = (int32_t)batch->bags;
    const rf_status status = cut_all(cut, batch, sms, blocks_per_sm);
    if (status == RF_OK) {
        *result = cut;
        *rows = cut->rows;
    } else {
        rf__fused_cut_free(cut);
    }
    return status;
}

void rf__fused_cut_free(rf__fused_cut *cut) {
    if (cut == NULL) return;
    free(cut->lists);
    free(cut->tile_mean);
    free(cut->lanes);
    free(cut->runs);
    free(cut->order);
    free(cut->estimates);
    free(cut->staged);
    free(cut->lookups);
    free(cut);
}
