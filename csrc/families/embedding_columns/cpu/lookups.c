/* rf_embedding_columns_lookups_cpu and rf_embedding_columns_capacity: the lookups of samples, for
 * gradients. */
#include "families/embedding_columns/cpu/columns.h"
#include "core/tasks.h"

#include <math.h>
#include <stdlib.h>

static const char operator_name[] = "embedding_columns";

enum { TASK_BYTES = 1 << 16 }; /* that a task reads and writes, about */

typedef struct lookups_call {
    rf__columns_call *call;
    const rf_embedding_columns_lookups *lookups;
    bool counts; /* the number of lookups of each bag, else the lookups */
    int64_t samples, n_pieces; /* per task; tasks per column */
} lookups_call;

/* Divides the weights [count] of a bag, or ones, according to the pooling. In float64, which holds the square
 * of every float32. */
static void divide(const rf_columns_column *column, float *factors, int64_t count) {
    double weights = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        weights += factors[i];
        squares += (double)factors[i] * factors[i];
    }
    const double by = column->pooling == RF_COLUMN_MEAN    ? weights
                      : column->pooling == RF_COLUMN_SQRTN ? sqrt(squares)
                                                           : 1.0;
    for (int64_t i = 0; i < count && by != 1.0; i++) factors[i] = (float)(factors[i] / by);
}

/* Appends the cursor's result to the previous rows, of which its bag has `n_stored`. */
static void rows_store(const lookups_call *of, const rf__column_cursor *cursor, int64_t n_stored) {
    const rf_embedding_columns_lookups *lookups = of->lookups;
    const rf_columns_column *column = cursor->column->column;
    const int64_t batch = of->call->params->batch;
    const int64_t *starts = lookups->offsets + column->table * batch + cursor->first;
    const int64_t at = starts[0] + n_stored, end = at + cursor->n_rows;
    if (end > lookups->capacity) return; /* the caller is told */
    memcpy(lookups->indices + at, cursor->rows, (size_t)cursor->n_rows * sizeof *cursor->rows);
    if (lookups->factors == NULL) return;
    memcpy(lookups->factors + at, cursor->weights, (size_t)cursor->n_rows * sizeof *cursor->weights);
    for (int64_t bag = 0; bag < cursor->last - cursor->first && !cursor->has_more; bag++) {
        const int64_t to = bag + 1 < cursor->last - cursor->first ? starts[bag + 1] : end;
        divide(column, lookups->factors + starts[bag], to - starts[bag]);
    }
}

static void look_up(void *context, int64_t number) {
    const lookups_call *of = context;
    const rf__column column = rf__column_of(of->call, number / of->n_pieces);
    const int64_t batch = of->call->params->batch, first = number % of->n_pieces * of->samples;
    const int64_t last = batch - first < of->samples ? batch : first + of->samples;
    if (column.column->table < 0) return;
    int64_t *counts = of->lookups->offsets + column.column->table * batch + 1;
    int64_t n_stored = 0;
    rf__column_cursor cursor;
    if (of->counts) memset(counts + first, 0, (size_t)(last - first) * sizeof *counts);
    rf__column_cursor_open(of->call, &column, first, last, &cursor);
    while (rf__column_cursor_next(&cursor)) {
        for (int64_t bag = 0; bag < cursor.last - cursor.first && of->counts; bag++)
            counts[cursor.first + bag] += cursor.offsets[bag + 1] - cursor.offsets[bag];
        if (!of->counts) rows_store(of, &cursor, n_stored);
        n_stored = cursor.has_more ? n_stored + cursor.n_rows : 0;
    }
}

static rf_status run(lookups_call *of, const rf_executor *executor) {
    const int64_t n_columns = of->call->program.header->n_columns, batch = of->call->params->batch;
    const int64_t bags = of->call->program.header->n_tables * batch;
    int64_t bytes = 0, *offsets = of->lookups->offsets;
    offsets[0] = 0;
    if (bags == 0) return RF_OK;
    for (int64_t c = 0; c < n_columns; c++) bytes += rf__columns_cost(of->call, c) * batch;
    const int64_t pieces = bytes / n_columns / TASK_BYTES + 1;
    of->samples = (batch + pieces - 1) / pieces;
    of->n_pieces = (batch + of->samples - 1) / of->samples;
    const int64_t workers = rf__tasks_workers(executor, bytes);
    of->counts = true;
    RF_CHECK(rf__tasks_run(operator_name, n_columns * of->n_pieces, workers, look_up, of, executor));
    for (int64_t bag = 0; bag < bags; bag++) offsets[bag + 1] += offsets[bag];
    if (of->lookups->indices == NULL || of->call->has_offence) return RF_OK;
    RF__REFUSE_IF(offsets[bags] > of->lookups->capacity, RF_ERR_VALUE,
                  "capacity is " RF__I64 "; expected the " RF__I64 " lookups of the samples or more",
                  of->lookups->capacity, offsets[bags]);
    of->counts = false;
    return rf__tasks_run(operator_name, n_columns * of->n_pieces, workers, look_up, of, executor);
}

