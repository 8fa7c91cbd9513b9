#include "cuda/fused_call.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/upload.h"
#include "validate.h"

enum { MOST_CALLS = 128, MOST_KERNELS = 8 };

typedef struct made_kernel {
    rf__fused_variant variant;
    bool staged;
    const rf__kernel *kernel;
} made_kernel;

struct rf__fused_call {
    rf__fused_call *next; /* used less recently */
    const rf__cuda_device *device;
    int32_t users;  /* launches under way */
    bool captured;  /* a CUDA graph holds its addresses: it stays for ever */
    /* What it was made for. */
    rf_feature *given;            /* [n_features] */
    rf_fused_schedule *schedules; /* [n_features], or NULL */
    rf_buffer *buffers;           /* [n_buffers] */
    int64_t n_features, n_buffers, output_dim, output_stride;
    int32_t output_alignment, output_dtype;
    bool weighted;
    /* What was made of it. */
    rf__fused_described *known; /* features and their classes */
    bool all_expected, wide_rows;
    rf__cu_pointer on_device; /* [n_features] rf__fused_device_feature */
    made_kernel kernels[MOST_KERNELS];
    int32_t n_kernels;
    rf__fused_mapped *mapped;
    rf__fused_map_table *map_table; /* NULL until it is needed; under the lock */
};

/* The lock of the list and of all calls in it. A child of a process with a device has no CUDA and never comes here. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static rf__fused_call *calls; /* under the lock; the one used last comes first */

static int32_t alignment_of(const void *address) {
    const uint64_t bits = (uintptr_t)address | 16;
    return (int32_t)(bits & -bits);
}

/* Field by field: there is padding. */
static bool same_buffers(const rf__fused_call *call, const rf_fused_embedding_bag_params *params) {
    for (int64_t i = 0; i < call->n_buffers; i++) {
        const rf_buffer *one = &call->buffers[i], *other = &params->buffers[i];
        if (one->data != other->data || one->numel != other->numel || one->dtype != other->dtype)
            return false;
    }
    return true;
}

static bool is_for(const rf__fused_call *call, const rf__cuda_device *device,
                   const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules) {
    const size_t n = (size_t)params->n_features;
    return call->device == device && call->n_features == params->n_features &&
           call->n_buffers == params->n_buffers && call->output_dim == params->output_dim &&
           call->output_stride == params->output_stride &&
           call->output_alignment == alignment_of(params->output) &&
           call->output_dtype == (int32_t)params->output_dtype &&
           call->weighted == (params->sample_weights != NULL) &&
           (call->schedules == NULL) == (schedules == NULL) && same_buffers(call, params) &&
           memcmp(call->given, params->features, n * sizeof *params->features) == 0 &&
           (schedules == NULL || memcmp(call->schedules, schedules, n * sizeof *schedules) == 0);
}

static void call_free(rf__fused_call *call) {
    if (call == NULL) return;
    while (call->mapped != NULL) {
        rf__fused_mapped *mapped = call->mapped;
        call->mapped = mapped->next;
        rf__cuda_memory_free(call->device, mapped->on_device);
        free(mapped);
    }
    rf__fused_map_table_free(call->device, call->map_table);
    rf__cuda_memory_free(call->device, call->on_device);
    free(call->known);
    free(call->buffers);
    free(call->schedules);
    free(call->given);
    free(call);
}

static void *copy_of(const void *from, size_t bytes) {
    void *to = malloc(bytes > 0 ? bytes : 1);
    if (to != NULL && bytes > 0) memcpy(to, from, bytes);
    return to;
}

