/* The tasks of a batch, written in the order in which a GPU begins them. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/partition/cut.h"
#include "families/fused_embedding_bag/partition/fused_map_args.h"

enum { BUCKETS = 64, /* of the work of tasks */ SPREAD = BUCKETS, LISTS };

static const double LONGER = 1.25; /* from bucket to bucket */
static const double SPREAD_OVER = 0.9; /* of all tasks */

/* Long tasks come first. Those near the target stay in their order, so that rows of a feature are in L2
 * together. */
static uint32_t bucket_of(double work, double long_work) {
    uint32_t bucket = 0;
    while (work > long_work && bucket < BUCKETS - 1) {
        work /= LONGER;
        bucket++;
    }
    return bucket;
}

/* Runs in their order, by number; first: -1 if empty. */
typedef struct run_list {
    int64_t first, last;
} run_list;

/* Sorts runs into buckets; but tiles that are not long have a separate list: they mostly wait for memory and
 * compute little, so they are spread over the others, to run concurrently. */
static void runs_sort(rf__fused_cut *cut, run_list *lists) {
    for (int32_t i = 0; i < LISTS; i++) lists[i] = (run_list){-1, -1};
    for (int64_t i = 0; i < cut->n_runs; i++) {
        rf__fused_run *run = &cut->runs[i];
        uint32_t to = bucket_of(run->work, RF_FUSED_LONG * cut->target);
        if (to == 0 && cut->input.classes->of[run->schedule].kind == RF_FUSED_CLASS_COLUMNS) to = SPREAD;
        run->next = -1;
        if (lists[to].first < 0) {
            lists[to].first = i;
        } else {
            cut->runs[lists[to].last].next = i;
        }
        lists[to].last = i;
    }
}

/* The write position of tasks, and the number and partial sums of the next group. */
typedef struct writer {
    const rf__fused_run *runs;
    rf_fused_task *begin, *to;
    int32_t bags, group, partials;
    /* Of spread tasks: the run of the next one (-1: all are written), its number in the run, its position
     * among all tasks, and the distance to the following one. */
    int64_t spread_run;
    int32_t spread_task;
    double spread_at, spacing;
} writer;

/* Writes the task from `bag` on, which shares no bags; returns its address. In place, because a copy would
 * wait. */
static rf_fused_task *task_write(writer *writer, const rf__fused_run *run, int32_t bag) {
    const int32_t remaining = writer->bags - bag;
    *writer->to =
        (rf_fused_task){.feature = run->feature,
                        .first_bag = bag,
                        .last_bag = bag + (run->bags_a_task < remaining ? run->bags_a_task : remaining),
                        .schedule = run->schedule,
                        .slice = run->slice,
                        .split = RF_FUSED_WHOLE_BAGS};
    return writer->to++;
}

static void spread_begin(writer *writer, int64_t first, int64_t n_tasks) {
    int64_t count = 0;
    writer->spread_run = first;
    if (first < 0) return;
    for (int64_t i = first; i >= 0; i = writer->runs[i].next) count += writer->runs[i].count;
    writer->spacing = SPREAD_OVER * (double)n_tasks / (double)count;
    if (writer->spacing < 1) writer->spacing = 1;
}

/* Writes the next of those that are spread. */
static void spread_write(writer *writer) {
    const rf__fused_run *run = &writer->runs[writer->spread_run];
    (void)task_write(writer, run, writer->spread_task * run->bags_a_task);
    writer->spread_task++;
    if (writer->spread_task == run->count) {
        writer->spread_run = run->next;
        writer->spread_task = 0;
    }
    writer->spread_at += writer->spacing;
}

/* Writes the spread tasks that are due; returns how many others may follow. */
static int64_t spread_due(writer *writer) {
    while (writer->spread_run >= 0) {
        const int64_t before = (int64_t)writer->spread_at - (writer->to - writer->begin);
        if (before > 0) return before;
        spread_write(writer);
    }
    return INT64_MAX;
}

