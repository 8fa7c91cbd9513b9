/* rf_fused_embedding_bag_map: every vector of every bag is some block's, and no two blocks'. Needs no GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/fused.h"
#include "families/fused_embedding_bag/schedule/fused_schedule.h"
#include "fused_case.h"
#include "program.h"
#include "test_fused.h"

static int mappings_staged; /* single thread: no lock */

/* Counts the writes of tasks and lanes of a mapping. */
typedef struct coverage {
    const rf_fused_embedding_bag_params *params;
    const rf__fused_feature *features;
    const rf__fused_classes *classes;
    uint8_t *times; /* [features, bags, slices or columns, parts], from first[feature] on */
    int64_t first[MOST_FEATURES], inner[MOST_FEATURES];
    int64_t bytes, staged;
} coverage;

static void count(coverage *my, int64_t feature, int64_t bag, int64_t inner) {
    uint8_t *times = &my->times[my->first[feature] + bag * my->inner[feature] + inner];
    if (*times < UINT8_MAX) (*times)++;
}

static const rf_fused_lane *lanes_of(const rf__fused_mapping *mapping, int32_t tile) {
    return (const rf_fused_lane *)(mapping + 1 + mapping->n_tasks) + (int64_t)tile * RF_FUSED_TILE;
}

/* A task of a feature's slice, of a matching class. */
static bool pool_task(coverage *my, const rf_fused_task *task, const rf__fused_class *made) {
    if (task->feature < 0 || task->feature >= my->params->n_features) return false;
    const rf__fused_geometry *shape = &my->features[task->feature].shape;
    const int32_t parts = rf_fused_splits(task->split), part = rf_fused_split_part(task->split);
    if (made->dtype != (int32_t)shape->row.dtype || made->align != shape->align ||
        made->lanes != shape->lanes || made->pooling != shape->pooling || made->padded != shape->is_padded ||
        parts != made->split || part >= parts || task->slice < 0 || task->slice >= shape->slices)
        return false;
    if (part != 0) return true; /* the first represents all */
    for (int64_t bag = task->first_bag; bag < task->last_bag; bag++)
        count(my, task->feature, bag, task->slice);
    return true;
}

static bool tile_task(coverage *my, const rf__fused_mapping *mapping, const rf_fused_task *task,
                      const rf__fused_class *made) {
    if (task->feature < 0 || task->feature >= mapping->n_tiles) return false;
    const rf_fused_lane *lanes = lanes_of(mapping, task->feature);
    for (int lane = 0; lane < RF_FUSED_TILE; lane++) {
        if (lanes[lane].feature < 0) continue;
        if (lanes[lane].feature >= my->params->n_features) return false;
        const rf__fused_geometry *shape = &my->features[lanes[lane].feature].shape;
        if (made->dtype != (int32_t)shape->row.dtype || made->align != shape->align ||
            lanes[lane].column < 0 || lanes[lane].column >= shape->columns ||
            (made->pooling == RF_MAX) != (shape->pooling == RF_MAX))
            return false;
        for (int64_t bag = task->first_bag; bag < task->last_bag; bag++)
            count(my, lanes[lane].feature, bag, lanes[lane].column);
    }
    return true;
}

/* Tasks that share bags are adjacent, their parts in order, and each group has its own sums. */
static bool shared_bags(const rf_fused_task *tasks, int64_t at, int64_t n_tasks) {
    const int32_t parts = tasks[at].split >> 16, part = tasks[at].split & 0xffff;
    if (part == 0 || parts <= 1) return part == 0 && at + parts <= n_tasks;
    const rf_fused_task *before = &tasks[at - 1], *task = &tasks[at];
    return at > 0 && (rf_fused_split_part(before->split)) == part - 1 && before->group == task->group &&
           before->partials == task->partials && before->feature == task->feature &&
           before->slice == task->slice && before->first_bag == task->first_bag &&
           before->last_bag == task->last_bag;
}

static bool tasks_count(coverage *my, const rf__fused_mapping *mapping) {
    const rf_fused_task *tasks = rf__fused_tasks(mapping);
    int32_t last_group = -1;
    for (int64_t i = 0; i < mapping->n_tasks; i++) {
        const rf_fused_task *task = &tasks[i];
        if (task->schedule < 0 || task->schedule >= my->classes->count || task->first_bag < 0 ||
            task->first_bag >= task->last_bag || task->last_bag > my->params->bags ||
            !shared_bags(tasks, i, mapping->n_tasks))
            return false;
        const rf__fused_class *made = &my->classes->of[task->schedule];
        if (made->kind == RF_FUSED_CLASS_COLUMNS ? !tile_task(my, mapping, task, made)
                                                 : !pool_task(my, task, made))
            return false;
        if (rf_fused_splits(task->split) <= 1) continue;
        if (task->group < 0 || task->group >= mapping->n_groups || task->partials < 0 ||
            task->partials >= mapping->partials)
            return false;
        if ((rf_fused_split_part(task->split)) == 0 && task->group != ++last_group) return false;
    }
    return last_group == mapping->n_groups - 1;
}

