/* Descriptions of fused calls: added, found, dropped. See call.h. */
#include "cuda/fused_embedding_bag/call.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/validate.h"

enum { MOST_CALLS = 128 }; /* of a device, without resident ones */
static const int64_t MOST_MAPPED_BYTES = INT64_C(64) << 20; /* of their mappings on the device */

/* The calls of one device; those used last come first. */
typedef struct call_lists {
    rf__fused_call *calls, *resident;
    int64_t mapped_bytes; /* of mappings in the lists of `calls` */
    uint64_t clock;
} call_lists;

/* Each under its device's lock. A child of a process with a device has no CUDA and never comes here. */
static call_lists devices[RF__CUDA_MOST_DEVICES];

static call_lists *lists_of(const rf__cuda_store *store) { return &devices[store->device->ordinal]; }
static rf__fused_call **list_of(const rf__cuda_store *store) {
    return store->resident ? &lists_of(store)->resident : &lists_of(store)->calls;
}

/* All but pointers to more. */
static rf__fused_call_key key_of(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params) {
    const uint64_t address = (uintptr_t)params->output | 16;
    return (rf__fused_call_key){.stream_id = store->stream_id,
                                .allocate = (uintptr_t)store->allocator.allocate,
                                .n_features = params->n_features,
                                .n_buffers = params->n_buffers,
                                .output_dim = params->output_dim,
                                .output_stride = params->output_stride,
                                .output_alignment = (int64_t)(address & -address),
                                .output_dtype = (int32_t)params->output_dtype,
                                .weighted = params->sample_weights != NULL};
}

/* Field by field: there is padding. */
static bool same_buffers(const rf__fused_call *call, const rf_fused_embedding_bag_params *params) {
    for (int64_t i = 0; i < call->key.n_buffers; i++) {
        const rf_buffer *was = &call->buffers[i], *is = &params->buffers[i];
        if (was->data != is->data || was->numel != is->numel || was->dtype != is->dtype) return false;
    }
    return true;
}

static bool is_for(const rf__fused_call *call, const rf__fused_call_key *key,
                   const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules) {
    const size_t n = (size_t)params->n_features;
    return memcmp(&call->key, key, sizeof *key) == 0 && (call->schedules == NULL) == (schedules == NULL) &&
           same_buffers(call, params) &&
           memcmp(call->given, params->features, n * sizeof *params->features) == 0 &&
           (schedules == NULL || memcmp(call->schedules, schedules, n * sizeof *schedules) == 0);
}

/* These free a chain; NULL is fine. */
static void mapped_free(rf__fused_mapped *mapped) {
    for (rf__fused_mapped *next; mapped != NULL; mapped = next) {
        next = mapped->next;
        rf__cuda_block_free(&mapped->store, &mapped->block);
        free(mapped);
    }
}

static void call_free(rf__fused_call *call) {
    for (rf__fused_call *next; call != NULL; call = next) {
        next = call->next;
        mapped_free(call->mapped);
        rf__fused_map_table_free(&call->store, call->map_table);
        rf__cuda_block_free(&call->store, &call->features);
        free(call->described);
        free(call->columns);
        free(call->buffers);
        free(call->schedules);
        free(call->given);
        free(call);
    }
}

static void *copy_of(const void *from, size_t bytes) {
    void *to = malloc(bytes > 0 ? bytes : 1);
    if (to != NULL && bytes > 0) memcpy(to, from, bytes);
    return to;
}

static int32_t shape_code(const rf__fused_geometry *shape) {
    return rf_fused_shape_code(shape->dtype, shape->align, shape->store, shape->lanes, shape->vectors,
                               shape->columns == shape->lanes, shape->pooling, shape->is_padded);
}

