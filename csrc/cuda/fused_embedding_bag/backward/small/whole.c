/* Calls that whole.cu does in one launch. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/validate.h"
#include "cuda/fused_embedding_bag/backward/small/small.h"

enum {
    STAGED = 32 << 10, /* bytes of gradients, beside which lists have room, at most */
    FEATURES = 400, /* so many that blocks need not be cut to be equally long, on any GPU */
    ALIGNMENT = 16
};

/* Bytes of shared memory for the gradients of the widest feature; -1: the features are not whole.cu's. */
static int32_t staged_bytes(const rf__backward_small_call *call, const rf_small_feature *features,
                            const rf__backward_small_plan *plan) {
    int64_t most = 0;
    if (call->emit != RF_ROWWISE_ADAGRAD + 1 || plan->any_mean || plan->n_features < FEATURES) return -1;
    for (int64_t f = 0; f < plan->n_features; f++) {
        const int64_t bytes = call->bags * features[f].dim * (int64_t)sizeof(float);
        if (features[f].rows > RF_SMALL_LISTS_ROWS || features[f].dim > RF_SMALL_COLUMNS || bytes > STAGED)
            return -1;
        if (bytes > most) most = bytes;
    }
    most = (most + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return plan->most_staged_shared - most < RF_SMALL_LISTS_LEAST_SHARED ? -1 : (int32_t)most;
}

static rf_small_whole_task task_of(const rf_small_feature *feature, int32_t number) {
    return (rf_small_whole_task){.list = {.start = feature->start,
                                          .factors = -1,
                                          .number = feature->number,
                                          .rows = feature->rows,
                                          .padding_idx = feature->padding_idx,
                                          .last_row = feature->rows},
                                 .rows = {.row = feature->row,
                                          .start = feature->start,
                                          .factors = -1,
                                          .feature = number,
                                          .last_row = feature->rows,
                                          .columns = feature->dim,
                                          .output_column = feature->output_column,
                                          .matrix = feature->matrix}};
}

/* Those of many rows, by powers of two, come first. */
static void tasks_write(const rf_small_feature *features, int64_t n_features, rf_small_whole_task *to) {
    for (int32_t most = RF_SMALL_LISTS_ROWS; most > 0; most /= 2) {
        for (int64_t f = 0; f < n_features; f++)
            if (features[f].rows <= most && features[f].rows > most / 2)
                *to++ = task_of(&features[f], (int32_t)f);
    }
}

rf_status rf__backward_small_whole(const rf__backward_small_call *call, const rf_small_feature *features,
                                   rf__backward_small_plan *plan) {
    const int32_t staged = staged_bytes(call, features, plan);
    if (staged < 0) return RF_OK;
    plan->whole = true;
    plan->n_lists = (int32_t)plan->n_features;
    plan->staged_shared = staged;
    plan->lists_shared = plan->most_staged_shared - staged;
    plan->description_bytes = plan->n_features * (int64_t)sizeof(rf_small_whole_task);
    plan->description = malloc((size_t)plan->description_bytes);
    if (plan->description == NULL)
        return rf__fail(RF_ERR_MEMORY, "no memory for %" PRId64 " bytes", plan->description_bytes);
    tasks_write(features, plan->n_features, plan->description);
    return RF_OK;
}
