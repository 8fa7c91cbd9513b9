/* rf_ikbo_add_cpu: each candidate's product plus its user's, an item by a thread. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"
#include "families/ikbo_linear/check_ikbo_linear.h"
#include "core/tasks.h"

enum {
    TASK_BYTES = 1 << 16, /* of `out` that a task writes, approximately */
    BLOCK = 256,          /* elements that are worked on at once */
};

typedef struct add_call {
    const rf_ikbo_add_params *params;
    rf__load_kernel load;
    rf__store_kernel store;
    int64_t task_items;
    int64_t rows,
        columns; /* of an item, as long as the bias allows: a bias is of a row, or of a column of a single row */
    bool bias_on_columns;
} add_call;

#define ACTIVATE(number, exp, erf)                                                  \
    static number activate_##number(rf_activation activation, number x) {           \
        switch (activation) {                                                       \
        case RF_ACTIVATION_RELU:                                                    \
            return x < 0 ? 0 : x; /* a NaN stays one */                             \
        case RF_ACTIVATION_GELU:                                                    \
            return (number)0.5 * x * (1 + erf(x * (number)0.70710678118654752440)); \
        case RF_ACTIVATION_SILU:                                                    \
            return x / (1 + exp(-x));                                               \
        case RF_ACTIVATION_NONE:                                                    \
            break;                                                                  \
        }                                                                           \
        return x;                                                                   \
    }
ACTIVATE(float, expf, erff)
ACTIVATE(double, exp, erf)

/* sum[i] of element first + i of an item: plus the bias, and activated. */
#define FINISH(number)                                                                                     \
    static void finish_##number(const add_call *call, const number *bias, int64_t count, number *sum) {    \
        const rf_activation activation = call->params->activation;                                         \
        for (int64_t i = 0; i < count && bias != NULL; i++) sum[i] += bias[call->bias_on_columns ? i : 0]; \
        for (int64_t i = 0; i < count && activation != RF_ACTIVATION_NONE; i++)                            \
            sum[i] = activate_##number(activation, sum[i]);                                                \
    }
FINISH(float)
FINISH(double)

/* Elements [first, first + count) of row `row`, BLOCK at most. */
static void add_block(const add_call *call, char *out, const char *base, int64_t row, int64_t first,
                      int64_t count) {
    const rf_ikbo_add_params *params = call->params;
    const int64_t bias_at = call->bias_on_columns ? first : row;
    const char *bias = params->bias == NULL ? NULL : rf__element_at(params->bias, params->dtype, bias_at);
    const int64_t n_biases = call->bias_on_columns ? count : 1;
    if (params->dtype == RF_FLOAT64) {
        double sum[BLOCK], added[BLOCK], biases[BLOCK];
        memcpy(sum, base, (size_t)count * sizeof *sum);
        if (!params->replace) memcpy(added, out, (size_t)count * sizeof *added);
        for (int64_t i = 0; i < count && !params->replace; i++) sum[i] += added[i];
        if (bias != NULL) memcpy(biases, bias, (size_t)n_biases * sizeof *biases);
        finish_double(call, bias != NULL ? biases : NULL, count, sum);
        memcpy(out, sum, (size_t)count * sizeof *sum);
        return;
    }
    float sum[BLOCK], added[BLOCK], biases[BLOCK];
    call->load(base, params->dtype, count, sum);
    if (!params->replace) call->load(out, params->dtype, count, added);
    for (int64_t i = 0; i < count && !params->replace; i++) sum[i] += added[i];
    if (bias != NULL) call->load(bias, params->dtype, n_biases, biases);
    finish_float(call, bias != NULL ? biases : NULL, count, sum);
    call->store(out, params->dtype, count, sum);
}

static int64_t parent_of(const rf_ikbo_add_params *params, int64_t item) {
    return params->parent == NULL ? item : rf__load_int(params->parent, params->parent_type, item);
}

static void add_items(void *context, int64_t task) {
    const add_call *call = context;
    const rf_ikbo_add_params *params = call->params;
    const rf__row_format item_row = rf__contiguous_row(params->dtype, params->m * params->n);
    const int64_t first = task * call->task_items;
    const int64_t remaining = params->count - first;
    const int64_t last = first + (remaining < call->task_items ? remaining : call->task_items);
    for (int64_t item = first; item < last; item++) {
        const int64_t parent = parent_of(params, item);
        for (int64_t row = 0; row < call->rows; row++) {
            for (int64_t at = 0; at < call->columns; at += BLOCK) {
                const int64_t element = row * call->columns + at;
                add_block(call, (char *)params->out + rf__row_offset(&item_row, item, element),
                          (const char *)params->base + rf__row_offset(&item_row, parent, element), row, at,
                          call->columns - at < BLOCK ? call->columns - at : BLOCK);
            }
        }
    }
}

static const char *name_of(const rf_ikbo_add_params *params) {
    return params->map < 0 ? "ikbo_linear" : "ikbo_linear_chain";
}

static rf_status parents_check(const rf_ikbo_add_params *params) {
    for (int64_t i = 0; i < params->count && params->check_bounds; i++) {
        const int64_t parent = parent_of(params, i);
        if ((uint64_t)parent < (uint64_t)params->parents) continue;
        char map[32] = "cand_to_user", input[32] = "x_user", allowed[64] = ", but no index is valid";
        if (params->map >= 0) {
            snprintf(map, sizeof map, "maps[%d]", (int)params->map);
            snprintf(input, sizeof input, "inputs[%d]", (int)params->map);
        }
        if (params->parents > 0)
            snprintf(allowed, sizeof allowed, "; expected 0 to " RF__I64, params->parents - 1);
        return rf__fail(RF_ERR_INDEX,
                        "recfuse.%s: %s[" RF__I64 "] is " RF__I64 "%s, since %s has " RF__I64 " items",
                        name_of(params), map, i, parent, allowed, input, params->parents);
    }
    return RF_OK;
}

rf_status rf_ikbo_add_cpu(const rf_ikbo_add_params *params, const rf_executor *executor) {
    RF_CHECK(rf__check_ikbo_add(params));
    RF_CHECK(parents_check(params));
    const int64_t item_bytes = rf__elements_bytes(params->dtype, params->m * params->n);
    if (params->count == 0 || item_bytes == 0) return RF_OK;
    const rf__pool_kernels *kernels = rf__isa_in_use()->kernels;
    const bool by_row = params->bias != NULL && !params->bias_on_n && params->n > 1;
    add_call call = {.params = params,
                     .load = kernels->load,
                     .store = kernels->store,
                     .task_items = TASK_BYTES / item_bytes + 1,
                     .rows = by_row ? params->m : 1,
                     .columns = by_row ? params->n : params->m * params->n,
                     .bias_on_columns = !by_row};
    const int64_t tasks = (params->count + call.task_items - 1) / call.task_items;
    const int64_t workers = rf__tasks_workers(executor, 3 * params->count * item_bytes);
    return rf__tasks_run(name_of(params), tasks, workers, add_items, &call, executor);
}
