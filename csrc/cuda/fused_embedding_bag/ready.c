/* What a launch of a fused call needs: its kernels, and the mapping that it works by. See call.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/ready.h"
#include "base/validate.h"

/* A number of bags that many batch sizes share: at most a sixteenth more. */
static int64_t rounded(int64_t bags) {
    int64_t step = 1;
    while (bags / step >= 32) step *= 2;
    return (bags + step - 1) / step * step;
}

/* The mapping of a call that knows what to expect of its bags. */
static rf_status map_bags(rf__fused_call *call, int64_t bags, bool may_stage, rf__fused_mapped **mapped) {
    rf_status status = RF_OK;
    rf__fused_mapping *mapping = NULL;
    int64_t rows = 0;
    const rf__fused_batch batch = {.bags = rounded(bags), .may_stage = may_stage};
    *mapped = rf__fused_mapped_find(call, batch.bags, may_stage, NULL);
    if (*mapped != NULL) return RF_OK;
    RF_TRY(rf__fused_map(&call->described->what, &batch, call->store.device->gpu.sms, RF__FUSED_BLOCKS,
                         &mapping, &rows));
    RF_TRY(rf__fused_mapped_add(call, batch.bags, may_stage, mapping, rows, mapped));
out:
    free(mapping);
    return status;
}

/* Whether the caller's mapping is for this call. */
static rf_status callers_mapping_check(const rf__fused_call *call,
                                       const rf_fused_embedding_bag_params *params,
                                       const rf_fused_plan *plan) {
    const rf__fused_mapping *head = (const rf__fused_mapping *)plan->mapping;
    RF_FAIL_IF(plan->mapping_rows < 1 || head->n_tasks < 0 || head->n_tiles < 0 || head->n_groups < 0 ||
                   head->partials < 0 || !rf__fused_whole(head, plan->mapping_rows) ||
                   head->bags != params->bags || head->n_features != params->n_features ||
                   head->signature != call->described->what.signature,
               RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: mapping is not for %" PRId64 " features of %" PRId64
               " bags with these schedules; create it again with the same features, schedules and "
               "offsets",
               params->n_features, params->bags);
    const rf__fused_staged staged = rf__fused_staged_of(head, plan->mapping_rows);
    RF_FAIL_IF(staged.depth > 0 && !rf__fused_can_stage(call->store.device, params->lookups), RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: mapping has staged tables, which GPU %d cannot for "
               "%" PRId64 " lookups; make it with stage=False",
               (int)call->store.device->ordinal, params->lookups);
    return rf__fused_mapping_check(&call->described->what, head, plan->mapping_rows);
}

/* The mapping of a launch, if it is made before. */
static rf_status mapping_find(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                              const rf_fused_plan *plan, rf__fused_ready *ready) {
    const rf__fused_mapping *head = plan != NULL ? (const rf__fused_mapping *)plan->mapping : NULL;
    if (head == NULL) {
        RF_CHECK(map_bags(call, params->bags, rf__fused_can_stage(call->store.device, params->lookups),
                          &ready->mapped));
    } else {
        RF_CHECK(callers_mapping_check(call, params, plan));
        if (plan->mapping_on_device == NULL)
            RF_CHECK(rf__fused_mapped_add(call, -1, false, head, plan->mapping_rows, &ready->mapped));
    }
    if (ready->mapped != NULL) {
        ready->mapping = ready->mapped->head;
        ready->staged = ready->mapped->staged;
        ready->mapping_on_device = ready->mapped->block.memory;
    } else {
        ready->mapping = *head;
        ready->staged = rf__fused_staged_of(head, plan->mapping_rows);
        ready->mapping_on_device = (uintptr_t)plan->mapping_on_device;
    }
    return RF_OK;
}

/* The mapping is made on the device, from a table that the call has from then on. */
static rf_status map_on_device(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               rf__fused_device_map *map) {
    rf__fused_map_table *own = NULL;
    rf__cuda_lock(call->store.device);
    const rf__fused_map_table *table = call->map_table;
    rf__cuda_unlock(call->store.device);
    if (table == NULL) {
        RF_CHECK(rf__fused_map_table_new(&call->store, call->described->features, call->key.n_features,
                                         &call->described->classes, &own));
        rf__cuda_lock(call->store.device);
        if (call->map_table == NULL) {
            call->map_table = own;
            own = NULL;
        }
        table = call->map_table;
        rf__cuda_unlock(call->store.device);
        rf__fused_map_table_free(&call->store, own);
    }
    return rf__fused_map_prepare(call->store.device, table, params, map);
}

/* Partial sums of tasks that share bags, then a counter for each group of them. */
int64_t rf__fused_workspace(const rf__fused_mapping *mapping) {
    return RF__FUSED_PARTIAL_BYTES * (int64_t)mapping->partials +
           (int64_t)sizeof(uint32_t) * mapping->n_groups;
}

