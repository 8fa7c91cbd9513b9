/* Descriptions of the features of fused calls. */
#include "families/fused_embedding_bag/feature_table.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/check_fused.h"

typedef struct problem {
    const rf_fused_embedding_bag_params *params;
    const rf_fused_schedule *schedules;
} problem;

/* The scalars that a description depends on; without padding. */
typedef struct scalars {
    int64_t n_features, n_buffers, output_dim, output_stride, output_alignment;
    int32_t output_dtype, weighted;
} scalars;

static scalars scalars_of(const rf_fused_embedding_bag_params *params) {
    return (scalars){.n_features = params->n_features,
                     .n_buffers = params->n_buffers,
                     .output_dim = params->output_dim,
                     .output_stride = params->output_stride,
                     .output_alignment = rf__alignment_of((uintptr_t)params->output, 16),
                     .output_dtype = (int32_t)params->output_dtype,
                     .weighted = params->sample_weights != NULL};
}

static int32_t shape_code(const rf__fused_geometry *shape) {
    return rf_fused_shape_code((rf_fused_properties){.dtype = (int32_t)shape->row.dtype,
                                                     .align = shape->align,
                                                     .store = shape->store,
                                                     .lanes = shape->lanes,
                                                     .vectors = shape->vectors,
                                                     .whole = rf__fused_is_whole(shape),
                                                     .pooling = shape->pooling,
                                                     .padded = shape->is_padded});
}

static rf_fused_descriptor descriptor_of(const rf_fused_embedding_bag_params *params, int64_t number,
                                         const rf__fused_geometry *shape) {
    const rf_feature *feature = &params->features[number];
    return (rf_fused_descriptor){.weight = (uintptr_t)rf__feature_weight(params->buffers, feature),
                                 .rows = feature->rows,
                                 .padding_idx = feature->padding_idx,
                                 .output_offset =
                                     rf__elements_bytes(params->output_dtype, feature->output_column),
                                 .pitch = (uint32_t)shape->row.pitch,
                                 .columns = shape->columns,
                                 .pooling = (int32_t)feature->pooling,
                                 .shape = shape_code(shape),
                                 .parameters = (uintptr_t)rf__feature_parameters(params->buffers, feature),
                                 .parameters_pitch = (uint32_t)shape->row.parameters_pitch};
}

static void table_free(void *data) {
    rf__fused_table *table = data;
    free(table->described);
    free(table);
}

static rf_status table_make(const rf__gpu *gpu, const void *of, rf__description *description) {
    (void)gpu;
    const rf_fused_embedding_bag_params *params = ((const problem *)of)->params;
    const rf_fused_schedule *schedules = ((const problem *)of)->schedules;
    const size_t n = (size_t)params->n_features;
    rf_status status = RF_OK;
    rf_fused_descriptor *upload = NULL;
    rf__fused_table *table = calloc(1, sizeof *table + (size_t)params->n_buffers * sizeof table->columns[0]);
    RF_FAIL_IF(table == NULL, RF_ERR_MEMORY, "no memory for a call of %zu features", n);
    RF_TRY(rf__fused_describe(params, schedules, &table->described));
    RF_TRY(rf__fused_class_list_of(&table->described->classes, &table->classes));
    upload = calloc(n + 1, sizeof *upload);
    if (upload == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for %zu features", n);
        goto out;
    }
    table->all_expected = schedules != NULL;
    for (size_t f = 0; f < n; f++) {
        upload[f] = descriptor_of(params, (int64_t)f, &table->described->features[f].shape);
        table->wide_rows |= params->features[f].rows > UINT32_MAX;
        if (schedules != NULL) table->all_expected &= schedules[f].expected != 0;
    }
    rf__fused_traffic_of(params, schedules, &table->traffic);
    *description = (rf__description){.data = table,
                                     .free_data = table_free,
                                     .upload = upload,
                                     .upload_bytes = (int64_t)(n * sizeof *upload),
                                     .frees_upload = true};
out:
    if (status != RF_OK) table_free(table);
    return status;
}

rf_status rf__fused_table_acquire(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                  const rf_fused_schedule *schedules, rf__described *described) {
    _Static_assert(sizeof(rf_buffer) == 4 * sizeof(int64_t) + 2 * sizeof(rf_dtype) + sizeof(void *),
                   "compared bytewise");
    const problem of = {params, schedules};
    const scalars key_scalars = scalars_of(params);
    const size_t n = (size_t)params->n_features, n_buffers = (size_t)params->n_buffers;
    const rf__description_key key = {
        .make = table_make,
        .parts = {{.data = &key_scalars, .bytes = sizeof key_scalars},
                  {.data = params->buffers,
                   .bytes = n_buffers * sizeof *params->buffers,
                   .item_bytes = sizeof *params->buffers,
                   .compared_bytes = sizeof *params->buffers},
                  {.data = params->features, .bytes = n * sizeof *params->features},
                  {.data = schedules, .bytes = schedules != NULL ? n * sizeof *schedules : 0}}};
    return rf__description_acquire(store, &key, &of, described);
}

rf_status rf__fused_table_check_rows(const rf__cuda_device *device, const rf__described *described,
                                     const rf_fused_embedding_bag_params *params, const int64_t *columns) {
    rf__fused_table *table = (rf__fused_table *)(uintptr_t)described->data;
    const size_t bytes = (size_t)params->n_buffers * sizeof *columns;
    if (device->driver == NULL) return rf__check_fused_rows(params, columns);
    rf__cuda_lock(device);
    const bool checked = table->rows_checked && memcmp(table->columns, columns, bytes) == 0;
    rf__cuda_unlock(device);
    if (checked) return RF_OK;
    RF_CHECK(rf__check_fused_rows(params, columns));
    rf__cuda_lock(device);
    memcpy(table->columns, columns, bytes);
    table->rows_checked = true;
    rf__cuda_unlock(device);
    return RF_OK;
}
