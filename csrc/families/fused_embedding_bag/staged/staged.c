/* Tables that are staged in shared memory as a whole (staged/staged.cu): their choice, and the SM of each. */
#include <inttypes.h>
#include <stdlib.h>

#include "families/fused_embedding_bag/staged/staged.h"

enum { MOST_ROW_BYTES = 32, COPY_ALIGNMENT = 16, MOST_LOOKUPS = 1 << 30, TASKS_AN_SM = 2 };
/* Of the bytes to gather: on an H200, staging costs a third of the time if tables of narrow rows have a tenth
 * to a third of them, and saves a quarter to a half if they have 97 %. */
static const double NEARLY_ALL = 0.75;
/* Clock cycles of an SM on an H200: per lookup, per bag, per byte of a table, and per table. */
static const double a_lookup = 0.92, a_bag = 2, a_byte = 1.0 / 40, a_table = 3000;

bool rf__fused_stageable(const rf__fused_geometry *shape, uint64_t weight, int64_t rows) {
    return !rf_is_quantized((int)shape->row.dtype) && rf__fused_is_whole(shape) &&
           shape->row.bytes <= MOST_ROW_BYTES && shape->align >= 4 && rows > 0 &&
           rows <= RF_FUSED_STAGED_RING / shape->row.bytes && weight % COPY_ALIGNMENT == 0 &&
           rows * shape->row.bytes % COPY_ALIGNMENT == 0 && shape->pooling != RF_MAX;
}

static int32_t class_number(const rf__fused_feature *feature, double lookups, const rf__fused_batch *batch) {
    return feature->classes_staged[rf_fused_bucket(lookups / (double)batch->bags)];
}

/* The kernel has threads and shared memory as an SM of compute capability 9.0 has them, and 32-bit
 * positions. */
bool rf__fused_can_stage(const rf__gpu *gpu, int64_t lookups) {
    return gpu->cc_major >= 9 && gpu->shared_per_block_optin >= RF_FUSED_STAGED_SHARED &&
           lookups <= MOST_LOOKUPS;
}

/* Tasks that a staged feature is cut into. */
static int64_t tasks_of(const rf__fused_batch *batch) {
    return (batch->bags + RF_FUSED_STAGED_BAGS - 1) / RF_FUSED_STAGED_BAGS;
}

/* Returns true if tables that may be staged are staged, all or none: together they must have so many lookups
 * that copying them pays, nearly all rows to gather, and a share for each SM. If other tables have much of
 * the work, the SMs are better left to those, because a staged table occupies an SM. */
static bool pays(const rf__fused_staging_problem *problem) {
    const rf__fused_feature *features = problem->features;
    const double *lookups = problem->lookups;
    double gathered = 0, gathered_staged = 0, read = 0, copied = 0;
    int64_t tasks = 0;
    for (int64_t f = 0; f < problem->n_features; f++) {
        const double row_bytes = (double)features[f].shape.row.bytes;
        gathered += lookups[f] * row_bytes;
        if (!problem->staged[f]) continue;
        gathered_staged += lookups[f] * row_bytes;
        read += lookups[f];
        copied += (double)features[f].rows * (1 + row_bytes / COPY_ALIGNMENT);
        tasks += tasks_of(problem->batch);
    }
    return read >= copied && gathered_staged >= NEARLY_ALL * gathered &&
           tasks >= (int64_t)TASKS_AN_SM * problem->sms;
}

int64_t rf__fused_stage(const rf__fused_staging_problem *problem) {
    const rf__fused_feature *features = problem->features;
    const int64_t n_features = problem->n_features;
    bool *staged = problem->staged;
    double total = 0;
    int64_t count = 0;
    for (int64_t f = 0; f < n_features; f++) total += problem->lookups[f];
    const bool may = problem->batch->may_stage && total <= MOST_LOOKUPS;
    for (int64_t f = 0; f < n_features; f++) {
        const rf__fused_staging staging = features[f].staging;
        staged[f] = may && (staging == RF__STAGE_ALWAYS || (staging == RF__STAGE_WHERE_IT_PAYS &&
                                                            problem->lookups[f] >= (double)features[f].rows));
    }
    const bool pays_for_all = may && pays(problem);
    for (int64_t f = 0; f < n_features; f++) {
        staged[f] = staged[f] && (pays_for_all || features[f].staging == RF__STAGE_ALWAYS);
        count += staged[f];
    }
    return count;
}

/* A task: some bags of a feature. */
typedef struct job {
    double cycles;
    int32_t feature, first_bag, last_bag;
    int32_t list, position;
} job;

