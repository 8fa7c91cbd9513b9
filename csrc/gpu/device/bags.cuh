/* What makes two offsets a bag: one rule for all kernels of backward passes, that of the forward. */
#ifndef RECFUSE_BAGS_CUH
#define RECFUSE_BAGS_CUH

#include "gpu/device/common.cuh"

/* Whether lookups [from, to) are a bag of a call with so many; `is_first`: the first bag of its first feature, which begins
 * with lookup 0. A bag that is none has no lookups. */
RF_INLINE bool rf_is_bag(bool is_first, rf_i64 from, rf_i64 to, rf_i64 lookups) {
    return from >= 0 && from <= to && to <= lookups && (!is_first || from == 0);
}

#endif
