/* The rule by which two offsets form a bag, for all kernels of backward passes; the same as in the forward
 * pass. */
#ifndef RECFUSE_BAGS_CUH
#define RECFUSE_BAGS_CUH

#include "gpu/device/common.cuh"

/* Returns true if lookups [from, to) are a bag of a call with `lookups` lookups. `is_first`: the first bag of
 * the first feature, which begins with lookup 0. An invalid bag has no lookups. */
RF_INLINE bool rf_is_bag(bool is_first, rf_i64 from, rf_i64 to, rf_i64 lookups) {
    return from >= 0 && from <= to && to <= lookups && (!is_first || from == 0);
}

#endif
