/* The tasks of a batch, written in the order in which a GPU begins them. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/partition/cut.h"

enum { BUCKETS = 64, /* of the work of tasks */ SPREAD = BUCKETS, LISTS };

static const double LONGER = 1.25; /* from bucket to bucket */
static const double SPREAD_OVER = 0.9; /* of all tasks */

/* Tasks that take long come first. Those about as long as they should be stay in their order: rows of a feature are
 * then in L2 together. */
static uint32_t bucket_of(double work, double long_work) {
    uint32_t bucket = 0;
    while (work > long_work && bucket < BUCKETS - 1) {
        work /= LONGER;
        bucket++;
    }
    return bucket;
}

/* Runs in their order, by number; first: -1 where there is none. */
typedef struct run_list {
    int64_t first, last;
} run_list;

/* The runs of each bucket; but those of tiles that are not long have a list of their own: they wait for memory much and
 * compute little, and are spread over the others, to run beside them. */
static void runs_sort(rf__fused_cut *my, run_list *lists) {
    for (int32_t i = 0; i < LISTS; i++) lists[i] = (run_list){-1, -1};
    for (int64_t i = 0; i < my->n_runs; i++) {
        rf__fused_run *one = &my->runs[i];
        uint32_t to = bucket_of(one->work, RF__FUSED_LONG * my->target);
        if (to == 0 && my->what.classes->of[one->schedule].kind == RF__FUSED_COLUMNS) to = SPREAD;
        one->next = -1;
        if (lists[to].first < 0) {
            lists[to].first = i;
        } else {
            my->runs[lists[to].last].next = i;
        }
        lists[to].last = i;
    }
}

/* Where tasks are written to, and the number and the place of sums that the next group of them shares. */
typedef struct writer {
    const rf__fused_run *runs;
    rf__fused_task *begin, *to;
    int32_t bags, group, place;
    /* Of tasks that are spread: the run of the next one (-1: none is left), its number there, its place among all
     * tasks, and how far it is from there to the one behind. */
    int64_t spread_run;
    int32_t spread_task;
    double spread_at, apart;
} writer;

/* Writes the task from `bag` on, which has its bags for itself; where it is. In place: to copy one is to wait for it. */
static rf__fused_task *task_write(writer *my, const rf__fused_run *one, int32_t bag) {
    const int32_t left = my->bags - bag;
    *my->to = (rf__fused_task){.feature = one->feature,
                               .first_bag = bag,
                               .last_bag = bag + (one->bags_each < left ? one->bags_each : left),
                               .schedule = one->schedule,
                               .slice = one->slice,
                               .part = 1 << 16};
    return my->to++;
}

static void spread_begin(writer *my, int64_t first, int64_t n_tasks) {
    int64_t count = 0;
    my->spread_run = first;
    if (first < 0) return;
    for (int64_t i = first; i >= 0; i = my->runs[i].next) count += my->runs[i].count;
    my->apart = SPREAD_OVER * (double)n_tasks / (double)count;
    if (my->apart < 1) my->apart = 1;
}

/* Writes the next of those that are spread. */
static void spread_write(writer *my) {
    const rf__fused_run *one = &my->runs[my->spread_run];
    (void)task_write(my, one, my->spread_task * one->bags_each);
    my->spread_task++;
    if (my->spread_task == one->count) {
        my->spread_run = one->next;
        my->spread_task = 0;
    }
    my->spread_at += my->apart;
}

/* Writes those whose turn it is; how many others may follow. */
static int64_t spread_due(writer *my) {
    while (my->spread_run >= 0) {
        const int64_t before = (int64_t)my->spread_at - (my->to - my->begin);
        if (before > 0) return before;
        spread_write(my);
    }
    return INT64_MAX;
}

/* Half a task, in one store: eight small ones a task take twice as long, and tasks are most of a mapping. */
typedef uint32_t half __attribute__((vector_size(16)));
_Static_assert(2 * sizeof(half) == sizeof(rf__fused_task), "two make a task");

/* Tasks that have their bags for themselves. */
static void tasks_write(writer *my, const rf__fused_run *one) {
    half bags = {one->feature, 0, one->bags_each, one->schedule};
    const half step = {0, one->bags_each, one->bags_each, 0},
               rest = {one->slice, 1 << 16, my->group, my->place};
    for (int32_t left = one->count; left > 0;) {
        for (int64_t more = spread_due(my); more > 0 && left > 0; more--, left--) {
            memcpy(my->to, &bags, sizeof bags);
            memcpy((char *)my->to + sizeof bags, &rest, sizeof rest);
            bags += step;
            my->to++;
        }
    }
    my->to[-1].last_bag = my->bags;
}

/* Tasks of which each `split` share their bags. */
static void groups_write(writer *my, const rf__fused_run *one, const rf__fused_class *made) {
    for (int32_t i = 0; i < one->count; i++) {
        (void)spread_due(my);
        for (int32_t part = 0; part < one->split; part++) {
            rf__fused_task *task = task_write(my, one, i * one->bags_each);
            task->part = part | one->split << 16;
            task->group = my->group;
            task->place = my->place;
        }
        my->group++;
        my->place += (int32_t)rf__fused_places(made, one->bags_each);
    }
}

/* Writes the tasks of all runs. */
static void runs_write(rf__fused_cut *my, rf__fused_task *to) {
    run_list lists[LISTS];
    writer tasks = {.runs = my->runs, .begin = to, .to = to, .bags = my->bags};
    runs_sort(my, lists);
    spread_begin(&tasks, lists[SPREAD].first, my->n_tasks);
    for (int32_t bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        for (int64_t i = lists[bucket].first; i >= 0; i = my->runs[i].next) {
            const rf__fused_run *one = &my->runs[i];
            if (one->split == 1) {
                tasks_write(&tasks, one);
            } else {
                groups_write(&tasks, one, &my->what.classes->of[one->schedule]);
            }
        }
    }
    while (tasks.spread_run >= 0) spread_write(&tasks);
}

void rf__fused_cut_write(rf__fused_cut *my, rf__fused_mapping *to) {
    *to = (rf__fused_mapping){.n_tasks = (int32_t)my->n_tasks,
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
    to->checksum = rf__fused_checksum(to, my->rows);
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
