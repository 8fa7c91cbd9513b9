/* Sorted entries: how many count, and where the first of a key is. */
#ifndef RECFUSE_CUDA_BACKWARD_ENTRIES_CUH
#define RECFUSE_CUDA_BACKWARD_ENTRIES_CUH

#include "device/common.cuh"
#include "fused_embedding_bag/backward/args.h"

RF_INLINE rf_i64 count_of(const rf_backward_rows_args &args) {
    return args.count != nullptr ? rf_load(args.count) : args.lookups;
}

/* The first entry of [first, behind) whose key is `key` or more. */
RF_INLINE rf_i64 entries_before(const RF_KEY *keys, rf_i64 first, rf_i64 behind, rf_i64 key) {
    while (first < behind) {
        const rf_i64 middle = first + (behind - first) / 2;
        if ((rf_i64)keys[middle] < key) {
            first = middle + 1;
        } else {
            behind = middle;
        }
    }
    return first;
}

#endif
