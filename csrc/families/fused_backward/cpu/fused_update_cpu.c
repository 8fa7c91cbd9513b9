/* Fused optimizers: lookups are sorted by row, then each row's gradients are summed and the row is updated,
 * while the sum is in L1. A row belongs to one thread, and its sum to the order of the call: results do not
 * depend on threads. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"
#include "core/status.h"
#include "core/tasks.h"
#include "families/fused_backward/cpu/transpose.h"
#include "families/fused_backward/check/check_backward.h"
#include "families/fused_backward/device/optimizer_steps.h"

enum {
    PREFETCH_ROWS = 6, /* between the prefetch of a row and its states and its update */
    STACK_SUM = 1024, /* columns whose sum fits on the stack */
    ROWS_A_TASK = 256, /* of a rows_update */
};

typedef struct update {
    rf__transpose transpose; /* first: its buckets are the tasks */
    const rf__pool_kernels *kernels;
    rf__update_kernel update_row;
    const rf_update_matrix *matrix;
    const rf_rows_update_params *rows; /* of rows_update */
    rf_optimizer optimizer;
    rf__step step;
    bool failed; /* atomic: no memory for a sum */
} update;

static void update_begin(update *update, const rf_update *with, const rf_update_matrix *matrix) {
    const float *numbers = with->numbers;
    const double step = (double)numbers[RF_UPDATE_STEP];
    const double first = 1 - pow((double)numbers[RF_UPDATE_BETA1], step);
    const double second = 1 - pow((double)numbers[RF_UPDATE_BETA2], step);
    update->kernels = rf__isa_in_use()->kernels;
    update->update_row = update->kernels->update_row[matrix->dtype][with->optimizer];
    update->matrix = matrix;
    update->optimizer = with->optimizer;
    update->step = (rf__step){
        .lr = numbers[RF_UPDATE_LR],
        .weight_decay = numbers[RF_UPDATE_WEIGHT_DECAY],
        .eps = numbers[RF_UPDATE_EPS],
        .grad_scale = numbers[RF_UPDATE_GRAD_SCALE],
        .one_minus_beta1 = (float)(1 - (double)numbers[RF_UPDATE_BETA1]),
        .one_minus_beta2 = (float)(1 - (double)numbers[RF_UPDATE_BETA2]),
        .corrected_lr = (float)((double)numbers[RF_UPDATE_LR] * sqrt(second) / first),
        .number = numbers[RF_UPDATE_STEP],
        .stochastic_rounding = with->stochastic_rounding,
        .seed = with->seed,
    };
}

/* Prefetches a row that is updated soon. Always inline, because gcc drops calls of functions that only
 * prefetch. */
static inline __attribute__((always_inline)) void row_prefetch(const update *update, int64_t row) {
    const rf_update_matrix *matrix = update->matrix;
    const rf__row_format weight = rf__contiguous_row(matrix->dtype, matrix->dim);
    const int32_t columns = rf_optimizer_column_states(update->optimizer);
    const int32_t states = columns + rf_optimizer_row_states(update->optimizer);
    const rf__row_format state = rf__contiguous_row(RF_FLOAT32, columns > 0 ? matrix->dim : 1);
    rf__ask_for((const char *)matrix->weight + row * weight.pitch, weight.bytes);
    for (int32_t i = 0; i < states; i++)
        rf__ask_for((const char *)matrix->states[i] + row * state.pitch, state.bytes);
}

/* Returns [dim], on the stack if it fits; NULL: the update has failed. The caller frees it unless it is
 * `stack`. */
static float *sum_get(update *update, float *stack) {
    if (update->matrix->dim <= STACK_SUM) return stack;
    float *sum = malloc((size_t)update->matrix->dim * sizeof *sum);
    if (sum == NULL) __atomic_store_n(&update->failed, true, __ATOMIC_RELAXED);
    return sum;
}

/* Returns the start of the next row's entries. */
static const rf__entry *row_end(const rf__entry *first, const rf__entry *end) {
    const uint32_t row = rf__entry_row(first);
    while (first < end && rf__entry_row(first) == row) first++;
    return first;
}

