/* rf_fused_embedding_bag_cuda: the launch of fused_embedding_bag.cu. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/fused.h"
#include "base/validate.h"

/* Comes first, and lets the kernel of the other features begin at once: see staged/staged.cu. */
static rf_status launch_staged(const rf__cuda_device *device, const rf__fused_ready *ready,
                               const rf_fused_args *values, void *stream) {
    rf_fused_args own = *values;
    own.limit = ready->staged.depth;
    own.tasks = ready->mapping_on_device +
                (uint64_t)(rf__fused_rows(&ready->mapping) + 1) * sizeof(rf__fused_mapping);
    const rf__launch_config launch = {.function = ready->staged_kernel->function,
                                      .grid = {(uint32_t)ready->staged.lists},
                                      .block = {RF_FUSED_STAGED_BLOCK + RF_FUSED_STAGED_HELPERS},
                                      .shared_bytes = RF_FUSED_STAGED_SHARED,
                                      .stream = stream};
    return rf__launch(device, &launch, &own);
}

static rf_status launch_others(const rf__cuda_device *device, const rf__fused_ready *ready,
                               const rf_fused_args *values, void *stream) {
    const rf__launch_config launch = {.function = ready->kernel->function,
                                      .grid = {(uint32_t)ready->mapping.n_tasks},
                                      .block = {RF_FUSED_BLOCK},
                                      .shared_bytes = (uint32_t)ready->shared_bytes,
                                      /* Not where its blocks' cycles are counted: waiting would be, too. */
                                      .programmatic = values->cycles == 0 || ready->staged.depth > 0,
                                      .stream = stream};
    return rf__launch(device, &launch, values);
}

static rf__cuda_error_word error_word(const rf__cuda_device *device,
                                      const rf_fused_embedding_bag_params *params) {
    const void *first = params->n_buffers > 0 ? params->buffers[0].data : NULL;
    return rf__cuda_error_word_of(&device->errors, first,
                                  (uint64_t)params->n_features << 32 | (uint64_t)params->output_dim);
}

rf_status rf__fused_pending(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params,
                            void *stream) {
    return rf__cuda_check_word(device, error_word(device, params), stream);
}

/* By which a block guesses its tile while it waits for its task. */
static uint32_t tiles_a_task(const rf__fused_ready *ready) {
    const rf__fused_mapping *mapping = &ready->mapping;
    if (ready->map.kernel != NULL || mapping->n_tiles == 0 || mapping->n_tiles >= mapping->n_tasks) return 0;
    return (uint32_t)((((uint64_t)mapping->n_tiles << 32) + (uint64_t)mapping->n_tasks - 1) /
                      (uint64_t)mapping->n_tasks);
}

rf_status rf__fused_launch(const rf__cuda_device *device, const rf__fused_ready *ready,
                           const rf_fused_embedding_bag_params *params, void *workspace,
                           rf__cu_pointer cycles, void *stream) {
    rf_status status = RF_OK;
    const int64_t index_bytes = params->index_type == RF_INT64 ? 8 : 4;
    const int64_t lead = (int64_t)((uintptr_t)params->indices % (uint64_t)(4 * index_bytes)) / index_bytes;
    const rf__cu_pointer tasks = ready->mapping_on_device + sizeof(rf__fused_mapping);
    const rf__cu_pointer arrived =
        (uintptr_t)workspace + RF__FUSED_PARTIAL_BYTES * (uint64_t)ready->mapping.partials;
    rf_fused_args values = {
        .indices = (uintptr_t)params->indices - (uint64_t)(lead * index_bytes),
        .offsets = (uintptr_t)params->offsets,
        .sample_weights = params->sample_weights == NULL ? 0 : (uintptr_t)(params->sample_weights - lead),
        .output = (uintptr_t)params->output,
        .output_pitch = (uint32_t)(params->output_stride * rf__dtype_bytes(params->output_dtype)),
        .end = lead + params->lookups,
        .lead = (int32_t)lead,
        .bags = (int32_t)params->bags,
        .n_features = (int32_t)params->n_features,
        .limit = ready->map.kernel != NULL ? INT32_MAX : ready->mapping.n_tiles,
        .n_groups = ready->mapping.n_groups,
        .n_partials = ready->mapping.partials,
        .tiles_a_task = tiles_a_task(ready),
        .features = ready->features,
        .tasks = tasks,
        .lanes = tasks + (uint64_t)ready->mapping.n_tasks * sizeof(rf_fused_task),
        .partials = (uintptr_t)workspace,
        .arrived = arrived,
        .cycles = cycles,
        .errors = error_word(device, params).on_device};
    if (ready->map.kernel != NULL) {
        rf__fused_device_mapping mapping;
        RF_TRY(rf__fused_map_launch(device, &ready->map, params, workspace, stream, &mapping));
        values.n_tasks = mapping.n_tasks;
        values.tasks = mapping.tasks;
        values.lanes = mapping.lanes;
    }
    if (ready->mapping.n_groups > 0)
        RF__CUDA_TRY(device->driver->cuMemsetD32Async(arrived, 0, (size_t)ready->mapping.n_groups, stream));
    if (ready->staged.depth > 0) RF_TRY(launch_staged(device, ready, &values, stream));
    if (ready->mapping.n_tasks > 0) RF_TRY(launch_others(device, ready, &values, stream));
out:
    return status;
}

