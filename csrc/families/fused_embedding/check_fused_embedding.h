/* Checks of the arguments of lookups without pooling. */
#ifndef RECFUSE_CHECK_FUSED_EMBEDDING_H
#define RECFUSE_CHECK_FUSED_EMBEDDING_H

#include "core/validate.h"

/* Checks everything but contents of device memory and the pointers of outputs. */
rf_status rf__check_fused_embedding(const rf_fused_embedding_params *params);

/* Returns the slots of the output: of a feature, of RF_HISTORY_JAGGED of the call. Requires checked params.
 */
static inline int64_t rf__history_slots(const rf_fused_embedding_params *params) {
    if (params->layout == RF_HISTORY_PADDED) return params->bags * params->length;
    if (params->layout == RF_HISTORY_JAGGED || params->n_features == 0) return params->lookups;
    return params->lookups / params->n_features;
}

/* Returns the columns of all features. */
static inline int64_t rf__history_columns(const rf_fused_embedding_params *params) {
    if (params->n_features == 0) return 0;
    const rf_feature *last = &params->features[params->n_features - 1];
    return last->output_column + last->dim;
}

#endif
