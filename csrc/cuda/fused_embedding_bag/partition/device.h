/* The mapping made by partition/map.cu, from offsets that are on the device, where it is not known ahead what to
 * expect of a batch. */
#ifndef RECFUSE_CUDA_FUSED_MAP_DEVICE_H
#define RECFUSE_CUDA_FUSED_MAP_DEVICE_H

#include "cuda/fused_embedding_bag/features.h"
#include "cuda/jit/jit.h"
#include "cuda/driver/memory.h"

enum { RF__FUSED_LOGARITHMS = 32 };

/* What the kernel reads of features and classes, on the device, and by what the host makes room for its tasks. */
typedef struct rf__fused_map_table {
    rf__cuda_block block;
    rf__cu_pointer features, classes, tile_classes; /* in it */
    int32_t n_classes, n_tiles; /* as many tiles as there may be */
    double runs, tasks_a_bag; /* at most */
    /* Blocks that work on one bag of all features at once, by mean bag length and class. */
    double blocks_a_bag[RF_FUSED_BUCKETS][RF_FUSED_MOST_CLASSES];
    double misses[RF__FUSED_LOGARITHMS]; /* cost of rows from memory, if each feature has 2^i lookups */
    rf__fused_classes all;
} rf__fused_map_table;

/* RF_ERR_VALUE: a schedule splits bags over blocks. */
rf_status rf__fused_map_table_new(const rf__cuda_store *store, const rf__fused_feature *features,
                                  int64_t n_features, const rf__fused_classes *classes,
                                  rf__fused_map_table **table);
/* NULL is fine. */
void rf__fused_map_table_free(const rf__cuda_store *store, rf__fused_map_table *table);

/* One launch of the kernel. */
typedef struct rf__fused_device_map {
    const rf__kernel *kernel; /* NULL: the mapping is made otherwise */
    const rf__fused_map_table *table;
    int32_t blocks, most_tasks;
    double most_cuts;
    int64_t workspace_bytes;
} rf__fused_device_map;

/* Where it leaves the mapping, in the workspace. */
typedef struct rf__fused_device_mapping {
    rf__cu_pointer n_tasks, tasks, lanes;
} rf__fused_device_mapping;

rf_status rf__fused_map_prepare(const rf__cuda_device *device, const rf__fused_map_table *table,
                                const rf_fused_embedding_bag_params *params, rf__fused_device_map *map);
/* Puts it into the stream; no more than map->most_tasks tasks. `workspace`: aligned to 16 bytes. */
rf_status rf__fused_map_launch(const rf__cuda_device *device, const rf__fused_device_map *map,
                               const rf_fused_embedding_bag_params *params, void *workspace, void *stream,
                               rf__fused_device_mapping *mapping);

/* Every variant of the kernel into the cache; needs no GPU. */
RF__SHARED rf_status rf__fused_map_compile(const char *arch);

#endif