/* Lists of tasks, each ended by a task of feature -1. */
static bool staged_count(coverage *my, const rf__fused_mapping *mapping, int64_t rows) {
    const rf__fused_staged staged = rf__fused_staged_of(mapping, rows);
    const rf_fused_task *tasks = (const rf_fused_task *)(mapping + rf__fused_rows(mapping) + 1);
    for (int32_t list = 0; list < staged.lists; list++) {
        bool ended = false;
        for (int32_t i = 0; i < staged.depth; i++) {
            const rf_fused_task *task = &tasks[(int64_t)i * staged.lists + list];
            ended = ended || task->feature < 0;
            if (ended) continue;
            if (task->feature >= my->params->n_features || task->schedule < 0 ||
                task->schedule >= my->classes->count ||
                my->classes->of[task->schedule].kind != RF_FUSED_CLASS_STAGED || task->first_bag < 0 ||
                task->first_bag >= task->last_bag || task->last_bag > my->params->bags ||
                task->last_bag - task->first_bag > RF_FUSED_STAGED_BAGS)
                return false;
            for (int64_t bag = task->first_bag; bag < task->last_bag; bag++) count(my, task->feature, bag, 0);
            my->staged++;
        }
        if (!ended) return false;
    }
    return true;
}

static void coverage_check(const fused_case *one, const rf__fused_mapping *mapping, int64_t rows) {
    coverage my = {.params = &one->params};
    rf__fused_classes *classes = calloc(1, sizeof *classes);
    rf__fused_feature *features = calloc(MOST_FEATURES, sizeof *features);
    if (classes == NULL || features == NULL) exit(1);
    my.classes = classes;
    my.features = features;
    CHECK(rf__fused_features(&one->params, one->plan.schedules, 1, classes, features) == RF_OK, "%s",
          rf_last_error());
    for (int64_t f = 0; f < one->params.n_features; f++) {
        const rf__fused_geometry *shape = &features[f].shape;
        my.first[f] = my.bytes;
        my.inner[f] = shape->columns > shape->slices ? shape->columns : shape->slices;
        my.bytes += my.inner[f] * one->params.bags;
    }
    my.times = calloc((size_t)my.bytes + 1, 1);
    if (my.times == NULL) exit(1);
    CHECK(tasks_count(&my, mapping), "a task that makes no sense");
    CHECK(staged_count(&my, mapping, rows), "a list of staged tables that makes no sense");
    mappings_staged += my.staged > 0;
    for (int64_t f = 0; f < one->params.n_features; f++) {
        /* By columns, or by slices without anything after them: a feature is one or the other. */
        const uint8_t *times = &my.times[my.first[f]];
        const bool whole = my.inner[f] > 1 && times[my.inner[f] - 1] > 0;
        const int64_t filled = whole ? features[f].shape.columns : features[f].shape.slices;
        int64_t wrong = 0;
        for (int64_t i = 0; i < my.inner[f] * one->params.bags; i++)
            wrong += times[i] != (i % my.inner[f] < filled);
        CHECK(wrong == 0, "feature %lld: %lld of %lld times %lld vectors are written not once", (long long)f,
              (long long)wrong, (long long)one->params.bags, (long long)my.inner[f]);
    }
    free(my.times);
    free(features);
    free(classes);
}

/* Offsets of bags that are alike within a feature, right before a page that is not there. */
static void offsets_set(const fused_case *one, randomness *random, void *offsets) {
    int64_t end = 0;
    for (int64_t f = 0; f < one->params.n_features; f++) {
        const int64_t most =
            random_chance(random, 0.2) ? 0 : random_between(random, 0, random_chance(random, 0.5) ? 2 : 400);
        for (int64_t b = 0; b < one->params.bags; b++) {
            integer_set(offsets, f * one->params.bags + b, one->params.offset_type, end);
            end += random_between(random, 0, most);
        }
    }
    integer_set(offsets, one->params.n_features * one->params.bags, one->params.offset_type, end);
}

/* fused_map: random calls. */
void fused_map(char **arguments) {
    const int rounds = atoi(arguments[0]);
    randomness random = {12};
    for (int i = 0; i < rounds; i++) {
        fused_case one;
        int32_t *mapping = NULL;
        int64_t rows = 0;
        fused_case_random(&one, &random);
        const size_t bytes =
            (size_t)(one.params.n_features * one.params.bags + 1) * integer_size(one.params.offset_type);
        region memory = region_new(bytes);
        one.params.offsets = region_at_end(&memory, bytes);
        offsets_set(&one, &random, region_at_end(&memory, bytes));
        const int32_t sms = random_chance(&random, 0.5) ? 132 : (int32_t)random_between(&random, 1, 200);
        const bool stage = random_chance(&random, 0.5);
        const rf_status status =
            rf_fused_embedding_bag_map(&one.params, &one.plan, sms, stage, &mapping, &rows);
        CHECK(status == RF_OK, "%s", rf_last_error());
        if (status == RF_OK) {
            const rf__fused_mapping *head = (const rf__fused_mapping *)mapping;
            const bool good = head->bags == one.params.bags && head->n_features == one.params.n_features &&
                              rf__fused_whole(head, rows) && (stage || rf__fused_rows(head) == rows);
            CHECK(good, "a head of %lld rows", (long long)rows);
            if (good) coverage_check(&one, head, rows);
        }
        rf_fused_mapping_free(mapping);
        region_free(&memory);
    }
    CHECK(rounds < 100 || mappings_staged > 0, "no table was staged");
    rf_fused_mapping_free(NULL);
}

