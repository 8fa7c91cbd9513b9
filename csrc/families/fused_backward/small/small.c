/* Small features of the backward: which they are, and their description. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/validate.h"
#include "families/fused_backward/small/small.h"

enum {
    ALIGNMENT = 16, /* of parts of the workspace */
    VECTOR = 4, /* columns of a lane */
    LISTS_STATIC = 1024, /* approximate static shared memory of the kernels, in bytes */
    ROWS_STATIC = 4096,
    BLOCKS = 2 /* per SM */
};

static int64_t rounded_up(int64_t bytes) { return rf__round_up(bytes, ALIGNMENT); }

/* Returns the shared memory of each of two blocks of an SM; `static_bytes`: the kernel's static part. */
static int32_t shared_bytes(const rf__gpu *gpu, int64_t static_bytes) {
    const int64_t half = gpu->shared_per_sm / BLOCKS - gpu->reserved_shared_per_block;
    const int64_t largest = half < gpu->shared_per_block_optin ? half : gpu->shared_per_block_optin;
    const int64_t bytes = (largest - static_bytes) / 1024 * 1024;
    return (int32_t)(bytes > RF_SMALL_LISTS_LEAST_SHARED ? bytes : RF_SMALL_LISTS_LEAST_SHARED);
}

/* Returns true if four columns of a matrix's rows can be read and written at once. */
static bool matrix_fits(const rf__backward_problem *problem, const rf_backward_matrix *matrix) {
    if (matrix->dim <= 0 || matrix->dim % VECTOR != 0 ||
        !rf__elements_aligned(matrix->weight, problem->dtype, VECTOR))
        return false;
    if (rf_optimizer_row_states(problem->epilogue - 1) > 0) return matrix->dim <= RF_SMALL_WHOLE_COLUMNS;
    return matrix->states[0] % ALIGNMENT == 0 && matrix->states[1] % ALIGNMENT == 0;
}

/* The matrix that has row `row` of all. */
static int32_t matrix_of(const rf__backward_problem *problem, int64_t row) {
    int32_t at = 0;
    while (at + 1 < problem->n_matrices && problem->matrices[at + 1].first_row <= row) at++;
    return at;
}

/* Checks the call as a whole. */
static bool call_fits(const rf_fused_backward_params *call) {
    return call->sample_weights == NULL && call->bags > 0 && call->bags <= RF_SMALL_MOST_BAGS &&
           call->lookups <= INT32_MAX && call->n_features <= INT32_MAX && call->output_dim % VECTOR == 0 &&
           call->output_dim <= (int64_t)UINT32_MAX / VECTOR &&
           rf__elements_aligned((uintptr_t)call->grad, call->grad_dtype, VECTOR);
}

static bool feature_fits(const rf__backward_problem *problem, const rf_backward_feature *feature) {
    return (feature->pooling == RF_SUM || feature->pooling == RF_MEAN) && feature->rows > 0 &&
           feature->rows <= RF_SMALL_MOST_ROWS && feature->output_column % VECTOR == 0 &&
           matrix_fits(problem, &problem->matrices[matrix_of(problem, feature->first_row)]);
}

/* A feature's rows among all; features are sorted by first row to find overlaps. */
typedef struct rows_t {
    int64_t first, limit;
    int64_t feature;
} rows_t;

static int rows_compare(const void *a, const void *b) {
    const rows_t *lhs = a, *rhs = b;
    return (lhs->first > rhs->first) - (lhs->first < rhs->first);
}