/* What may differ from call to call, also where the rest is found. */
static rf_status check_plan(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan) {
    RF_FAIL_IF(params->output == NULL && params->bags > 0 && params->output_dim > 0, RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: output is NULL");
    if (plan == NULL) return RF_OK;
    RF_FAIL_IF(plan->allocator != NULL &&
                   (plan->allocator->allocate == NULL || plan->allocator->release == NULL),
               RF_ERR_VALUE, "recfuse.fused_embedding_bag: a function of the allocator is NULL");
    return rf__check_fused_warps(plan->warps);
}

/* What a call and the question for its workspace begin with: ready->call is NULL where there is nothing to pool. To be
 * released, also where it fails. */
static rf_status begin(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                       const rf_cuda_stream *stream, const rf__cuda_device **device, rf__fused_ready *ready) {
    rf__cuda_store store;
    memset(ready, 0, sizeof *ready);
    RF_CHECK(rf__check_fused_call(params));
    RF_CHECK(rf__fused_check_limits(params));
    RF_CHECK(check_plan(params, plan));
    RF_CHECK(rf__cuda_device_get(stream->device, device));
    if (params->bags == 0 || params->output_dim == 0) return rf__check_fused_features(params);
    RF_CHECK(rf__cuda_store_of(*device, stream->stream, plan != NULL ? plan->allocator : NULL, &store));
    return rf__fused_prepare(&store, params, plan, ready);
}

rf_status rf_fused_embedding_bag_workspace(const rf_fused_embedding_bag_params *params,
                                           const rf_fused_plan *plan, const rf_cuda_stream *stream,
                                           int64_t *bytes) {
    const rf__cuda_device *device = NULL;
    rf__fused_ready ready;
    const rf_status status = begin(params, plan, stream, &device, &ready);
    *bytes = status == RF_OK ? ready.workspace_bytes : 0;
    rf__fused_release(&ready);
    return status;
}

/* The caller's workspace, if it is one that the kernels can work in. */
static rf_status check_workspace(const void *workspace, int64_t bytes, int64_t needed) {
    enum { ALIGNMENT = 16 };
    if (workspace != NULL && bytes >= needed && (uintptr_t)workspace % ALIGNMENT == 0) return RF_OK;
    return rf__fail(RF_ERR_VALUE,
                    "recfuse.fused_embedding_bag: workspace is %p with %" PRId64 " bytes; must be %" PRId64
                    " bytes of device memory (rf_fused_embedding_bag_workspace), aligned to %d, or NULL with "
                    "an allocator",
                    workspace, bytes, needed, (int)ALIGNMENT);
}

rf_status rf__fused_run_call(const rf_fused_embedding_bag_params *params, const int64_t *columns,
                             const rf_fused_plan *plan, void *workspace, int64_t workspace_bytes,
                             const rf_cuda_stream *stream) {
    const rf_cuda_allocator *allocator = plan != NULL && workspace == NULL ? plan->allocator : NULL;
    const rf__cuda_device *device = NULL;
    rf__fused_ready ready;
    void *block = NULL;
    bool allocated = false;
    rf_status status = begin(params, plan, stream, &device, &ready);
    if (status != RF_OK) goto out;
    if (columns != NULL) RF_TRY(rf__fused_check_rows(&ready, params, columns));
    if (ready.call == NULL) goto out;
    if (ready.workspace_bytes > 0 && allocator != NULL) {
        RF_TRY(allocator->allocate(allocator->context, ready.workspace_bytes, false, stream, &workspace,
                                   &block));
        allocated = true;
    } else if (ready.workspace_bytes > 0) {
        RF_TRY(check_workspace(workspace, workspace_bytes, ready.workspace_bytes));
    }
    if (params->check_bounds) RF_TRY(rf__fused_pending(device, params, stream->stream));
    RF_TRY(rf__cuda_enter(device));
    status = rf__fused_launch(device, &ready, params, workspace, 0, stream->stream);
    rf__cuda_leave();
out:
    if (allocated) allocator->release(allocator->context, block);
    rf__fused_release(&ready);
    return status;
}

rf_status rf_fused_embedding_bag_cuda(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                                      void *workspace, int64_t workspace_bytes,
                                      const rf_cuda_stream *stream) {
    return rf__fused_run_call(params, NULL, plan, workspace, workspace_bytes, stream);
}

rf_status rf_fused_embedding_bag_map(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                                     int32_t sms, bool stage, int32_t **mapping, int64_t *rows) {
    rf_status status = RF_OK;
    rf__fused_described *described = NULL;
    rf__fused_mapping *rows_of_mapping = NULL;
    const rf__fused_batch batch = {.bags = params->bags,
                                   .offsets = params->offsets,
                                   .offset_type = params->offset_type,
                                   .may_stage = stage};
    *mapping = NULL;
    RF_TRY(rf__check_fused_call(params));
    RF_TRY(check_plan(params, plan));
    RF_TRY(rf__fused_describe(params, plan != NULL ? plan->schedules : NULL, &described));
    RF_TRY(rf__fused_map(&described->what, &batch, sms, RF__FUSED_BLOCKS, &rows_of_mapping, rows));
    *mapping = (int32_t *)rows_of_mapping;
out:
    free(described);
    return status;
}

void rf_fused_mapping_free(int32_t *mapping) { free(mapping); }
