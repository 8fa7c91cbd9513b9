/* Prepared fused calls: their descriptions, found or created, and the problem to lower. */
#ifndef RECFUSE_CUDA_FUSED_PREPARE_H
#define RECFUSE_CUDA_FUSED_PREPARE_H

#include "families/fused_embedding_bag/feature_table.h"
#include "families/fused_embedding_bag/fused_lower.h"

/* Zeros are nothing. */
typedef struct rf__fused_prepared {
    rf__described features; /* of rf__fused_table */
    rf__described partition; /* empty if the caller's mapping is on the device */
    rf__fused_problem problem;
    uint64_t uploads[RF__MOST_UPLOADS];
} rf__fused_prepared;

/* Prepares a call with work. `params` must stay valid until the release, which is required also on failure.
 * RF_ERR_VALUE and others for invalid arguments. */
rf_status rf__fused_prepare(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                            const rf_fused_plan *plan, rf__fused_prepared *prepared);
/* As above, without a partition: `problem.mapping` and its upload stay zeros. */
rf_status rf__fused_prepare_features(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                     const rf_fused_plan *plan, rf__fused_prepared *prepared);
/* Ends the use of descriptions, when the launches are in the stream. Leaves zeros. */
void rf__fused_release(rf__fused_prepared *prepared);

#endif
