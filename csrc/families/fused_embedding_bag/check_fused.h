/* Checks of the arguments of the fused embedding bags. */
#ifndef RECFUSE_CHECK_FUSED_H
#define RECFUSE_CHECK_FUSED_H

#include "core/validate.h"

/* Checks of a fused call: sizes and types of its varying parts; and the description of its features. */
RF__SHARED rf_status rf__check_fused_call(const rf_fused_embedding_bag_params *params);
RF__SHARED rf_status rf__check_fused_features(const rf_fused_embedding_bag_params *params);
/* RF_ERR_UNSUPPORTED: a weight is quantised, so it has no gradient. */
rf_status rf__check_fused_floats(const char *operator_name, const rf_fused_embedding_bag_params *params);
/* RF_ERR_UNSUPPORTED: a GPU cannot read the scales and biases of a feature's table. */
rf_status rf__check_fused_parameters(const char *operator_name, const rf_fused_embedding_bag_params *params,
                                     int64_t at);
/* `columns`: [n_buffers] of the matrices in the buffers, -1 for other buffers. A table in a matrix must be
 * whole rows of it. */
rf_status rf__check_fused_rows(const rf_fused_embedding_bag_params *params, const int64_t *columns);
/* As in rf_fused_plan. */
RF__SHARED rf_status rf__check_fused_warps(int32_t warps);

#endif