/* Half a task, in one store: eight small stores per task take twice as long, and tasks are most of a
 * mapping. */
typedef uint32_t half __attribute__((vector_size(16)));
_Static_assert(2 * sizeof(half) == sizeof(rf_fused_task), "two make a task");

/* Tasks that have their bags for themselves. */
static void tasks_write(writer *writer, const rf__fused_run *run) {
    half bags = {run->feature, 0, run->bags_a_task, run->schedule};
    const half step = {0, run->bags_a_task, run->bags_a_task, 0},
               second_half = {run->slice, RF_FUSED_WHOLE_BAGS, writer->group, writer->partials};
    for (int32_t remaining = run->count; remaining > 0;) {
        for (int64_t due = spread_due(writer); due > 0 && remaining > 0; due--, remaining--) {
            memcpy(writer->to, &bags, sizeof bags);
            memcpy((char *)writer->to + sizeof bags, &second_half, sizeof second_half);
            bags += step;
            writer->to++;
        }
    }
    writer->to[-1].last_bag = writer->bags;
}

/* Tasks of which each `split` share their bags. */
static void groups_write(writer *writer, const rf__fused_run *run, const rf__fused_class *schedule) {
    for (int32_t i = 0; i < run->count; i++) {
        (void)spread_due(writer);
        for (int32_t split = 0; split < run->split; split++) {
            rf_fused_task *task = task_write(writer, run, i * run->bags_a_task);
            task->split = split | run->split << RF_FUSED_SPLIT_BITS;
            task->group = writer->group;
            task->partials = writer->partials;
        }
        writer->group++;
        writer->partials += (int32_t)rf__fused_partials(schedule, run->bags_a_task);
    }
}

/* Writes the tasks of all runs. */
static void runs_write(rf__fused_cut *cut, rf_fused_task *to) {
    run_list lists[LISTS];
    writer tasks = {.runs = cut->runs, .begin = to, .to = to, .bags = cut->bags};
    runs_sort(cut, lists);
    spread_begin(&tasks, lists[SPREAD].first, cut->n_tasks);
    for (int32_t bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        for (int64_t i = lists[bucket].first; i >= 0; i = cut->runs[i].next) {
            const rf__fused_run *run = &cut->runs[i];
            if (run->split == 1) {
                tasks_write(&tasks, run);
            } else {
                groups_write(&tasks, run, &cut->input.classes->of[run->schedule]);
            }
        }
    }
    while (tasks.spread_run >= 0) spread_write(&tasks);
}

void rf__fused_cut_write(rf__fused_cut *cut, rf__fused_mapping *to) {
    *to = (rf__fused_mapping){.n_tasks = (int32_t)cut->n_tasks,
                              .n_tiles = (int32_t)cut->n_tiles,
                              .n_groups = (int32_t)cut->n_groups,
                              .partials = (int32_t)cut->n_partials,
                              .bags = cut->bags,
                              .n_features = (int32_t)cut->input.n_features,
                              .signature = cut->input.signature};
    runs_write(cut, (rf_fused_task *)(to + 1));
    memcpy(to + 1 + cut->n_tasks, cut->lanes, (size_t)cut->n_tiles * RF_FUSED_TILE * sizeof *cut->lanes);
    if (cut->list_rows > 0)
        memcpy(to + cut->rows - cut->list_rows, cut->lists, (size_t)cut->list_rows * sizeof *cut->lists);
    to->checksum = rf__fused_checksum(to, cut->rows);
}

rf_status rf__fused_map(const rf__fused_mappable *input, const rf__fused_batch *batch, int32_t sms,
                        int32_t blocks_per_sm, rf__fused_mapping **mapping, int64_t *rows) {
    rf_status status = RF_OK;
    rf__fused_cut *cut = NULL;
    *mapping = NULL;
    RF_TRY(rf__fused_cut_new(input, batch, sms, blocks_per_sm, &cut, rows));
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
