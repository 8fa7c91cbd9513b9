/* The other gradients of a fused call, bag by bag: the winners of maxima, and the gradient of the sample
 * weights. */
#include <string.h>

#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"
#include "families/fused_embedding_bag/check_fused.h"
#include "core/status.h"
#include "core/tasks.h"

enum { TASK_BYTES = 1 << 15 }; /* gathered by a task, about */

typedef struct bags_call {
    const rf_fused_embedding_bag_params *params;
    const rf__pool_kernels *kernels;
    int64_t task_bags, tasks_per_feature;
    int64_t *winners;
    const char *grad;
    rf_dtype grad_dtype;
    float *output;
} bags_call;

/* Runs a function over tasks: runs of bags of one feature. */
static rf_status run(const char *name, bags_call *call, void (*task)(void *context, int64_t number),
                     const rf_executor *executor) {
    const rf_fused_embedding_bag_params *params = call->params;
    if (params->n_features == 0 || params->bags == 0) return RF_OK;
    const int64_t bytes =
        4 * (params->lookups + params->bags) * (params->output_dim / params->n_features + 1);
    const int64_t tasks = bytes / TASK_BYTES / params->n_features + 1;
    call->task_bags = params->bags / tasks + 1;
    call->tasks_per_feature = (params->bags + call->task_bags - 1) / call->task_bags;
    call->kernels = rf__isa_in_use()->kernels;
    return rf__tasks_run(name, params->n_features * call->tasks_per_feature,
                         rf__tasks_workers(executor, bytes), task, call, executor);
}

static int64_t task_bags(const bags_call *call, int64_t task, int64_t *first, int64_t *last) {
    *first = task % call->tasks_per_feature * call->task_bags;
    *last = call->params->bags - *first < call->task_bags ? call->params->bags : *first + call->task_bags;
    return task / call->tasks_per_feature;
}

static void find_winners(void *context, int64_t task) {
    const bags_call *call = context;
    int64_t first, last;
    const int64_t number = task_bags(call, task, &first, &last);
    const rf_feature *feature = &call->params->features[number];
    for (int64_t bag = first; bag < last; bag++) {
        int64_t *winners = call->winners + bag * call->params->output_dim + feature->output_column;
        if (feature->pooling == RF_MAX) {
            call->kernels->winners(call->params, number, bag, winners);
        } else {
            for (int64_t c = 0; c < feature->dim; c++) winners[c] = -1;
        }
    }
}

rf_status rf_fused_embedding_bag_winners_cpu(const rf_fused_embedding_bag_params *params, int64_t *winners,
                                             const rf_executor *executor) {
    rf_fused_embedding_bag_params checked = *params;
    checked.output = winners;
    checked.output_stride = params->output_dim;
    bags_call call = {.params = params, .winners = winners};
    RF_CHECK(rf__check_fused_call(&checked));
    RF_CHECK(rf__check_fused_features(&checked));
    RF_CHECK(rf__check_fused_floats("fused_embedding_bag_winners", &checked));
    return run("fused_embedding_bag_winners", &call, find_winners, executor);
}

static void multiply_rows(void *context, int64_t task) {
    const bags_call *call = context;
    const rf_fused_embedding_bag_params *params = call->params;
    int64_t first, last;
    const int64_t number = task_bags(call, task, &first, &last);
    const rf_feature *feature = &params->features[number];
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    const rf__row_format grad_row = rf__contiguous_row(call->grad_dtype, params->output_dim);
    const char *weight = rf__feature_weight(params->buffers, feature);
    const char *parameters = rf__feature_parameters(params->buffers, feature);
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t from = rf__load_int(params->offsets, params->offset_type, number * params->bags + bag);
        const int64_t to =
            rf__load_int(params->offsets, params->offset_type, number * params->bags + bag + 1);
        if (!rf__is_bag(number * params->bags + bag, from, to, params->lookups)) continue;
        const char *grad = call->grad + rf__row_offset(&grad_row, bag, feature->output_column);
        for (int64_t i = from; i < to; i++) {
            const int64_t index = rf__load_int(params->indices, params->index_type, i);
            if ((uint64_t)index >= (uint64_t)feature->rows || index == feature->padding_idx) continue;
            call->output[i] = call->kernels->dot_row(
                grad, call->grad_dtype, weight + index * row.pitch,
                parameters == NULL ? NULL : parameters + index * row.parameters_pitch, &row);
        }
    }
}

rf_status rf_fused_embedding_bag_sample_weights_backward_cpu(const rf_fused_embedding_bag_params *params,
                                                             const void *grad, rf_dtype grad_dtype,
                                                             float *output, const rf_executor *executor) {
    static const char name[] = "fused_embedding_bag_sample_weights_backward";
    rf_status status = RF_OK;
    rf_fused_embedding_bag_params checked = *params;
    checked.output = output;
    checked.output_stride = params->output_dim;
    checked.sample_weights = output; /* this check allows only sums */
    bags_call call = {.params = params, .grad = grad, .grad_dtype = grad_dtype, .output = output};
    RF_TRY(rf__check_fused_call(&checked));
    if (params->lookups == 0) goto out;
    RF_TRY(rf__check_fused_features(&checked));
    RF_TRY(rf__check_dtype(name, "grad_dtype", grad_dtype));
    RF_FAIL_IF(output == NULL || (grad == NULL && params->bags * params->output_dim > 0), RF_ERR_VALUE,
               "recfuse.%s: %s is NULL; expected a pointer to its elements", name,
               output == NULL ? "output" : "grad");
    memset(output, 0, (size_t)params->lookups * sizeof *output);
    RF_TRY(run(name, &call, multiply_rows, executor));
out:
    return status;
}