/* Writes what kernels read of features, and puts it on the device. */
static rf_status features_upload(rf__fused_call *call, const rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    const size_t bytes = (size_t)call->key.n_features * sizeof(rf_fused_descriptor);
    rf_fused_descriptor *table = calloc(1, bytes + 1);
    RF_FAIL_IF(table == NULL, RF_ERR_MEMORY, "no memory for %" PRId64 " features", call->key.n_features);
    for (int64_t f = 0; f < call->key.n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const rf_buffer *buffer = &params->buffers[feature->buffer];
        const int64_t element = rf__dtype_bytes(buffer->dtype);
        table[f] = (rf_fused_descriptor){
            .weight = (uintptr_t)buffer->data + (uint64_t)(feature->weight_offset * element),
            .rows = feature->rows,
            .padding_idx = feature->padding_idx,
            .output_offset = feature->output_column * rf__dtype_bytes(params->output_dtype),
            .pitch = (uint32_t)(feature->dim * element),
            .columns = call->described->features[f].shape.columns,
            .pooling = (int32_t)feature->pooling,
            .shape = shape_code(&call->described->features[f].shape)};
        call->wide_rows |= feature->rows > UINT32_MAX;
    }
    RF_TRY(rf__cuda_block_new(&call->store, table, bytes, true, &call->features));
out:
    free(table);
    return status;
}

static rf_status call_new(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                          const rf_fused_schedule *schedules, rf__fused_call **new_call) {
    rf_status status = RF_OK;
    const size_t n = (size_t)params->n_features;
    rf__fused_call *call = calloc(1, sizeof *call);
    RF_FAIL_IF(call == NULL, RF_ERR_MEMORY, "no memory for a call of %zu features", n);
    RF_TRY(rf__fused_describe(params, schedules, &call->described));
    call->store = *store;
    call->key = key_of(store, params);
    call->given = copy_of(params->features, n * sizeof *params->features);
    call->buffers = copy_of(params->buffers, (size_t)params->n_buffers * sizeof *params->buffers);
    call->columns = calloc((size_t)params->n_buffers + 1, sizeof *call->columns);
    if (schedules != NULL) call->schedules = copy_of(schedules, n * sizeof *schedules);
    if (call->given == NULL || call->buffers == NULL || call->columns == NULL ||
        (schedules != NULL && call->schedules == NULL)) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a call of %zu features", n);
        goto out;
    }
    call->all_expected = schedules != NULL;
    for (size_t f = 0; f < n && schedules != NULL; f++) call->all_expected &= schedules[f].expected != 0;
    RF_TRY(features_upload(call, params));
out:
    if (status != RF_OK) {
        call_free(call);
        call = NULL;
    }
    *new_call = call;
    return status;
}

/* The call for these, now the first of its list and with one user more; NULL: there is none. Under the lock. */
static rf__fused_call *call_find(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_schedule *schedules) {
    const rf__fused_call_key key = key_of(store, params);
    rf__fused_call **first = list_of(store);
    for (rf__fused_call **at = first; *at != NULL; at = &(*at)->next) {
        rf__fused_call *found = *at;
        if (!is_for(found, &key, params, schedules)) continue;
        *at = found->next;
        found->next = *first;
        *first = found;
        found->users++;
        return found;
    }
    return NULL;
}

/* Takes a call out of the list, and puts it in front of `unused` if nobody uses it. Under the lock. */
static void call_drop(call_lists *lists, rf__fused_call **at, rf__fused_call **unused) {
    rf__fused_call *old = *at;
    *at = old->next;
    old->next = NULL;
    old->dropped = true;
    for (rf__fused_mapped *mapped = old->mapped; mapped != NULL; mapped = mapped->next)
        lists->mapped_bytes -= mapped->bytes;
    if (old->users > 0) return;
    old->next = *unused;
    *unused = old;
}

void rf__fused_forget(const rf__cuda_store *store) {
    call_lists *lists = lists_of(store);
    rf__fused_call *unused = NULL, **at = &lists->calls;
    rf__cuda_lock(store->device);
    while (*at != NULL) {
        if ((*at)->store.stream_id == store->stream_id && (*at)->store.allocator.allocate == NULL) {
            call_drop(lists, at, &unused);
        } else {
            at = &(*at)->next;
        }
    }
    rf__cuda_unlock(store->device);
    call_free(unused);
}

rf_status rf__fused_call_acquire(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_plan *plan, rf__fused_call **call) {
    const rf_fused_schedule *schedules = plan != NULL ? plan->schedules : NULL;
    rf__fused_call *own = NULL, *unused = NULL;
    rf__cuda_lock(store->device);
    *call = call_find(store, params, schedules);
    rf__cuda_unlock(store->device);
    if (*call != NULL) return RF_OK;
    RF_CHECK(call_new(store, params, schedules, &own));
    rf__cuda_lock(store->device);
    *call = call_find(store, params, schedules);
    if (*call == NULL) {
        rf__fused_call **first = list_of(store);
        own->next = *first;
        *first = *call = own;
        own->users = 1;
        own = NULL;
        for (int32_t i = 0; i < MOST_CALLS && *first != NULL; i++) first = &(*first)->next;
        while (!store->resident && *first != NULL) call_drop(lists_of(store), first, &unused);
    }
    rf__cuda_unlock(store->device);
    call_free(unused);
    call_free(own);
    return RF_OK;
}

