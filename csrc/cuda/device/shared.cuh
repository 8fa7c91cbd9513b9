/* Shared memory by its 32-bit addresses. From a pointer the compiler works an address out again wherever it is used, with
 * a slow read of the block's number in its cluster; an address that went through here it keeps. */
#ifndef RECFUSE_SHARED_CUH
#define RECFUSE_SHARED_CUH

#include "device/common.cuh"

RF_INLINE rf_u32 rf_shared_kept(const void *address) {
    rf_u32 kept = (rf_u32)__cvta_generic_to_shared(address);
    asm volatile("" : "+r"(kept));
    return kept;
}

/* 16 bytes that nobody writes meanwhile. */
RF_INLINE rf_bytes<16> rf_shared_load(rf_u32 from) {
    rf_bytes<16> to;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "r"(from));
    return to;
}

#endif
