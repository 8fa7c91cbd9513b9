/* Features as kernels see them: their geometry, and the schedules that they may have, which a kernel has
 * compiled in: its classes. */
#ifndef RECFUSE_CUDA_FUSED_FEATURES_H
#define RECFUSE_CUDA_FUSED_FEATURES_H

#include "core/status.h"
#include "families/fused_embedding_bag/feature_rows.h"
#include "families/fused_embedding_bag/fused_args.h"

/* The layout of a feature's rows for a kernel. */
typedef struct rf__fused_geometry {
    rf__row_format row;
    int32_t align, store; /* bytes of a vector; alignment of a vector in the output */
    int32_t lanes, vectors; /* that read a row, and how often each */
    int32_t slices; /* of a wider row */
    int32_t columns; /* vectors of a row */
    int32_t pooling, is_padded;
} rf__fused_geometry;

/* Returns true if the lanes read whole rows that follow each other. */
static inline bool rf__fused_is_whole(const rf__fused_geometry *shape) {
    return shape->columns == shape->lanes && shape->row.pitch == shape->row.bytes;
}

/* The geometry of one feature. Of the weight's and the output's addresses only the alignment matters. */
RF__SHARED rf_status rf__fused_geometry_of(const rf_fused_embedding_bag_params *params, int64_t feature,
                                           rf__fused_geometry *shape);
/* RF_ERR_UNSUPPORTED: more bags, features or columns than a GPU call may have. */
rf_status rf__fused_check_limits(const rf_fused_embedding_bag_params *params);

/* A schedule as a kernel has it compiled in: an entry of RF_SCHEDULES in fused_embedding_bag.cu. X(field,
 * bits that its value takes), in the order of the entry. */
#define RF__FUSED_CLASS_FIELDS(X) \
    X(kind, 2)                    \
    X(dtype, 3)                   \
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

/* The staging of a feature's table, if the GPU supports it: never, if a batch makes it pay, or as its
 * schedule requires. */
typedef enum rf__fused_staging {
    RF__STAGE_NEVER,
    RF__STAGE_WHERE_IT_PAYS,
    RF__STAGE_ALWAYS
} rf__fused_staging;

/* One feature as the partition sees it. */
typedef struct rf__fused_feature {
    rf__fused_geometry shape;
    int32_t classes[RF_FUSED_BUCKETS]; /* the number of its class, by mean bag length; -1: nothing to do */
    int32_t classes_of_few[RF_FUSED_BUCKETS]; /* the same in batches of at most RF_FUSED_FEW_BAGS */
    int32_t classes_staged[RF_FUSED_BUCKETS]; /* the same if its table is staged; -1: impossible */
    rf__fused_staging staging;
    int64_t rows, table_bytes;
    int32_t expected_sixteenths; /* lookups of a bag, as in rf_fused_schedule */
} rf__fused_feature;

/* Lookups of each feature in a batch: from offsets, or as expected if they are NULL. */
typedef struct rf__fused_batch {
    int64_t bags;
    const void *offsets; /* on the host, may be NULL */
    rf_int_type offset_type;
    bool may_stage; /* the GPU can: rf__fused_can_stage */
} rf__fused_batch;

#endif
