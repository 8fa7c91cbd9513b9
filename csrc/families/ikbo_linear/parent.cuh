/* The report of an invalid parent. */
#ifndef RECFUSE_IKBO_LINEAR_PARENT_CUH
#define RECFUSE_IKBO_LINEAR_PARENT_CUH

#include "gpu/device/common.cuh"

/* Reports the parent of `item`, out of `items`, if there are `parents` parents. map: as in
 * rf_ikbo_add_params. */
RF_INLINE void rf_report_parent(const rf_error_word &errors, int map, rf_i64 item, rf_i64 parent,
                                rf_i64 parents, rf_i64 items) {
    if (map < 0) {
        rf_report<RF_OPERATOR_ikbo_linear>(errors,
                                           {RF_ARGUMENT_cand_to_user, item, -1, parent, parents, items});
    } else {
        rf_report<RF_OPERATOR_ikbo_linear_chain>(errors, {RF_ARGUMENT_maps, item, -1, parent, parents, items},
                                                 map);
    }
}

#endif
