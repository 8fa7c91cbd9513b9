/* Warps of a block that take turns: what one did in shared memory before it passed its turn on, the next one finds.
 *
 * A barrier of shared memory a warp, at which the warp before it arrives: no warp asks again and again, and what is on its
 * way from global memory need not come first, as it must at a fence. Turns go round: warp w has turns w, w + warps, ... */
#ifndef RECFUSE_TURNS_CUH
#define RECFUSE_TURNS_CUH

#include "device/common.cuh"

RF_INLINE void rf_turn_pass(rf_u64 *barrier) {
    const rf_u32 address = (rf_u32)__cvta_generic_to_shared(barrier);
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address) : "memory");
}

/* By a thread a warp, before any turn; a barrier of the block follows. The first turn is free. */
RF_INLINE void rf_turn_begin(rf_u64 *barrier, bool first) {
    const rf_u32 address = (rf_u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
    if (first) rf_turn_pass(barrier);
}
/* Before the barrier is begun anew; its last use lies before a barrier of the block. */
RF_INLINE void rf_turn_end(rf_u64 *barrier) {
    const rf_u32 address = (rf_u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(address) : "memory");
}

/* Until the warp's turn number `count`, from 0. */
RF_INLINE void rf_turn_wait(rf_u64 *barrier, rf_u32 count) {
    const rf_u32 address = (rf_u32)__cvta_generic_to_shared(barrier);
#if __CUDA_ARCH__ >= 900
#define RF_TURN_TEST "mbarrier.try_wait.parity.shared.b64"
#else
#define RF_TURN_TEST "mbarrier.test_wait.parity.shared.b64"
#endif
    for (rf_u32 done = 0; done == 0;) {
        asm volatile("{ .reg .pred p; " RF_TURN_TEST " p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(address), "r"(count & 1)
                     : "memory");
    }
}

#endif
