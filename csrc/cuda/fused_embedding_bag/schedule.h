/* The schedules of features: defaults, what a feature can run, the classes that a kernel must have. */
#ifndef RECFUSE_CUDA_FUSED_SCHEDULE_H
#define RECFUSE_CUDA_FUSED_SCHEDULE_H

#include "cuda/fused_embedding_bag/features.h"

/* Every feature with its classes, for each of some sets of schedules [n_sets, n_features] (or NULL, for one set of
 * defaults): fills features [n_sets, n_features], and the classes of all sets together. RF_ERR_VALUE. */
RF__SHARED rf_status rf__fused_features(const rf_fused_embedding_bag_params *params,
                                        const rf_fused_schedule *schedules, int64_t n_sets,
                                        rf__fused_classes *classes, rf__fused_feature *features);

/* The schedules worth a try for a feature, `most` at most; how many there are. */
RF__SHARED int32_t rf__fused_candidates(const rf__fused_geometry *shape, rf_fused_schedule *candidates,
                                        int32_t most);

#endif