rf__fused_mapped *rf__fused_mapped_find(rf__fused_call *call, int64_t bags, bool may_stage,
                                        const rf__fused_mapping *head) {
    call_lists *lists = lists_of(&call->store);
    rf__cuda_lock(call->store.device);
    rf__fused_mapped *mapped = call->mapped;
    while (mapped != NULL && (mapped->bags != bags || mapped->may_stage != may_stage ||
                              (head != NULL && memcmp(&mapped->head, head, sizeof *head) != 0)))
        mapped = mapped->next;
    if (mapped != NULL) {
        mapped->users++;
        mapped->used = ++lists->clock;
    }
    rf__cuda_unlock(call->store.device);
    return mapped;
}

/* Takes the mapping that is unused for longest out of its call's list; NULL: all that there are are in use, which the
 * one is that was added. Under the lock. */
static rf__fused_mapped *mapped_drop(call_lists *lists) {
    rf__fused_mapped **oldest = NULL;
    for (rf__fused_call *call = lists->calls; call != NULL; call = call->next) {
        for (rf__fused_mapped **at = &call->mapped; *at != NULL; at = &(*at)->next)
            if ((*at)->users == 0 && (oldest == NULL || (*at)->used < (*oldest)->used)) oldest = at;
    }
    if (oldest == NULL) return NULL;
    rf__fused_mapped *old = *oldest;
    *oldest = old->next;
    lists->mapped_bytes -= old->bytes;
    return old;
}

rf_status rf__fused_mapped_add(rf__fused_call *call, int64_t bags, bool may_stage,
                               const rf__fused_mapping *mapping, int64_t rows, rf__fused_mapped **mapped) {
    call_lists *lists = lists_of(&call->store);
    const rf__fused_mapping *head = bags < 0 ? mapping : NULL;
    const bool alone = bags < 0 && !call->store.resident;
    rf__fused_mapped *unused = NULL;
    *mapped = bags < 0 && !alone ? rf__fused_mapped_find(call, bags, may_stage, head) : NULL;
    if (*mapped != NULL) return RF_OK;
    rf__fused_mapped *own = calloc(1, sizeof *own);
    RF_FAIL_IF(own == NULL, RF_ERR_MEMORY, "no memory for a mapping");
    *own = (rf__fused_mapped){.store = call->store,
                              .head = *mapping,
                              .staged = rf__fused_staged_of(mapping, rows),
                              .bags = bags,
                              .may_stage = may_stage,
                              .alone = alone,
                              .users = 1,
                              .bytes = rows * (int64_t)sizeof *mapping};
    const rf_status status =
        rf__cuda_block_new(&own->store, mapping, (size_t)own->bytes, !alone, &own->block);
    if (status == RF_OK && !alone) *mapped = rf__fused_mapped_find(call, bags, may_stage, head);
    if (status != RF_OK || *mapped != NULL) {
        mapped_free(own);
        return status;
    }
    *mapped = own;
    if (alone) return RF_OK;
    rf__cuda_lock(call->store.device);
    own->used = ++lists->clock;
    own->next = call->mapped;
    call->mapped = own;
    if (!call->store.resident && !call->dropped) {
        lists->mapped_bytes += own->bytes;
        while (lists->mapped_bytes > MOST_MAPPED_BYTES) {
            rf__fused_mapped *old = mapped_drop(lists);
            if (old == NULL) break;
            old->next = unused;
            unused = old;
        }
    }
    rf__cuda_unlock(call->store.device);
    mapped_free(unused);
    return RF_OK;
}

void rf__fused_call_release(rf__fused_call *call, rf__fused_mapped *mapped) {
    bool mapped_unused = false;
    rf__cuda_lock(call->store.device);
    if (mapped != NULL) mapped_unused = --mapped->users == 0 && mapped->alone;
    const bool call_unused = --call->users == 0 && call->dropped;
    rf__cuda_unlock(call->store.device);
    if (mapped_unused) mapped_free(mapped);
    if (call_unused) call_free(call);
}
