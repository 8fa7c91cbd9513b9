/* device/turns.cuh on the host: a barrier is the number of arrivals. */
#ifndef RECFUSE_TURNS_CUH
#define RECFUSE_TURNS_CUH

#include "warps.h"

inline void rf_turn_pass(rf_u64 *barrier) { ++*barrier; }
inline void rf_turn_begin(rf_u64 *barrier, bool first) { *barrier = first; }
inline void rf_turn_end(rf_u64 *) {}
inline void rf_turn_wait(rf_u64 *barrier, rf_u32 count) {
    while (*(volatile rf_u64 *)barrier % 2 == count % 2) yield_to_any();
}

#endif