static int longer_first(const void *a, const void *b) {
    const job *lhs = a, *rhs = b;
    if (lhs->cycles != rhs->cycles) return lhs->cycles < rhs->cycles ? 1 : -1;
    if (lhs->feature != rhs->feature) return lhs->feature < rhs->feature ? -1 : 1;
    return lhs->first_bag < rhs->first_bag ? -1 : 1;
}

/* Each feature in as few tasks as may be, of about equally many bags. */
static job *jobs_new(const rf__fused_staging_problem *problem, int64_t n_staged, int64_t *n_jobs) {
    const rf__fused_batch *batch = problem->batch;
    const int64_t tasks = tasks_of(batch);
    job *jobs = malloc((size_t)(n_staged * tasks) * sizeof *jobs);
    if (jobs == NULL) return NULL;
    *n_jobs = 0;
    for (int64_t f = 0; f < problem->n_features; f++) {
        if (!problem->staged[f]) continue;
        for (int64_t number = 0; number < tasks; number++) {
            const int64_t first = batch->bags * number / tasks, last = batch->bags * (number + 1) / tasks;
            jobs[(*n_jobs)++] = (job){.cycles = problem->lookups[f] / (double)tasks * a_lookup +
                                                (double)(last - first) * a_bag +
                                                (double)problem->features[f].table_bytes * a_byte + a_table,
                                      .feature = (int32_t)f,
                                      .first_bag = (int32_t)first,
                                      .last_bag = (int32_t)last};
        }
    }
    qsort(jobs, (size_t)*n_jobs, sizeof *jobs, longer_first);
    return jobs;
}

/* The length of a list so far. */
typedef struct load {
    double cycles;
    int32_t list, depth;
} load;

static bool shorter(const load *lhs, const load *rhs) {
    return lhs->cycles < rhs->cycles || (lhs->cycles == rhs->cycles && lhs->list < rhs->list);
}

/* Moves the first element of a heap, otherwise ordered by shortest list, to its position. */
static void sift(load *heap, int32_t count) {
    const load root = heap[0];
    int32_t at = 0;
    for (int32_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && shorter(&heap[child + 1], &heap[child])) child++;
        if (!shorter(&heap[child], &root)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = root;
}

/* The next job goes to the list that is shortest so far. */
static void deal(job *jobs, int64_t n_jobs, load *heap, int32_t lists) {
    for (int32_t list = 0; list < lists; list++) heap[list] = (load){.list = list};
    for (int64_t i = 0; i < n_jobs; i++) {
        jobs[i].list = heap[0].list;
        jobs[i].position = heap[0].depth++;
        heap[0].cycles += jobs[i].cycles;
        sift(heap, lists);
    }
}

rf_status rf__fused_staged_lists(const rf__fused_staging_problem *problem, int64_t n_staged,
                                 rf__fused_staged **rows, int64_t *n_rows) {
    rf_status status = RF_OK;
    int64_t n_jobs = 0;
    int32_t deepest = 0;
    job *jobs = jobs_new(problem, n_staged, &n_jobs);
    const int32_t lists = n_jobs < problem->sms ? (int32_t)n_jobs : problem->sms;
    load *heap = malloc(((size_t)lists + 1) * sizeof *heap);
    *rows = NULL;
    if (jobs == NULL || heap == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to map %" PRId64 " features", n_staged);
        goto out;
    }
    deal(jobs, n_jobs, heap, lists);
    for (int32_t list = 0; list < lists; list++)
        deepest = heap[list].depth > deepest ? heap[list].depth : deepest;
    *n_rows = 1 + (int64_t)(deepest + 1) * lists;
    *rows = calloc((size_t)*n_rows, sizeof **rows);
    if (*rows == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a mapping of %" PRId64 " rows", *n_rows);
        goto out;
    }
    **rows = (rf__fused_staged){.depth = deepest + 1, .lists = lists};
    rf_fused_task *tasks = (rf_fused_task *)(*rows + 1);
    for (int64_t i = 0; i < *n_rows - 1; i++) tasks[i].feature = -1;
    for (int64_t i = 0; i < n_jobs; i++) {
        const job *job = &jobs[i];
        const int32_t f = job->feature;
        tasks[(int64_t)job->position * lists + job->list] = (rf_fused_task){
            .feature = f,
            .first_bag = job->first_bag,
            .last_bag = job->last_bag,
            .schedule = class_number(&problem->features[f], problem->lookups[f], problem->batch),
            .split = RF_FUSED_WHOLE_BAGS};
    }
out:
    free(heap);
    free(jobs);
    return status;
}