/* Writes what kernels read of features, and puts it on the device. */
static rf_status features_upload(rf__fused_call *call, const rf_fused_embedding_bag_params *params) {
    rf_status status = RF_OK;
    const size_t bytes = (size_t)call->n_features * sizeof(rf__fused_device_feature);
    rf__fused_device_feature *table = calloc(1, bytes + 1);
    if (table == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for %" PRId64 " features", call->n_features);
    for (int64_t f = 0; f < call->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const rf_buffer *buffer = &params->buffers[feature->buffer];
        const int64_t element = rf__dtype_bytes(buffer->dtype);
        table[f] = (rf__fused_device_feature){
            .weight = (uintptr_t)buffer->data + (uint64_t)(feature->weight_offset * element),
            .rows = feature->rows,
            .padding_idx = feature->padding_idx,
            .output_offset = feature->output_column * rf__dtype_bytes(params->output_dtype),
            .pitch = (uint32_t)(feature->dim * element),
            .columns = call->known->features[f].shape.columns,
            .pooling = (int32_t)feature->pooling,
            .shape = rf__fused_shape_code(&call->known->features[f].shape)};
        call->wide_rows |= feature->rows > UINT32_MAX;
    }
    RF_TRY(rf__cuda_upload(call->device, table, bytes, &call->on_device));
out:
    free(table);
    return status;
}

static rf_status call_new(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params,
                          const rf_fused_schedule *schedules, rf__fused_call **made) {
    rf_status status = RF_OK;
    const size_t n = (size_t)params->n_features;
    rf__fused_call *call = calloc(1, sizeof *call);
    if (call == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for a call of %zu features", n);
    RF_TRY(rf__fused_describe(params, schedules, &call->known));
    call->device = device;
    call->n_features = params->n_features;
    call->n_buffers = params->n_buffers;
    call->output_dim = params->output_dim;
    call->output_stride = params->output_stride;
    call->output_alignment = alignment_of(params->output);
    call->output_dtype = (int32_t)params->output_dtype;
    call->weighted = params->sample_weights != NULL;
    call->given = copy_of(params->features, n * sizeof *params->features);
    call->buffers = copy_of(params->buffers, (size_t)params->n_buffers * sizeof *params->buffers);
    if (schedules != NULL) call->schedules = copy_of(schedules, n * sizeof *schedules);
    if (call->given == NULL || call->buffers == NULL || (schedules != NULL && call->schedules == NULL)) {
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
    *made = call;
    return status;
}

/* Frees the call that has been unused for longest, where there are many; whether it did. Under the lock. */
static bool evict(void) {
    int32_t count = 0;
    rf__fused_call **oldest = NULL;
    for (rf__fused_call **at = &calls; *at != NULL; at = &(*at)->next) {
        if ((*at)->captured) continue; /* they take no room from the others */
        count++;
        if ((*at)->users == 0) oldest = at;
    }
    if (count <= MOST_CALLS || oldest == NULL) return false;
    rf__fused_call *gone = *oldest;
    *oldest = gone->next;
    call_free(gone);
    return true;
}

rf_status rf__fused_call_acquire(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_plan *plan, void *stream, rf__fused_call **call) {
    rf_status status = RF_OK;
    const rf_fused_schedule *schedules = plan != NULL ? plan->schedules : NULL;
    rf__fused_call *found = NULL;
    pthread_mutex_lock(&lock);
    for (rf__fused_call **at = &calls; *at != NULL && found == NULL; at = &(*at)->next) {
        if (!is_for(*at, device, params, schedules)) continue;
        found = *at;
        *at = found->next;
        break;
    }
    const bool is_new = found == NULL;
    if (is_new) status = call_new(device, params, schedules, &found);
    if (status == RF_OK) {
        found->next = calls;
        calls = found;
        found->users++;
        found->captured = found->captured || rf__cuda_is_capturing(device, stream);
        while (is_new && evict()) continue; /* more than one, where others were in use before */
    }
    pthread_mutex_unlock(&lock);
    *call = found;
    return status;
}

void rf__fused_call_release(rf__fused_call *call) {
    if (call == NULL) return;
    pthread_mutex_lock(&lock);
    call->users--;
    pthread_mutex_unlock(&lock);
}

/* A number of bags that many batch sizes share: at most a sixteenth more. */
static int64_t rounded(int64_t bags) {
    int64_t step = 1;
    while (bags / step >= 32) step *= 2;
    return (bags + step - 1) / step * step;
}

/* Under the lock. */
static rf_status map_bags(rf__fused_call *call, int64_t bags, bool may_stage, rf__fused_mapped **mapped) {
    rf_status status = RF_OK;
    rf__fused_mapping *mapping = NULL;
    int64_t rows = 0;
    const rf__fused_batch batch = {.bags = rounded(bags), .may_stage = may_stage};
    for (rf__fused_mapped *one = call->mapped; one != NULL; one = one->next) {
        if (one->bags == batch.bags && one->may_stage == may_stage) {
            *mapped = one;
            return RF_OK;
        }
    }
    rf__fused_mapped *made = calloc(1, sizeof *made);
    if (made == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for a mapping");
    RF_TRY(rf__fused_map(&call->known->what, &batch, call->device->sms, RF__FUSED_BLOCKS, &mapping, &rows));
    RF_TRY(rf__cuda_upload(call->device, mapping, (size_t)rows * sizeof *mapping, &made->on_device));
    made->head = *mapping;
    made->staged = rf__fused_staged_of(mapping, rows);
    made->bags = batch.bags;
    made->may_stage = may_stage;
    made->next = call->mapped;
    call->mapped = made;
    *mapped = made;
    made = NULL;
out:
    free(made);
    free(mapping);
    return status;
}

/* The mapping is made on the device. */
static rf_status map_on_device(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               rf__fused_device_map *map) {
    rf_status status = RF_OK;
    pthread_mutex_lock(&lock);
    if (call->map_table == NULL)
        status = rf__fused_map_table_new(call->device, call->known->features, call->n_features,
                                         &call->known->classes, &call->map_table);
    const rf__fused_map_table *table = call->map_table;
    pthread_mutex_unlock(&lock);
    return status == RF_OK ? rf__fused_map_prepare(call->device, table, params, map) : status;
}

/* Where the mapping of a launch comes from, if it is made before. */
static rf_status mapping_find(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                              const rf_fused_plan *plan, rf__fused_mapped *found) {
    if (plan != NULL && plan->mapping != NULL) {
        const rf__fused_mapping *head = (const rf__fused_mapping *)plan->mapping;
        if (plan->mapping_rows < 1 || head->version != RF__FUSED_MAPPING_VERSION || head->n_tasks < 0 ||
            head->n_tiles < 0 || head->n_groups < 0 || head->places < 0 ||
            !rf__fused_whole(head, plan->mapping_rows) || head->bags != params->bags ||
            head->n_features != params->n_features || head->signature != call->known->what.signature) {
            return rf__fail(
                RF_ERR_VALUE,
                "recfuse.fused_embedding_bag: mapping is not one for %" PRId64 " features of %" PRId64
                " bags with these schedules; make it anew with the same features, schedules and offsets",
                params->n_features, params->bags);
        }
        *found = (rf__fused_mapped){.head = *head,
                                    .staged = rf__fused_staged_of(head, plan->mapping_rows),
                                    .on_device = (uintptr_t)plan->mapping_on_device};
        if (found->staged.depth > 0 && !rf__fused_can_stage(call->device, params->lookups)) {
            return rf__fail(
                RF_ERR_VALUE,
                "recfuse.fused_embedding_bag: mapping has staged tables, which GPU %d cannot for %" PRId64
                " lookups; make it with stage=False",
                (int)call->device->ordinal, params->lookups);
        }
        return RF_OK;
    }
    rf__fused_mapped *known = NULL;
    pthread_mutex_lock(&lock);
    const rf_status status =
        map_bags(call, params->bags, rf__fused_can_stage(call->device, params->lookups), &known);
    if (status == RF_OK) *found = *known;
    pthread_mutex_unlock(&lock);
    return status;
}

/* Partial sums of tasks that share bags, then a counter for each group of them. */
int64_t rf__fused_workspace(const rf__fused_mapping *mapping) {
    return RF__FUSED_PLACE_BYTES * (int64_t)mapping->places + (int64_t)sizeof(uint32_t) * mapping->n_groups;
}

/* The kernel of a variant, found without a look at all of its classes where it was used before. */
static rf_status kernel_find(rf__fused_call *call, const rf__fused_variant *variant, bool staged,
                             const rf__kernel **kernel) {
    rf_status status = RF_OK;
    *kernel = NULL;
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < call->n_kernels; i++) {
        const made_kernel *known = &call->kernels[i];
        if (known->staged == staged && memcmp(&known->variant, variant, sizeof *variant) == 0)
            *kernel = known->kernel;
    }
    pthread_mutex_unlock(&lock);
    if (*kernel != NULL) return RF_OK;
    if (staged) {
        RF_TRY(rf__fused_staged_kernel(call->device, variant, &call->known->classes, kernel));
    } else {
        RF_TRY(rf__fused_kernel(call->device, variant, &call->known->classes, kernel));
    }
    pthread_mutex_lock(&lock);
    if (call->n_kernels < MOST_KERNELS)
        call->kernels[call->n_kernels++] = (made_kernel){*variant, staged, *kernel};
    pthread_mutex_unlock(&lock);
out:
    return status;
}

/* Whether the aligned word that the last id lies in may reach beyond the memory that the ids are in. */
static bool ends_with_an_id(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params) {
    const uint64_t id_bytes = params->index_type == RF_INT64 ? 8 : 4;
    const uint64_t end = (uintptr_t)params->indices + (uint64_t)params->lookups * id_bytes;
    const uint64_t beyond = (end + 4 * id_bytes - 1) / (4 * id_bytes) * (4 * id_bytes);
    rf__cu_pointer base = 0;
    size_t bytes = 0;
    if (beyond == end || params->lookups == 0) return false;
    if (device->driver->cuMemGetAddressRange_v2(&base, &bytes, (uintptr_t)params->indices) != RF__CU_SUCCESS)
        return true;
    return beyond > base + bytes;
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

rf_status rf__fused_call_ready(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               const rf_fused_plan *plan, rf__fused_ready *ready) {
    rf_status status = RF_OK;
    rf__fused_mapped mapped = {0};
    rf__fused_variant variant = variant_of(call, params);
    variant.foreign = plan != NULL && plan->mapping != NULL;
    memset(ready, 0, sizeof *ready);
    rf__fused_occupancy(call->device, plan != NULL ? plan->warps : 0, &variant, &call->known->classes);
    if ((plan != NULL && plan->mapping != NULL) || call->all_expected) {
        RF_TRY(mapping_find(call, params, plan, &mapped));
    } else {
        RF_TRY(map_on_device(call, params, &ready->map));
        mapped.head.n_tasks = ready->map.most_tasks;
    }
    if (mapped.staged.depth > 0) {
        rf__fused_variant staged = variant;
        staged.exact = ends_with_an_id(call->device, params);
        RF_TRY(kernel_find(call, &staged, true, &ready->staged_kernel));
        rf__fused_beside(&variant, &call->known->classes);
    }
    if (mapped.head.n_tasks > 0) { /* else all tables are staged */
        RF_TRY(kernel_find(call, &variant, false, &ready->kernel));
        ready->shared_bytes =
            rf__fused_shared_bytes(call->device, &variant, &call->known->classes, ready->kernel);
    }
    ready->features = call->on_device;
    ready->mapping = mapped.head;
    ready->staged = mapped.staged;
    ready->mapping_on_device = mapped.on_device;
    ready->workspace_bytes = rf__fused_workspace(&mapped.head) + ready->map.workspace_bytes;
out:
    return status;
}

rf_status rf__fused_call_timed(rf__fused_call *call, const rf_fused_embedding_bag_params *params,
                               int32_t warps, const rf__fused_classes *classes, rf__fused_ready *ready) {
    rf__fused_variant variant = variant_of(call, params);
    memset(ready, 0, sizeof *ready);
    variant.timed = true;
    rf__fused_occupancy(call->device, warps, &variant, classes);
    ready->features = call->on_device;
    const rf_status status = rf__fused_kernel(call->device, &variant, classes, &ready->kernel);
    if (status == RF_OK)
        ready->shared_bytes = rf__fused_shared_bytes(call->device, &variant, classes, ready->kernel);
    return status;
}
