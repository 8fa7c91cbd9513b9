/* Gradients of a weight, dense and sparse: lookups are sorted by row, then each row is pooled and written
 * once. */
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/huge_pages.h"
#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"
#include "core/status.h"
#include "core/tasks.h"
#include "families/fused_backward/cpu/transpose.h"
#include "families/fused_backward/check/check_backward.h"

enum { BUCKET_BYTES = 1 << 18 }; /* of a dense gradient, written by one thread at once */

typedef struct gradient {
    rf__transpose transpose; /* first: its buckets are the tasks */
    const rf__pool_kernels *kernels;
    char *values; /* dense: [rows, dim]; sparse: [distinct rows, dim] */
    int64_t *rows; /* sparse: [distinct rows] */
    rf__entry **sorted; /* sparse: [buckets] */
    int64_t *firsts; /* sparse: [buckets + 1], distinct rows of a bucket, then those of all before */
} gradient;

/* Pools the entries of a row; returns the first entry of the next row. */
static const rf__entry *pool_row(const gradient *gradient, int64_t first_row, const rf__entry *first,
                                 const rf__entry *end, char *output) {
    const rf_fused_backward_params *params = gradient->transpose.params;
    const uint32_t row = rf__entry_row(first);
    const rf__entry *last = first;
    uint32_t flags = 0;
    for (; last < end && rf__entry_row(last) == row; last++) flags |= last->row;
    const float divisor = params->scale_grad_by_freq ? (float)(last - first) : 1.0f;
    if (flags & RF__ENTRY_MAX) {
        gradient->kernels->mixed_row(params, first, last, first_row + row, divisor, output);
    } else {
        gradient->kernels->sum_row[params->grad_dtype](params, first, last, end, divisor, output);
    }
    return last;
}

static void write_dense(void *context, int64_t bucket) {
    const gradient *gradient = context;
    const rf__transpose *transpose = &gradient->transpose;
    const rf_fused_backward_params *params = transpose->params;
    const int64_t row_bytes = rf__elements_bytes(params->dtype, params->dim);
    const int64_t first_row = bucket << transpose->shift, remaining = params->rows - first_row;
    const int64_t rows = remaining >> transpose->shift > 0 ? (int64_t)1 << transpose->shift : remaining;
    const int64_t count = transpose->starts[bucket + 1] - transpose->starts[bucket];
    const rf__entry *at = rf__transpose_sort(transpose, bucket), *end = at == NULL ? NULL : at + count;
    char *output = gradient->values + first_row * row_bytes;
    int64_t n_written = 0; /* rows of the bucket */
    while (at < end) {
        const int64_t row = rf__entry_row(at);
        memset(output + n_written * row_bytes, 0, (size_t)((row - n_written) * row_bytes));
        at = pool_row(gradient, first_row, at, end, output + row * row_bytes);
        n_written = row + 1;
    }
    memset(output + n_written * row_bytes, 0, (size_t)((rows - n_written) * row_bytes));
}

static void sort_sparse(void *context, int64_t bucket) {
    gradient *gradient = context;
    const rf__transpose *transpose = &gradient->transpose;
    const int64_t count = transpose->starts[bucket + 1] - transpose->starts[bucket];
    const rf__entry *sorted = rf__transpose_sort(transpose, bucket);
    int64_t distinct = count > 0;
    for (int64_t i = 1; i < count; i++)
        distinct += rf__entry_row(&sorted[i]) != rf__entry_row(&sorted[i - 1]);
    gradient->sorted[bucket] = (rf__entry *)sorted;
    gradient->firsts[bucket] = distinct;
}

