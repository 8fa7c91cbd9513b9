/* A backward on a GPU: small tables by the small path, others by the general one. */
#include <stdlib.h>

#include "base/validate.h"
#include "cuda/fused_embedding_bag/backward/general.h"
#include "cuda/fused_embedding_bag/backward/small/small.h"

enum {
    ALIGNMENT = 256, /* of parts of the workspace */
    MANY_FEATURES = 64, /* so many fill a GPU, a block each */
    MANY_LOOKUPS = 65536, /* of a feature, about: too many for a block */
    FEW_LOOKUPS = 4096 /* so few that the launches of the general path cost more than one block's work */
};

static rf__backward_small_call small_call(const rf__backward_problem *problem,
                                          const rf__cuda_device *device) {
    const rf_fused_backward_params *call = &problem->call;
    return (rf__backward_small_call){.device = device,
                                     .indices = call->indices,
                                     .offsets = call->offsets,
                                     .lookups = call->lookups,
                                     .bags = call->bags,
                                     .n_features = call->n_features,
                                     .index_type = (int32_t)call->index_type,
                                     .offset_type = (int32_t)call->offset_type,
                                     .grad = call->grad,
                                     .output_dim = call->output_dim,
                                     .matrices = problem->matrices,
                                     .n_matrices = problem->n_matrices,
                                     .grad_dtype = (int32_t)call->grad_dtype,
                                     .weight_dtype = (int32_t)problem->dtype,
                                     .emit = problem->emit,
                                     .round = problem->stochastic_rounding && problem->dtype != RF_FLOAT32,
                                     .weighted = call->sample_weights != NULL,
                                     .by_frequency = call->scale_grad_by_freq,
                                     .emit_args = problem->emit_args};
}

/* Whether the small path pays: a feature there is a block's work, and two paths are more launches than one. */
static bool small_pays(const rf__backward_problem *problem, const rf__backward_features *described) {
    const int64_t lookups = problem->call.lookups / described->count;
    if (problem->listed != NULL || described->rows >= INT32_MAX || lookups > MANY_LOOKUPS) return false;
    if (described->count >= MANY_FEATURES) return true;
    bool all_small = lookups <= FEW_LOOKUPS;
    for (int64_t f = 0; f < problem->call.n_features; f++)
        all_small &= described->features[f].pooling < 0 || described->features[f].rows <= RF_SMALL_MOST_ROWS;
    return all_small;
}

/* What a run holds. */
typedef struct held {
    rf__cuda_store store;
    rf__backward_features described;
    rf__backward_small_plan plan;
    rf__cuda_block features, description, workspace;
} held;

static void release(held *run) {
    rf__cuda_room_free(&run->store, &run->workspace);
    rf__cuda_block_free(&run->store, &run->description);
    rf__cuda_block_free(&run->store, &run->features);
    rf__backward_small_free(&run->plan);
    free(run->described.features);
}

/* Descriptions to the device, the workspace, the launches. */
static rf_status run_paths(const char *operator_name, const rf__backward_problem *problem,
                           const rf__backward_small_call *small, held *run) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = run->store.device;
    const bool general = run->described.count > 0;
    rf__backward_layout sizes = {.bytes = ALIGNMENT + rf__round_up(run->plan.workspace_bytes, ALIGNMENT)};
    if (general) {
        RF_CHECK(
            rf__backward_layout_of(operator_name, problem, &run->described, device, sizes.bytes, &sizes));
        RF_CHECK(rf__cuda_block_shared(&run->store, run->described.features,
                                       (size_t)problem->call.n_features * sizeof(rf_backward_feature),
                                       &run->features));
    }
    if (run->plan.n_features > 0)
        RF_CHECK(rf__cuda_block_shared(&run->store, run->plan.description,
                                       (size_t)run->plan.description_bytes, &run->description));
    RF_CHECK(rf__cuda_room_new(&run->store, (size_t)sizes.bytes, &run->workspace));
    const uint64_t workspace = run->workspace.memory;
    RF_CHECK(rf__cuda_enter(device));
    RF_TRY(rf__backward_small_launch(small, &run->plan, run->description.memory, workspace + ALIGNMENT, false,
                                     run->store.stream));
    if (general)
        RF_TRY(rf__backward_general_launch(problem, &sizes, &run->store, workspace, run->features.memory));
out:
    return rf__cuda_leave_with(status);
}

static rf_status nothing_listed(const rf__backward_problem *problem) {
    int64_t *rows;
    void *values;
    if (problem->listed == NULL) return RF_OK;
    return problem->listed->allocate(problem->listed->context, 0, &rows, &values);
}

rf_status rf__backward_run(const char *operator_name, rf__backward_problem *problem,
                           const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    const rf_fused_backward_params *call = &problem->call;
    held run = {0};
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_store_of(device, stream->stream, allocator, &run.store));
    RF__REFUSE_IF(run.store.resident && problem->listed != NULL, RF_ERR_UNSUPPORTED, "%s",
                  "a sparse gradient's size is not known while a CUDA graph is captured; use dense "
                  "gradients (sparse=False) or an optimizer of recfuse.optim");
    RF_TRY(rf__backward_describe(problem, &run.described));
    if (run.described.count == 0 || call->bags == 0 || call->lookups == 0 || run.described.dim == 0) {
        status = nothing_listed(problem);
        goto out;
    }
    const rf__backward_small_call small = small_call(problem, device);
    if (small_pays(problem, &run.described)) {
        RF_TRY(rf__backward_small_take(&small, run.described.features, &run.plan));
        rf__backward_summarise(problem, &run.described);
    }
    RF_TRY(run_paths(operator_name, problem, &small, &run));
out:
    release(&run);
    return status;
}
