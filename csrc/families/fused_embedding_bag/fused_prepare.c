/* The partition of a call: a mapping that many batches share, the caller's, or the table by which a kernel
 * maps. */
#include "families/fused_embedding_bag/fused_prepare.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A mapping on the device; its upload is all rows. */
typedef struct mapping_data {
    rf__fused_mapping head;
    rf__fused_staged staged;
    double staged_share;
} mapping_data;

/* The share of a batch's bags that staged tables have. */
static double staged_share(const rf__fused_mapping *mapping, int64_t rows) {
    const rf__fused_staged staged = rf__fused_staged_of(mapping, rows);
    const rf_fused_task *tasks = (const rf_fused_task *)(mapping + rf__fused_rows(mapping) + 1);
    int64_t bags = 0;
    for (int64_t i = 0; i < (int64_t)staged.depth * staged.lists; i++)
        if (tasks[i].feature >= 0) bags += tasks[i].last_bag - tasks[i].first_bag;
    return bags == 0 ? 0 : (double)bags / ((double)mapping->bags * mapping->n_features);
}

static rf_status mapping_describe(const rf__fused_mapping *mapping, int64_t rows,
                                  rf__description *description) {
    mapping_data *data = malloc(sizeof *data);
    RF_FAIL_IF(data == NULL, RF_ERR_MEMORY, "no memory for a mapping");
    *data = (mapping_data){*mapping, rf__fused_staged_of(mapping, rows), staged_share(mapping, rows)};
    *description = (rf__description){
        .data = data, .free_data = free, .upload = mapping, .upload_bytes = rows * (int64_t)sizeof *mapping};
    return RF_OK;
}

/* The key of a mapping by expected lookups; without padding. */
typedef struct batch_key {
    int64_t bags, may_stage;
} batch_key;
typedef struct batch_problem {
    const rf__fused_table *table;
    batch_key batch;
} batch_problem;

static rf_status batch_make(const rf__gpu *gpu, const void *of, rf__description *description) {
    const batch_problem *problem = of;
    const rf__fused_batch batch = {.bags = problem->batch.bags, .may_stage = problem->batch.may_stage != 0};
    rf__fused_mapping *mapping = NULL;
    int64_t rows = 0;
    RF_CHECK(rf__fused_map(&problem->table->described->input, &batch, gpu->sms, RF__FUSED_BLOCKS, &mapping,
                           &rows));
    const rf_status status = mapping_describe(mapping, rows, description);
    if (status != RF_OK) free(mapping);
    description->frees_upload = status == RF_OK;
    return status;
}

static rf_status batch_acquire(const rf__cuda_store *store, const rf__fused_table *table, int64_t bags,
                               bool may_stage, rf__fused_prepared *prepared) {
    const batch_problem problem = {table, {rf__description_round(bags), may_stage}};
    const rf__description_key key = {.make = batch_make,
                                     .parent = prepared->features.number,
                                     .parts = {{.data = &problem.batch, .bytes = sizeof problem.batch}}};
    return rf__description_acquire(store, &key, &problem, &prepared->partition);
}

/* The caller's mapping, only on the host. */
static rf_status callers_make(const rf__gpu *gpu, const void *of, rf__description *description) {
    (void)gpu;
    const rf_fused_plan *plan = of;
    return mapping_describe((const rf__fused_mapping *)plan->mapping, plan->mapping_rows, description);
}

/* Checks that the caller's mapping is for this call. */
static rf_status callers_mapping_check(const rf__cuda_device *device, const rf__fused_table *table,
                                       const rf_fused_embedding_bag_params *params,
                                       const rf_fused_plan *plan) {
    const rf__fused_mapping *head = (const rf__fused_mapping *)plan->mapping;
    RF_FAIL_IF(plan->mapping_rows < 1 || head->n_tasks < 0 || head->n_tiles < 0 || head->n_groups < 0 ||
                   head->partials < 0 || !rf__fused_whole(head, plan->mapping_rows) ||
                   head->bags != params->bags || head->n_features != params->n_features ||
                   head->signature != table->described->input.signature,
               RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: mapping is not for %" PRId64 " features of %" PRId64
               " bags with these schedules. Create it again with the same features, schedules and offsets.",
               params->n_features, params->bags);
    const rf__fused_staged staged = rf__fused_staged_of(head, plan->mapping_rows);
    RF_FAIL_IF(staged.depth > 0 && !rf__fused_can_stage(&device->gpu, params->lookups), RF_ERR_VALUE,
               "recfuse.fused_embedding_bag: mapping has staged tables, which GPU %d cannot for %" PRId64
               " lookups. Make it with stage=False.",
               (int)device->ordinal, params->lookups);
    return rf__fused_mapping_check(&table->described->input, head, plan->mapping_rows);
}