static void write_sparse(void *context, int64_t bucket) {
    const gradient *gradient = context;
    const rf__transpose *transpose = &gradient->transpose;
    const rf_fused_backward_params *params = transpose->params;
    const int64_t row_bytes = rf__elements_bytes(params->dtype, params->dim);
    const int64_t first_row = bucket << transpose->shift;
    const rf__entry *at = gradient->sorted[bucket];
    const rf__entry *end = at + (transpose->starts[bucket + 1] - transpose->starts[bucket]);
    if (params->winners == NULL && !params->scale_grad_by_freq) { /* no maximum, no divisor */
        const int64_t to = gradient->firsts[bucket];
        gradient->kernels->sum_rows[params->grad_dtype](params, at, end, first_row, gradient->rows + to,
                                                        gradient->values + to * row_bytes);
        return;
    }
    for (int64_t to = gradient->firsts[bucket]; at < end; to++) {
        gradient->rows[to] = first_row + rf__entry_row(at);
        at = pool_row(gradient, first_row, at, end, gradient->values + to * row_bytes);
    }
}

rf_status rf_fused_embedding_bag_backward_cpu(const rf_fused_backward_params *params, void *output,
                                              const rf_executor *executor) {
    static const char name[] = "fused_embedding_bag_backward";
    rf_status status = RF_OK;
    gradient gradient = {.kernels = rf__isa_in_use()->kernels, .values = output};
    RF_TRY(rf__check_fused_backward(name, params));
    if (params->rows == 0 || params->dim == 0) goto out;
    if (output == NULL) {
        status =
            rf__fail(RF_ERR_VALUE, "recfuse.%s: output is NULL; expected a pointer to its elements", name);
        goto out;
    }
    const int64_t row_bytes = rf__elements_bytes(params->dtype, params->dim);
    RF_TRY(rf__transpose_run(&gradient.transpose, params, name, BUCKET_BYTES / row_bytes + 1, executor));
    const rf__transpose *transpose = &gradient.transpose;
    rf__huge_pages_ask(output, params->rows * row_bytes);
    const int64_t bytes = (params->rows + transpose->starts[transpose->buckets]) * row_bytes;
    RF_TRY(rf__tasks_run(name, transpose->buckets, rf__tasks_workers(executor, bytes), write_dense, &gradient,
                         executor));
out:
    rf__transpose_free(&gradient.transpose);
    return status;
}

rf_status rf_fused_embedding_bag_sparse_backward_cpu(const rf_fused_backward_params *params,
                                                     const rf_sparse_output *output,
                                                     const rf_executor *executor) {
    static const char name[] = "fused_embedding_bag_sparse_backward";
    rf_status status = RF_OK;
    gradient gradient = {.kernels = rf__isa_in_use()->kernels};
    rf__transpose *transpose = &gradient.transpose;
    void *values = NULL;
    RF_TRY(rf__check_fused_backward(name, params));
    if (params->dim > 0 && params->rows > 0) RF_TRY(rf__transpose_run(transpose, params, name, 0, executor));
    const int64_t buckets = transpose->buckets;
    const int64_t lookups = buckets > 0 ? transpose->starts[buckets] : 0;
    const int64_t workers = rf__tasks_workers(executor, lookups * (params->dim + 1) * 4);
    const int64_t sorters = rf__tasks_workers(executor, lookups * (int64_t)sizeof(rf__entry) * 2);
    gradient.firsts = calloc((size_t)buckets + 1, sizeof *gradient.firsts);
    gradient.sorted = calloc((size_t)buckets + 1, sizeof *gradient.sorted);
    if (gradient.firsts == NULL || gradient.sorted == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "recfuse.%s: no memory for %" PRId64 " buckets", name, buckets);
        goto out;
    }
    RF_TRY(rf__tasks_run(name, lookups > 0 ? buckets : 0, sorters, sort_sparse, &gradient, executor));
    int64_t distinct = 0;
    for (int64_t b = 0; b <= buckets; b++) {
        const int64_t count = gradient.firsts[b];
        gradient.firsts[b] = distinct;
        distinct += count;
    }
    RF_TRY(output->allocate(output->context, distinct, &gradient.rows, &values));
    gradient.values = values;
    rf__huge_pages_ask(values, rf__elements_bytes(params->dtype, distinct * params->dim));
    RF_TRY(rf__tasks_run(name, lookups > 0 ? buckets : 0, workers, write_sparse, &gradient, executor));
out:
    free(gradient.sorted);
    free(gradient.firsts);
    rf__transpose_free(transpose);
    return status;
}
