/* The description of a fused call's features: all that its batches share. */
#ifndef RECFUSE_CUDA_FUSED_FEATURE_TABLE_H
#define RECFUSE_CUDA_FUSED_FEATURE_TABLE_H

#include "families/fused_embedding_bag/fused_kernel.h"
#include "families/fused_embedding_bag/schedule/fused_schedule.h"
#include "families/fused_embedding_bag/partition/traffic.h"
#include "gpu/launches/description.h"

/* The data of the description; its upload is rf_fused_descriptor [n_features]. */
typedef struct rf__fused_table {
    rf__fused_described *described; /* features and their classes */
    const rf__fused_class_list *classes;
    rf__fused_traffic traffic;
    bool all_expected; /* schedules have the expected lookups of each feature */
    bool wide_rows; /* a table has more rows than 32 bits count */
    /* Under the device's lock: columns of buffers that rf__check_fused_rows has passed. */
    bool rows_checked;
    int64_t columns[]; /* [n_buffers] */
} rf__fused_table;

/* Finds or creates the description, whose data is a rf__fused_table, and holds it. `schedules` may be
 * NULL. */
rf_status rf__fused_table_acquire(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                  const rf_fused_schedule *schedules, rf__described *described);

/* rf__check_fused_rows for these features; the same columns are not checked twice. */
rf_status rf__fused_table_check_rows(const rf__cuda_device *device, const rf__described *described,
                                     const rf_fused_embedding_bag_params *params, const int64_t *columns);

#endif