static void update_bucket(void *context, int64_t bucket) {
    update *update = context;
    const rf__transpose *transpose = &update->transpose;
    const rf_fused_backward_params *params = transpose->params;
    const int64_t first_row = bucket << transpose->shift;
    const rf__entry *at = rf__transpose_sort(transpose, bucket), *prefetched = at;
    if (at == NULL) return;
    const rf__entry *end = at + (transpose->starts[bucket + 1] - transpose->starts[bucket]);
    float stack[STACK_SUM];
    float *sum = sum_get(update, stack);
    for (int32_t i = 0; sum != NULL && i < PREFETCH_ROWS && prefetched < end; i++) {
        row_prefetch(update, first_row + rf__entry_row(prefetched));
        prefetched = row_end(prefetched, end);
    }
    while (sum != NULL && at < end) {
        const int64_t row = first_row + rf__entry_row(at);
        const rf__entry *last = row_end(at, end);
        bool maximum = false;
        for (const rf__entry *entry = at; entry < last; entry++) maximum |= (entry->row & RF__ENTRY_MAX) != 0;
        if (prefetched < end) {
            row_prefetch(update, first_row + rf__entry_row(prefetched));
            prefetched = row_end(prefetched, end);
        }
        if (maximum) {
            update->kernels->mixed_row(params, at, last, row, 1.0f, (char *)sum);
        } else {
            update->kernels->sum_row[params->grad_dtype](params, at, last, end, 1.0f, (char *)sum);
        }
        update->update_row(&update->step, update->matrix, row, sum);
        at = last;
    }
    if (sum != stack) free(sum);
}

static rf_status update_matrix(const char *name, const rf_fused_update_params *params, int64_t number,
                               const rf_executor *executor) {
    rf_status status = RF_OK;
    const rf_update_matrix *matrix = &params->matrices[number];
    const rf_fused_backward_params gradient = rf__fused_update_gradient(params, number);
    update update = {.failed = false};
    rf__transpose *transpose = &update.transpose;
    update_begin(&update, &params->update, matrix);
    RF_TRY(rf__transpose_run(transpose, &gradient, name, 0, executor));
    const int64_t bytes = transpose->starts[transpose->buckets] * matrix->dim * 12;
    RF_TRY(rf__tasks_run(name, bytes > 0 ? transpose->buckets : 0, rf__tasks_workers(executor, bytes),
                         update_bucket, &update, executor));
    if (update.failed)
        status = rf__fail(RF_ERR_MEMORY, "recfuse.%s: no memory for %" PRId64 " columns", name, matrix->dim);
out:
    rf__transpose_free(transpose);
    return status;
}

rf_status rf_fused_embedding_bag_update_cpu(const rf_fused_update_params *params,
                                            const rf_executor *executor) {
    static const char name[] = "fused_embedding_bag_update";
    RF_CHECK(rf__check_fused_update(name, params));
    if (params->update.numbers[RF_UPDATE_SKIP] != 0) return RF_OK;
    for (int64_t i = 0; i < params->n_matrices; i++) {
        const rf_update_matrix *matrix = &params->matrices[i];
        if (matrix->weight == NULL || matrix->rows == 0 || matrix->dim == 0) continue;
        RF_CHECK(update_matrix(name, params, i, executor));
    }
    return RF_OK;
}

static void update_rows(void *context, int64_t task) {
    update *update = context;
    const rf_rows_update_params *params = update->rows;
    const rf_update_matrix *matrix = update->matrix;
    const int64_t first = task * ROWS_A_TASK, dim = matrix->dim;
    const int64_t last = params->count - first < ROWS_A_TASK ? params->count : first + ROWS_A_TASK;
    const rf__row_format sums = rf__contiguous_row(params->sums_dtype, dim);
    float stack[STACK_SUM];
    float *sum = sum_get(update, stack);
    for (int64_t i = first; sum != NULL && i < last; i++) {
        const int64_t row = params->rows[i],
                      prefetched = i + PREFETCH_ROWS < last ? params->rows[i + PREFETCH_ROWS] : -1;
        if (prefetched >= 0 && prefetched < matrix->rows) row_prefetch(update, prefetched);
        if (row < 0 || row >= matrix->rows) continue;
        update->kernels->load((const char *)params->sums + i * sums.pitch, sums.dtype, dim, sum);
        update->update_row(&update->step, matrix, row, sum);
    }
    if (sum != stack) free(sum);
}

rf_status rf_rows_update_cpu(const rf_rows_update_params *params, const rf_executor *executor) {
    static const char name[] = "rows_update";
    const rf_update_matrix *matrix = &params->matrix;
    update update = {.rows = params};
    RF_CHECK(rf__check_rows_update(name, params));
    if (params->update.numbers[RF_UPDATE_SKIP] != 0 || params->count == 0 || matrix->weight == NULL ||
        matrix->dim == 0)
        return RF_OK;
    update_begin(&update, &params->update, matrix);
    const int64_t bytes = params->count * matrix->dim * 12;
    RF_CHECK(rf__tasks_run(name, (params->count + ROWS_A_TASK - 1) / ROWS_A_TASK,
                           rf__tasks_workers(executor, bytes), update_rows, &update, executor));
    RF_FAIL_IF(update.failed, RF_ERR_MEMORY, "recfuse.%s: no memory for %" PRId64 " columns", name,
               matrix->dim);
    return RF_OK;
}
