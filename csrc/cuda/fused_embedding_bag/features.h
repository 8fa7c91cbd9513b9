/* Features with the schedules that they may have, as a kernel has them compiled in: its classes. */
#ifndef RECFUSE_CUDA_FUSED_FEATURES_H
#define RECFUSE_CUDA_FUSED_FEATURES_H

#include "cuda/fused_embedding_bag/geometry.h"

/* A schedule as a kernel has it compiled in: an entry of RF_SCHEDULES in fused_embedding_bag.cu. X(field, bits that its
 * value takes), in the order of the entry. */
#define RF__FUSED_CLASS_FIELDS(X) \
    X(kind, 2)                    \
    X(dtype, 2)                   \
    X(align, 5)                   \
    X(store, 5)                   \
    X(lanes, 6)                   \
    X(vectors, 2)                 \
    X(whole, 1)                   \
    X(pooling, 2)                 \
    X(padded, 1)                  \
    X(threads, 7)                 \
    X(distance, 5)                \
    X(split, 7)

typedef struct rf__fused_class {
#define RF__FUSED_FIELD(name, bits) int32_t name;
    RF__FUSED_CLASS_FIELDS(RF__FUSED_FIELD)
#undef RF__FUSED_FIELD
} rf__fused_class;

typedef struct rf__fused_classes {
    int32_t count;
    rf__fused_class of[RF_FUSED_MOST_CLASSES];
    uint64_t code[RF_FUSED_MOST_CLASSES]; /* all fields of each in one number, to find it by */
} rf__fused_classes;

/* Whether a feature's table is staged, where the GPU can: never, where a batch makes it pay, or as its schedule says. */
typedef enum rf__fused_staging {
    RF__STAGE_NEVER,
    RF__STAGE_WHERE_IT_PAYS,
    RF__STAGE_ALWAYS
} rf__fused_staging;

/* One feature as the partition sees it. */
typedef struct rf__fused_feature {
    rf__fused_geometry shape;
    int32_t classes[RF_FUSED_BUCKETS]; /* the number of its class, by mean bag length; -1: nothing to do */
    int32_t classes_of_few[RF_FUSED_BUCKETS]; /* the same in batches of RF_FUSED_FEW_BAGS and less */
    int32_t classes_staged[RF_FUSED_BUCKETS]; /* the same where its table is staged; -1: it cannot be */
    rf__fused_staging staging;
    int64_t rows, table_bytes;
    int32_t expected_sixteenths; /* lookups of a bag, as in rf_fused_schedule */
} rf__fused_feature;

/* Lookups of each feature in a batch: from offsets, or as expected where they are NULL. */
typedef struct rf__fused_batch {
    int64_t bags;
    const void *offsets; /* on the host, may be NULL */
    rf_int_type offset_type;
    bool may_stage; /* the GPU can: rf__fused_can_stage */
} rf__fused_batch;

#endif
