/* A backward on a GPU: small tables by the small path, others by the general one. */
#include "base/validate.h"
#include "cuda/fused_embedding_bag/backward/call.h"
#include "cuda/fused_embedding_bag/backward/general.h"

enum {
    ALIGNMENT = 256, /* of parts of the workspace */
    MANY_FEATURES = 64, /* so many fill a GPU, a block each */
    MANY_LOOKUPS = 65536, /* of a feature, about: too many for a block */
    FEW_LOOKUPS = 4096 /* so few that the launches of the general path cost more than one block's work */
};

rf__backward_small_call rf__backward_small_call_of(const rf__backward_problem *problem,
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

rf_status rf__backward_paths(const rf__cuda_device *device, const rf__backward_problem *problem,
                             rf__backward_features *described, rf__backward_small_plan *plan) {
    if (described->count == 0 || !small_pays(problem, described)) return RF_OK;
    const rf__backward_small_call small = rf__backward_small_call_of(problem, device);
    RF_CHECK(rf__backward_small_take(&small, described->features, plan));
    rf__backward_summarise(problem, described);
    return RF_OK;
}

/* The workspace and the launches. */
static rf_status run_paths(const char *operator_name, const rf__backward_problem *problem,
                           const rf__cuda_store *store, const rf__backward_call *call) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = store->device;
    const rf__backward_small_call small = rf__backward_small_call_of(problem, device);
    const int64_t small_bytes = rf__backward_small_workspace(&call->plan, problem->call.lookups);
    const bool general = call->described.count > 0;
    rf__backward_layout sizes = {.bytes = ALIGNMENT + rf__round_up(small_bytes, ALIGNMENT)};
    rf__cuda_block room;
    if (general)
        RF_CHECK(
            rf__backward_layout_of(operator_name, problem, &call->described, device, sizes.bytes, &sizes));
    RF_CHECK(rf__cuda_room_new(store, (size_t)sizes.bytes, &room));
    RF_TRY(rf__cuda_enter(device));
    status = rf__backward_small_launch(&small, &call->plan, call->description.memory, room.memory + ALIGNMENT,
                                       store->stream);
    if (status == RF_OK && general)
        status = rf__backward_general_launch(problem, &sizes, store, room.memory, call->features.memory);
    status = rf__cuda_leave_with(status);
out:
    rf__cuda_room_free(store, &room);
    return status;
}

static rf_status nothing_listed(const rf__backward_problem *problem) {
    for (int32_t i = 0; problem->listed != NULL && i < problem->n_matrices; i++) {
        int64_t *rows;
        void *values;
        RF_CHECK(problem->listed[i]->allocate(problem->listed[i]->context, 0, &rows, &values));
    }
    return RF_OK;
}

rf_status rf__backward_run(const char *operator_name, rf__backward_problem *problem,
                           const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__backward_call *call = NULL;
    rf__cuda_store store;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_store_of(device, stream->stream, allocator, &store));
    RF__REFUSE_IF(store.resident && problem->listed != NULL, RF_ERR_UNSUPPORTED, "%s",
                  "a sparse gradient's size is not known while a CUDA graph is captured; use dense "
                  "gradients (sparse=False) or an optimizer of recfuse.optim");
    if (problem->call.bags == 0 || problem->call.lookups == 0) return nothing_listed(problem);
    rf__backward_place_matrices(problem);
    RF_CHECK(rf__backward_call_acquire(&store, problem, &call));
    if (call->described.dim == 0 || (call->described.count == 0 && call->plan.n_features == 0)) {
        status = nothing_listed(problem);
    } else {
        status = run_paths(operator_name, problem, &store, call);
    }
    rf__backward_call_release(call);
    return status;
}