/* Marks features that share no rows: alone [n_features]. `rows` [n_features] is scratch. */
static void mark_disjoint(const rf__backward_problem *problem, const rf_backward_feature *features,
                          rows_t *rows, bool *disjoint) {
    int64_t count = 0, limit = -1, last = -1;
    bool sorted = true;
    for (int64_t f = 0; f < problem->call.n_features; f++) disjoint[f] = features[f].pooling >= 0;
    for (int32_t m = 0; m < problem->n_matrices; m++) { /* inside a matrix they mostly are in order */
        const int64_t first = problem->matrices[m].first_row, end = first + problem->matrices[m].rows;
        for (int64_t f = 0; f < problem->call.n_features; f++) {
            if (!disjoint[f] || features[f].first_row < first || features[f].first_row >= end) continue;
            rows[count] = (rows_t){features[f].first_row, features[f].first_row + features[f].rows, f};
            sorted &= count == 0 || rows[count - 1].first <= rows[count].first;
            count++;
        }
    }
    if (!sorted) qsort(rows, (size_t)count, sizeof *rows, rows_compare);
    for (int64_t i = 0; i < count; i++) {
        if (rows[i].first < limit) disjoint[rows[i].feature] = disjoint[last] = false;
        if (rows[i].limit > limit) {
            limit = rows[i].limit;
            last = rows[i].feature;
        }
    }
}

/* Describes the small features in to [n_features]. Returns their number. */
static int64_t features_take(const rf__backward_problem *problem, rf_backward_feature *features,
                             const bool *disjoint, rf_small_feature *to, int64_t *starts, int64_t *factors) {
    int64_t count = 0;
    for (int64_t f = 0; f < problem->call.n_features; f++) {
        rf_backward_feature *from = &features[f];
        if (!disjoint[f] || !feature_fits(problem, from)) continue;
        const int32_t matrix = matrix_of(problem, from->first_row);
        to[count++] = (rf_small_feature){.row = from->first_row - problem->matrices[matrix].first_row,
                                         .start = *starts,
                                         .factors = from->pooling == RF_MEAN ? *factors : -1,
                                         .number = (int32_t)f,
                                         .rows = (int32_t)from->rows,
                                         .padding_idx = (int32_t)from->padding_idx,
                                         .output_column = from->output_column,
                                         .matrix = matrix,
                                         .dim = problem->matrices[matrix].dim};
        *starts += (from->rows + 1 + VECTOR - 1) / VECTOR * VECTOR; /* a lane writes this many at once */
        if (from->pooling == RF_MEAN) *factors += problem->call.bags;
        from->pooling = -1;
    }
    return count;
}

static int32_t lists_of(const rf_small_feature *feature) {
    return (feature->rows + RF_SMALL_LISTS_ROWS - 1) / RF_SMALL_LISTS_ROWS;
}

/* The classes of lists: by powers of two of the rows; those of many rows come first. */
enum { LIST_CLASSES = 16 };
static int32_t list_class(const rf_small_feature *feature) {
    return LIST_CLASSES - 1 - (31 - __builtin_clz((uint32_t)(feature->rows / lists_of(feature))));
}

/* Counts the tasks of lists.cu. Of class c and previous classes: places[c + 1]. */
static int32_t lists_count(const rf_small_feature *features, int64_t n_features,
                           int32_t positions[LIST_CLASSES + 1]) {
    memset(positions, 0, (LIST_CLASSES + 1) * sizeof *positions);
    for (int64_t f = 0; f < n_features; f++)
        positions[list_class(&features[f]) + 1] += lists_of(&features[f]);
    for (int32_t class = 0; class < LIST_CLASSES; class ++) positions[class + 1] += positions[class];
    return positions[LIST_CLASSES];
}

/* Rows of a feature before a part of them; a number that starts can be written from by vectors. */
static int32_t rows_before(const rf_small_feature *feature, int32_t part, int32_t parts) {
    const int32_t rows = (feature->rows * part / parts + VECTOR - 1) / VECTOR * VECTOR;
    return rows < feature->rows ? rows : feature->rows;
}

/* Writes them; `positions` as counted. */
static void lists_write(const rf_small_feature *features, int64_t n_features, int32_t *positions,
                        rf_small_list *to) {
    for (int64_t f = 0; f < n_features; f++) {
        const int32_t parts = lists_of(&features[f]);
        int32_t *position = &positions[list_class(&features[f])];
        for (int32_t part = 0; part < parts; part++)
            to[(*position)++] = (rf_small_list){.start = features[f].start,
                                                .factors = features[f].factors,
                                                .number = features[f].number,
                                                .rows = features[f].rows,
                                                .padding_idx = features[f].padding_idx,
                                                .first_row = rows_before(&features[f], part, parts),
                                                .last_row = rows_before(&features[f], part + 1, parts)};
    }
}