rf_status rf_embedding_columns_lookups_cpu(const rf_embedding_columns_params *params,
                                           const rf_embedding_columns_lookups *lookups,
                                           const rf_executor *executor) {
    rf__columns_call call;
    RF__REFUSE_IF(lookups->offsets == NULL, RF_ERR_VALUE, "%s",
                  "offsets is NULL; expected a pointer to its elements");
    RF_CHECK(rf__columns_begin(params, false, &call));
    lookups_call of = {.call = &call, .lookups = lookups};
    return rf__columns_end(&call, run(&of, executor));
}

static rf_status fail_capacity(void) {
    return rf__fail(RF_ERR_VALUE, "recfuse.%s: the lookups of all samples do not fit in int64",
                    operator_name);
}

/* Adds the lookups of a dense column to *capacity. For a column with a jagged source adds the lookups per
 * value to the uses of its feature, and to *capacity the rows of empty samples. */
static rf_status add_column(const rf_embedding_columns_params *params, const rf__columns *program,
                            const rf_columns_column *column, int64_t *const *lookup_counts,
                            int64_t *capacity) {
    const rf_columns_source *left = &program->sources[column->left];
    const rf_columns_source *right = column->right < 0 ? NULL : &program->sources[column->right];
    const rf_columns_source *jagged = left->width == 0                     ? left
                                      : right != NULL && right->width == 0 ? right
                                                                           : NULL;
    int64_t factor = (left->width > 0 ? left->width : 1), has_more;
    if (right != NULL && right->width > 0) factor *= right->width;
    if (jagged != NULL) {
        int64_t *feature = &lookup_counts[jagged->input][jagged->slot];
        if (__builtin_add_overflow(*feature, factor, feature)) return fail_capacity();
        factor = column->empty >= 0 ? 1 : 0;
    }
    if (__builtin_mul_overflow(factor, params->batch, &has_more) ||
        __builtin_add_overflow(*capacity, has_more, capacity))
        return fail_capacity();
    return RF_OK;
}

static rf_status add_columns(const rf_embedding_columns_params *params, const rf__columns *program,
                             int64_t **lookup_counts, int64_t *capacity) {
    for (int64_t c = 0; c < program->header->n_columns; c++) {
        const rf_columns_column *column = &program->columns[c];
        if (column->table < 0) continue;
        if (column->right >= 0 && program->sources[column->left].width == 0 &&
            program->sources[column->right].width == 0) {
            *capacity = -1;
            return RF_OK;
        }
        RF_CHECK(add_column(params, program, column, lookup_counts, capacity));
    }
    for (int64_t i = 0; i < params->n_inputs; i++) { /* an input's bags are of different lookups */
        int64_t most_lookups = 0, has_more;
        for (int64_t f = 0; f < params->inputs[i].features && params->inputs[i].width == 0; f++)
            if (lookup_counts[i][f] > most_lookups) most_lookups = lookup_counts[i][f];
        if (__builtin_mul_overflow(most_lookups, params->inputs[i].lookups, &has_more) ||
            __builtin_add_overflow(*capacity, has_more, capacity))
            return fail_capacity();
    }
    return RF_OK;
}

rf_status rf_embedding_columns_capacity(const rf_embedding_columns_params *params, int64_t *capacity) {
    rf_status status = RF_OK;
    rf__columns program;
    int64_t **lookup_counts = NULL, *counts_of_all = NULL, features = 0;
    *capacity = 0;
    RF_CHECK(rf__check_columns(params, false, &program));
    if (params->batch == 0) return RF_OK;
    for (int64_t i = 0; i < params->n_inputs; i++)
        if (params->inputs[i].width == 0) features += params->inputs[i].features;
    lookup_counts = calloc((size_t)params->n_inputs + 1, sizeof *lookup_counts);
    counts_of_all = calloc((size_t)features + 1, sizeof *counts_of_all);
    if (lookup_counts == NULL || counts_of_all == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "recfuse.%s: no memory for " RF__I64 " features", operator_name,
                          features);
        goto out;
    }
    features = 0;
    for (int64_t i = 0; i < params->n_inputs; i++) {
        lookup_counts[i] = counts_of_all + features;
        if (params->inputs[i].width == 0) features += params->inputs[i].features;
    }
    RF_TRY(add_columns(params, &program, lookup_counts, capacity));
out:
    free(counts_of_all);
    free(lookup_counts);
    return status;
}