static void refused(const fused_case *one, int32_t sms, rf_status want, const char *words) {
    int32_t *mapping = (int32_t *)1;
    int64_t rows = 0;
    const rf_status status = rf_fused_embedding_bag_map(&one->params, &one->plan, sms, true, &mapping, &rows);
    CHECK(status == want && strstr(rf_last_error(), words) != NULL, "%s, not \"%s\": %s",
          rf_status_text(status), words, status == RF_OK ? "" : rf_last_error());
    CHECK(mapping == NULL, "a mapping all the same");
}

/* fused_map_bad: calls that cannot be mapped. */
void fused_map_bad(char **arguments) {
    (void)arguments;
    static int64_t offsets[401];
    fused_case good, one;
    fused_case_fixed(&good, 0);
    good.params.offsets = offsets;
#define REFUSED(status, words, ...)         \
    do {                                    \
        one = good;                         \
        one.params.buffers = one.buffers;   \
        one.params.features = one.features; \
        one.plan.schedules = one.schedules; \
        __VA_ARGS__;                        \
        refused(&one, 132, status, words);  \
    } while (0)
    REFUSED(RF_ERR_VALUE, "bags", one.params.bags = 0);
    REFUSED(RF_ERR_VALUE, "bags", one.params.bags = -1);
    REFUSED(RF_ERR_UNSUPPORTED, "at most", one.params.bags = INT64_C(1) << 31);
    REFUSED(RF_ERR_VALUE, "product that fits int64", one.params.bags = INT64_MAX / 2);
    REFUSED(RF_ERR_VALUE, "n_features is -1", one.params.n_features = -1);
    REFUSED(RF_ERR_TYPE, "offset", one.params.offset_type = (rf_int_type)7);
    REFUSED(RF_ERR_VALUE, "offsets", one.params.offsets = NULL);
    REFUSED(RF_ERR_VALUE, "one of 2 weights", one.features[2].buffer = 2);
    REFUSED(RF_ERR_VALUE, "expected a table within weights[0]", one.features[2].rows = 1 << 20);
    REFUSED(RF_ERR_VALUE, "the end of the feature before", one.features[2].output_column++);
    REFUSED(RF_ERR_VALUE, "padding", one.features[2].padding_idx = 100000);
    REFUSED(RF_ERR_VALUE, "output_stride is", one.params.output_stride--);
    REFUSED(RF_ERR_TYPE, "dtype", one.params.output_dtype = (rf_dtype)9);
    REFUSED(RF_ERR_VALUE, "kind is 4", one.schedules[0].kind = 4);
    REFUSED(RF_ERR_VALUE, "kind is -1", one.schedules[0].kind = -1);
    REFUSED(RF_ERR_VALUE, "threads is 3", one.schedules[1].threads = 3);
    REFUSED(RF_ERR_VALUE, "threads is 16", one.schedules[1].threads = 16);
    REFUSED(RF_ERR_VALUE, "threads is 128", one.schedules[1].threads = 128);
    REFUSED(RF_ERR_VALUE, "distance is 3", one.schedules[1].distance = 3);
    REFUSED(RF_ERR_VALUE, "distance is 32", one.schedules[1].distance = 32);
    REFUSED(RF_ERR_VALUE, "distance is -1", one.schedules[1].distance = -1);
    REFUSED(RF_ERR_VALUE, "split is 65", one.schedules[1].split = 65);
    REFUSED(RF_ERR_VALUE, "split is -1", one.schedules[1].split = -1);
    REFUSED(RF_ERR_VALUE, "split is 2", one.schedules[2].kind = RF_FUSED_KIND_POOL,
            one.schedules[2].split = 2);
    REFUSED(RF_ERR_VALUE, "warps is 65", one.plan.warps = 65);
    REFUSED(RF_ERR_VALUE, "warps is -1", one.plan.warps = -1);
    refused(&good, 0, RF_ERR_VALUE, "0 SMs");
    refused(&good, -5, RF_ERR_VALUE, "-5 SMs");
    offsets[200] = 5;
    refused(&good, 132, RF_ERR_VALUE, "offsets[300] is 0, less than 5");
    offsets[200] = 0, offsets[0] = 1;
    refused(&good, 132, RF_ERR_VALUE, "offsets[");
    offsets[0] = INT64_MIN, offsets[100] = INT64_MAX;
    refused(&good, 132, RF_ERR_VALUE, "offsets[");
}
