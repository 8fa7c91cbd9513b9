/* The schedules of features: defaults, limits of a feature, the classes that a kernel must contain; and the
 * data for the partition, computed once for all batches (describe.c). */
#ifndef RECFUSE_CUDA_FUSED_SCHEDULE_H
#define RECFUSE_CUDA_FUSED_SCHEDULE_H

#include "families/fused_embedding_bag/features.h"

/* Every feature with its classes, for each of some sets of schedules [n_sets, n_features] (or NULL, for one
 * set of defaults): fills features [n_sets, n_features], and the classes of all sets together.
 * RF_ERR_VALUE. */
RF__SHARED rf_status rf__fused_features(const rf_fused_embedding_bag_params *params,
                                        const rf_fused_schedule *schedules, int64_t n_sets,
                                        rf__fused_classes *classes, rf__fused_feature *features);

/* Writes the schedules worth trying for a feature, at most `most`; returns their number. */
RF__SHARED int32_t rf__fused_candidates(const rf__fused_geometry *shape, rf_fused_schedule *candidates,
                                        int32_t most);

typedef struct rf__fused_mappable {
    const rf__fused_feature *features; /* [n_features] */
    int64_t n_features;
    const rf__fused_classes *classes;
    int32_t signature; /* of these */
} rf__fused_mappable;

/* As above, with all data to which it points. */
typedef struct rf__fused_described {
    rf__fused_mappable input;
    rf__fused_classes classes;
    rf__fused_feature features[];
} rf__fused_described;

/* Checks features and describes them; to be freed with free(). `schedules` may be NULL. */
RF__SHARED rf_status rf__fused_describe(const rf_fused_embedding_bag_params *params,
                                        const rf_fused_schedule *schedules, rf__fused_described **described);
#endif
