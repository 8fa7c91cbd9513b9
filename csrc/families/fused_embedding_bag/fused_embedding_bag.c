/* rf_fused_embedding_bag_cuda, its workspace and its mapping. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/fused.h"

static const char operator_name[] = "fused_embedding_bag";

/* Arguments that no description depends on. */
static rf_status check_plan(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan) {
    RF_FAIL_IF(params->output == NULL && params->bags > 0 && params->output_dim > 0, RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: output is NULL");
    if (plan == NULL) return RF_OK;
    RF_FAIL_IF(plan->allocator != NULL &&
                   (plan->allocator->allocate == NULL || plan->allocator->release == NULL),
               RF_ERR_VALUE, "recfuse.fused_embedding_bag: a function of the allocator is NULL");
    return rf__check_fused_warps(plan->warps);
}

/* Begins a call and the query of its workspace: checks, prepares, lowers. Without work there are neither
 * features nor launches. Requires rf__launches_init before; the caller releases prepared and launches, also
 * on failure. */
static rf_status begin(const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                       const rf_cuda_stream *stream, const rf__cuda_device **device,
                       rf__fused_prepared *prepared, rf__launches *launches) {
    rf__cuda_store store;
    memset(prepared, 0, sizeof *prepared);
    RF_CHECK(rf__check_fused_call(params));
    RF_CHECK(rf__fused_check_limits(params));
    RF_CHECK(check_plan(params, plan));
    RF_CHECK(rf__cuda_device_get(stream->device, device));
    if (params->bags == 0 || params->output_dim == 0) return rf__check_fused_features(params);
    RF_CHECK(rf__cuda_store_of(*device, stream->stream, plan != NULL ? plan->allocator : NULL, &store));
    RF_CHECK(rf__fused_prepare(&store, params, plan, prepared));
    return rf__fused_lower(&(*device)->gpu, &prepared->problem, launches);
}

rf_status rf_fused_embedding_bag_workspace(const rf_fused_embedding_bag_params *params,
                                           const rf_fused_plan *plan, const rf_cuda_stream *stream,
                                           int64_t *bytes) {
    const rf__cuda_device *device = NULL;
    rf__fused_prepared prepared;
    rf__launches launches;
    rf__launches_init(&launches, operator_name);
    const rf_status status = begin(params, plan, stream, &device, &prepared, &launches);
    *bytes = status == RF_OK ? launches.workspace_bytes : 0;
    rf__fused_release(&prepared);
    rf__launches_free(&launches);
    return status;
}

/* Checks that the kernels can use the caller's workspace. */
static rf_status check_workspace(const void *workspace, int64_t bytes, int64_t needed) {
    enum { ALIGNMENT = 16 };
    if (workspace != NULL && bytes >= needed && (uintptr_t)workspace % ALIGNMENT == 0) return RF_OK;
    return rf__fail(RF_ERR_VALUE,
                    "recfuse.fused_embedding_bag: workspace is %p with %" PRId64 " bytes; expected %" PRId64
                    " bytes of device memory (rf_fused_embedding_bag_workspace), aligned to %d, or NULL with "
                    "an allocator",
                    workspace, bytes, needed, (int)ALIGNMENT);
}

rf_status rf__fused_run_call(const rf_fused_embedding_bag_params *params, const int64_t *columns,
                             const rf_fused_plan *plan, void *workspace, int64_t workspace_bytes,
                             const rf_cuda_stream *stream) {
    const rf_cuda_allocator *allocator = plan != NULL && workspace == NULL ? plan->allocator : NULL;
    const rf__cuda_device *device = NULL;
    rf__fused_prepared prepared;
    rf__launches launches;
    rf__launches_init(&launches, operator_name);
    rf_status status = begin(params, plan, stream, &device, &prepared, &launches);
    if (status != RF_OK) goto out;
    const bool has_work = prepared.features.node != NULL;
    if (columns != NULL)
        RF_TRY(has_work ? rf__fused_table_check_rows(device, &prepared.features, params, columns)
                        : rf__check_fused_rows(params, columns));
    if (!has_work) goto out;
    if (allocator != NULL) {
        RF_TRY(rf__launches_run(device, &launches, prepared.uploads, allocator, stream->stream));
        goto out;
    }
    if (launches.workspace_bytes > 0)
        RF_TRY(check_workspace(workspace, workspace_bytes, launches.workspace_bytes));
    if (launches.checks) RF_TRY(rf__launches_pending(device, &launches, stream->stream));
    RF_TRY(rf__launches_run_in(device, &launches, prepared.uploads, (uintptr_t)workspace, stream->stream));
out:
    rf__fused_release(&prepared);
    rf__launches_free(&launches);
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
    RF_TRY(rf__fused_map(&described->input, &batch, sms, RF__FUSED_BLOCKS, &rows_of_mapping, rows));
    *mapping = (int32_t *)rows_of_mapping;
out:
    free(described);
    return status;
}

void rf_fused_mapping_free(int32_t *mapping) { free(mapping); }