/* The kernel of a variant, found without a look at all of its classes where it was used before. */
static rf_status kernel_find(rf__fused_call *call, const rf__fused_variant *variant,
                             const rf__kernel **kernel) {
    enum { SLOTS = sizeof call->kernels / sizeof call->kernels[0] };
    const rf__cuda_device *device = call->store.device;
    *kernel = NULL;
    rf__cuda_lock(device);
    for (uint32_t i = 0; i < SLOTS && i < call->n_kernels; i++) {
        const rf__fused_kernel_slot *slot = &call->kernels[i];
        if (memcmp(&slot->variant, variant, sizeof *variant) == 0) *kernel = slot->kernel;
    }
    rf__cuda_unlock(device);
    if (*kernel != NULL) return RF_OK;
    RF_CHECK(rf__fused_kernel(device, variant, &call->described->classes, kernel));
    rf__cuda_lock(device);
    call->kernels[call->n_kernels % SLOTS] = (rf__fused_kernel_slot){*variant, *kernel};
    call->n_kernels = call->n_kernels + 1 < 2 * SLOTS ? call->n_kernels + 1 : SLOTS;
    rf__cuda_unlock(device);
    return RF_OK;
}

static rf__fused_variant variant_of(const rf__fused_call *call, const rf_fused_embedding_bag_params *params) {
    return (rf__fused_variant){.index_type = (int32_t)params->index_type,
                               .offset_type = (int32_t)params->offset_type,
                               .output_dtype = (int32_t)params->output_dtype,
                               .wide_positions =
                                   params->lookups > INT32_MAX / 2, /* lanes count beyond bags */
                               .wide_rows = call->wide_rows,
                               .weighted = params->sample_weights != NULL,
                               .check = params->check_bounds};
}

void rf__fused_release(rf__fused_ready *ready) {
    if (ready->call != NULL) rf__fused_call_release(ready->call, ready->mapped);
    memset(ready, 0, sizeof *ready);
}

rf_status rf__fused_check_rows(const rf__fused_ready *ready, const rf_fused_embedding_bag_params *params,
                               const int64_t *columns) {
    rf__fused_call *call = ready->call;
    const size_t bytes = (size_t)params->n_buffers * sizeof *columns;
    if (call == NULL) return rf__check_fused_rows(params, columns);
    rf__cuda_lock(call->store.device);
    const bool checked = call->rows_checked && memcmp(call->columns, columns, bytes) == 0;
    rf__cuda_unlock(call->store.device);
    if (checked) return RF_OK;
    RF_CHECK(rf__check_fused_rows(params, columns));
    rf__cuda_lock(call->store.device);
    memcpy(call->columns, columns, bytes);
    call->rows_checked = true;
    rf__cuda_unlock(call->store.device);
    return RF_OK;
}

rf_status rf__fused_prepare(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                            const rf_fused_plan *plan, rf__fused_ready *ready) {
    const bool callers_mapping = plan != NULL && plan->mapping != NULL;
    memset(ready, 0, sizeof *ready);
    RF_CHECK(rf__fused_call_acquire(store, params, plan, &ready->call));
    rf__fused_call *call = ready->call;
    rf__fused_variant variant = variant_of(call, params);
    variant.callers_mapping = callers_mapping;
    rf__fused_occupancy(store->device, plan != NULL ? plan->warps : 0, &variant, &call->described->classes);
    if (callers_mapping || call->all_expected) {
        RF_CHECK(mapping_find(call, params, plan, ready));
    } else {
        RF_CHECK(map_on_device(call, params, &ready->map));
        ready->mapping.n_tasks = ready->map.most_tasks;
    }
    if (ready->staged.depth > 0) {
        variant.staged = 1;
        RF_CHECK(kernel_find(call, &variant, &ready->staged_kernel));
        variant.staged = 0;
        rf__fused_with_staged(&variant, &call->described->classes);
    }
    if (ready->mapping.n_tasks > 0) { /* else all tables are staged */
        RF_CHECK(kernel_find(call, &variant, &ready->kernel));
        ready->shared_bytes =
            rf__fused_shared_bytes(store->device, &variant, &call->described->classes, ready->kernel);
    }
    ready->features = call->features.memory;
    ready->workspace_bytes = rf__fused_workspace(&ready->mapping) + ready->map.workspace_bytes;
    return RF_OK;
}

rf_status rf__fused_prepare_timed(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                  const rf_fused_plan *plan, const rf__fused_classes *classes,
                                  rf__fused_ready *ready) {
    memset(ready, 0, sizeof *ready);
    RF_CHECK(rf__fused_call_acquire(store, params, plan, &ready->call));
    rf__fused_variant variant = variant_of(ready->call, params);
    variant.timed = true;
    rf__fused_occupancy(store->device, plan->warps, &variant, classes);
    ready->features = ready->call->features.memory;
    RF_CHECK(rf__fused_kernel(store->device, &variant, classes, &ready->kernel));
    ready->shared_bytes = rf__fused_shared_bytes(store->device, &variant, classes, ready->kernel);
    return RF_OK;
}
