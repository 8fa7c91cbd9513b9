/* The tasks of a batch, written in the order in which a GPU begins them. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_cut.h"

enum { BUCKETS = 64 }; /* of the work of tasks */

static const double LONGER = 1.25; /* from bucket to bucket */

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
static void runs_sort(rf__fused_cut *my, int64_t *first) {
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

/* Half a task, in one store: eight small ones a task take twice as long, and tasks are most of a mapping. */
typedef uint32_t half __attribute__((vector_size(16)));
_Static_assert(2 * sizeof(half) == sizeof(rf__fused_task), "two make a task");

/* Tasks that have their bags for themselves. */
static void tasks_write(writer *my, const rf__fused_run *one) {
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
static void groups_write(writer *my, const rf__fused_run *one, const rf__fused_class *made) {
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
        my->place += (int32_t)rf__fused_places(made, one->bags_each);
    }
}

/* Writes the tasks of all runs, those with most work first. */
static void runs_write(rf__fused_cut *my, rf__fused_task *to) {
    int64_t first[BUCKETS];
    writer tasks = {.to = to, .bags = my->bags};
    runs_sort(my, first);
    for (int32_t bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        for (int64_t i = first[bucket]; i >= 0; i = my->runs[i].next) {
            const rf__fused_run *one = &my->runs[i];
            if (one->split == 1) {
                tasks_write(&tasks, one);
            } else {
                groups_write(&tasks, one, &my->what.classes->of[one->schedule]);
            }
        }
    }
}

void rf__fused_cut_write(rf__fused_cut *my, rf__fused_mapping *to) {
    *to = (rf__fused_mapping){.version = RF__FUSED_MAPPING_VERSION,
                              .n_tasks = (int32_t)my->n_tasks,
                              .n_tiles = (int32_t)my->n_tiles,
                              .n_groups = (int32_t)my->n_groups,
                              .places = (int32_t)my->n_places,
                              .bags = my->bags,
                              .n_features = (int32_t)my->what.n_features,
                              .signature = my->what.signature};
    runs_write(my, (rf__fused_task *)(to + 1));
    memcpy(to + 1 + my->n_tasks, my->lanes, (size_t)my->n_tiles * RF__FUSED_TILE * sizeof *my->lanes);
    if (my->list_rows > 0)
        memcpy(to + my->rows - my->list_rows, my->lists, (size_t)my->list_rows * sizeof *my->lists);
}

rf_status rf__fused_map(const rf__fused_mappable *what, const rf__fused_batch *batch, int32_t sms,
                        int32_t blocks_per_sm, rf__fused_mapping **mapping, int64_t *rows) {
    rf_status status = RF_OK;
    rf__fused_cut *cut = NULL;
    *mapping = NULL;
    RF_TRY(rf__fused_cut_new(what, batch, sms, blocks_per_sm, &cut, rows));
    *mapping = malloc((size_t)*rows * sizeof **mapping);
    if (*mapping == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a mapping of %" PRId64 " rows", *rows);
        goto out;
    }
    rf__fused_cut_write(cut, *mapping);
out:
    rf__fused_cut_free(cut);
    return status;
}