/* Copied to the device for this call only; a graph's copy stays, and is found by the first row, which has a
 * checksum. */
static rf_status callers_acquire(const rf__cuda_store *store, const rf_fused_plan *plan,
                                 rf__fused_prepared *prepared) {
    const rf__description_key key = {.make = callers_make,
                                     .parent = prepared->features.number,
                                     .parts = {{.data = plan->mapping, .bytes = sizeof(rf__fused_mapping)}}};
    if (store->resident) return rf__description_acquire(store, &key, plan, &prepared->partition);
    return rf__description_make_uncached(store, callers_make, plan, &prepared->partition);
}

static rf_status map_table_make(const rf__gpu *gpu, const void *of, rf__description *description) {
    (void)gpu;
    const rf__fused_table *table = of;
    void *upload = NULL;
    int64_t bytes = 0;
    rf__fused_map_table *map_table = calloc(1, sizeof *map_table);
    RF_FAIL_IF(map_table == NULL, RF_ERR_MEMORY, "no memory to map features");
    const rf_status status =
        rf__fused_map_table_fill(table->described->features, table->described->input.n_features,
                                 &table->described->classes, map_table, &upload, &bytes);
    if (status != RF_OK) {
        free(map_table);
        return status;
    }
    *description = (rf__description){
        .data = map_table, .free_data = free, .upload = upload, .upload_bytes = bytes, .frees_upload = true};
    return RF_OK;
}

static rf_status map_table_acquire(const rf__cuda_store *store, const rf__fused_table *table,
                                   rf__fused_prepared *prepared) {
    const rf__description_key key = {.make = map_table_make, .parent = prepared->features.number};
    RF_CHECK(rf__description_acquire(store, &key, table, &prepared->partition));
    prepared->problem.map_table = prepared->partition.data;
    return RF_OK;
}

/* Finds or creates a mapping before the launch. */
static rf_status mapping_acquire(const rf__cuda_store *store, const rf__fused_table *table,
                                 const rf_fused_embedding_bag_params *params, const rf_fused_plan *plan,
                                 rf__fused_prepared *prepared) {
    rf__fused_problem *problem = &prepared->problem;
    if (!problem->callers_mapping) {
        RF_CHECK(batch_acquire(store, table, params->bags,
                               rf__fused_can_stage(&store->device->gpu, params->lookups), prepared));
    } else {
        RF_CHECK(callers_mapping_check(store->device, table, params, plan));
        if (plan->mapping_on_device == NULL) RF_CHECK(callers_acquire(store, plan, prepared));
    }
    if (prepared->partition.node != NULL) {
        const mapping_data *data = prepared->partition.data;
        problem->mapping = data->head;
        problem->staged = data->staged;
        problem->staged_share = data->staged_share;
        return RF_OK;
    }
    const rf__fused_mapping *head = (const rf__fused_mapping *)plan->mapping;
    problem->mapping = *head;
    problem->staged = rf__fused_staged_of(head, plan->mapping_rows);
    problem->staged_share = staged_share(head, plan->mapping_rows);
    prepared->uploads[RF__FUSED_UPLOAD_PARTITION] = (uintptr_t)plan->mapping_on_device;
    return RF_OK;
}

rf_status rf__fused_prepare_features(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                     const rf_fused_plan *plan, rf__fused_prepared *prepared) {
    memset(prepared, 0, sizeof *prepared);
    RF_CHECK(
        rf__fused_table_acquire(store, params, plan != NULL ? plan->schedules : NULL, &prepared->features));
    const rf__fused_table *table = prepared->features.data;
    prepared->problem = (rf__fused_problem){.params = params,
                                            .classes = table->classes,
                                            .traffic = &table->traffic,
                                            .wide_rows = table->wide_rows,
                                            .warps = plan != NULL ? plan->warps : 0};
    prepared->uploads[RF__FUSED_UPLOAD_FEATURES] = prepared->features.upload;
    return RF_OK;
}

rf_status rf__fused_prepare(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                            const rf_fused_plan *plan, rf__fused_prepared *prepared) {
    RF_CHECK(rf__fused_prepare_features(store, params, plan, prepared));
    const rf__fused_table *table = prepared->features.data;
    prepared->problem.callers_mapping = plan != NULL && plan->mapping != NULL;
    if (prepared->problem.callers_mapping || table->all_expected)
        RF_CHECK(mapping_acquire(store, table, params, plan, prepared));
    else
        RF_CHECK(map_table_acquire(store, table, prepared));
    if (prepared->partition.node != NULL)
        prepared->uploads[RF__FUSED_UPLOAD_PARTITION] = prepared->partition.upload;
    return RF_OK;
}

void rf__fused_release(rf__fused_prepared *prepared) {
    rf__description_release(&prepared->partition);
    rf__description_release(&prepared->features);
    memset(prepared, 0, sizeof *prepared);
}
