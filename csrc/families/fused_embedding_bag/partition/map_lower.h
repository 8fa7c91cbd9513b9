/* The mapping computed by partition/map.cu, from offsets on the device, if the lookups of a batch are not
 * known in advance. */
#ifndef RECFUSE_CUDA_FUSED_MAP_DEVICE_H
#define RECFUSE_CUDA_FUSED_MAP_DEVICE_H

#include "families/fused_embedding_bag/partition/traffic.h"

enum { RF__FUSED_UPLOAD_FEATURES, RF__FUSED_UPLOAD_PARTITION }; /* uploads of a fused call */

/* The host's facts of features and classes, by which it makes room for tasks; and the places of the kernel's
 * table in the upload RF__FUSED_UPLOAD_PARTITION. */
typedef struct rf__fused_map_table {
    int64_t classes_at, tile_classes_at; /* bytes; features come first */
    int32_t n_classes, n_tiles; /* the most tiles that may exist */
    double runs, tasks_a_bag; /* at most */
    /* Blocks that work on one bag of all features at once, by mean bag length and class. */
    double blocks_a_bag[RF_FUSED_BUCKETS][RF_FUSED_MOST_CLASSES];
    double misses[RF__FUSED_LOGARITHMS]; /* cost of rows from memory, if each feature has 2^i lookups */
    rf__fused_classes all_classes;
} rf__fused_map_table;

/* Fills a table of zeros. *upload [*upload_bytes] is the caller's to free. RF_ERR_VALUE: a schedule splits
 * bags over blocks. */
rf_status rf__fused_map_table_fill(const rf__fused_feature *features, int64_t n_features,
                                   const rf__fused_classes *classes, rf__fused_map_table *table,
                                   void **upload, int64_t *upload_bytes);

/* Places of a mapping in the workspace. */
typedef struct rf__fused_device_mapping {
    uint64_t n_tasks, tasks, lanes;
    int32_t most_tasks;
} rf__fused_device_mapping;

/* Adds the launch of the kernel, and its part of the workspace. */
rf_status rf__fused_map_lower(const rf__gpu *gpu, const rf__fused_map_table *table,
                              const rf_fused_embedding_bag_params *params, rf__launches *launches,
                              rf__fused_device_mapping *mapping);

#endif