/* Computes the positions of the parts of the workspace. */
static void layout(int64_t starts, int64_t factors, rf__backward_small_plan *plan) {
    plan->factors_at = rounded_up(starts * (int64_t)sizeof(rf_u32));
    plan->list_at = plan->factors_at + rounded_up(factors * (int64_t)sizeof(float));
    plan->any_mean = factors > 0;
}

int64_t rf__backward_small_workspace(const rf__backward_small_plan *plan, int64_t lookups) {
    if (plan->n_features == 0) return 0;
    /* The list is read by vectors. */
    return plan->list_at + rounded_up((lookups + ALIGNMENT) * (int64_t)sizeof(rf_u16));
}

/* Puts everything that kernels read into one piece of memory. */
static rf_status description_write(const rf__gpu *gpu, const rf__backward_problem *problem,
                                   const rf_small_feature *features, rf__backward_small_plan *plan) {
    const rf_fused_backward_params *call = &problem->call;
    rf_status status = RF_OK;
    rf_small_task *tasks = NULL;
    int32_t positions[LIST_CLASSES + 1];
    const rf__backward_small_sizes sizes = {.bags = call->bags,
                                            .sms = gpu->sms,
                                            .lookups = (double)call->lookups / (double)call->n_features,
                                            .staged_bytes = plan->most_staged_shared,
                                            .epilogue = problem->epilogue,
                                            .dtype = problem->dtype};
    RF_TRY(rf__backward_small_tasks(&sizes, features, plan->n_features, &tasks, &plan->n_staged,
                                    &plan->n_gathered));
    plan->n_lists = lists_count(features, plan->n_features, positions);
    const size_t tasks_bytes = ((size_t)plan->n_staged + (size_t)plan->n_gathered) * sizeof *tasks;
    plan->tasks_at = rounded_up(plan->n_lists * (int64_t)sizeof(rf_small_list));
    plan->description_bytes = plan->tasks_at + (int64_t)tasks_bytes;
    plan->description = malloc((size_t)plan->description_bytes + 1);
    if (plan->description == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for %" PRId64 " bytes", plan->description_bytes);
        goto out;
    }
    char *to = plan->description;
    lists_write(features, plan->n_features, positions, (rf_small_list *)(void *)to);
    memcpy(to + plan->tasks_at, tasks, tasks_bytes);
    for (int32_t i = 0; i < plan->n_staged; i++) {
        const int32_t bytes = (int32_t)rf__elements_bytes(RF_FLOAT32, call->bags * tasks[i].columns);
        if (bytes > plan->staged_shared) plan->staged_shared = bytes;
    }
out:
    free(tasks);
    return status;
}

rf_status rf__backward_small_take(const rf__gpu *gpu, const rf__backward_problem *problem,
                                  rf_backward_feature *features, rf__backward_small_plan *plan) {
    rf_status status = RF_OK;
    int64_t starts = 0, factors = 0;
    const size_t count = (size_t)problem->call.n_features + 1;
    *plan = (rf__backward_small_plan){.lists_shared = shared_bytes(gpu, LISTS_STATIC),
                                      .most_staged_shared = shared_bytes(gpu, ROWS_STATIC)};
    if (!call_fits(&problem->call)) return RF_OK;
    rf_small_feature *small = malloc(count * sizeof *small);
    rows_t *rows = malloc(count * sizeof *rows);
    bool *disjoint = malloc(count * sizeof *disjoint);
    if (small == NULL || rows == NULL || disjoint == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for %" PRId64 " features", problem->call.n_features);
        goto out;
    }
    mark_disjoint(problem, features, rows, disjoint);
    plan->n_features = features_take(problem, features, disjoint, small, &starts, &factors);
    if (plan->n_features == 0) goto out;
    layout(starts, factors, plan);
    RF_TRY(description_write(gpu, problem, small, plan));
out:
    free(disjoint);
    free(rows);
    free(small);
    return status;
}

void rf__backward_small_free(rf__backward_small_plan *plan) {
    free(plan->description);
    plan->description = NULL;
}
