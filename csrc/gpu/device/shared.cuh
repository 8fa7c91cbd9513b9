/* Shared memory by its 32-bit addresses. From a pointer the compiler works an address out again wherever it
 * is used, with a slow read of the block's number in its cluster; an address that went through here it
 * keeps. */
#ifndef RECFUSE_SHARED_CUH
#define RECFUSE_SHARED_CUH

#include "gpu/device/common.cuh"

RF_INLINE rf_u32 rf_shared_pinned(const void *address) {
    rf_u32 shared_address = (rf_u32)__cvta_generic_to_shared(address);
    asm volatile("" : "+r"(shared_address));
    return shared_address;
}

/* Loads 16 and 2 bytes that no thread writes at the same time. */
RF_INLINE rf_bytes<16> rf_shared_load(rf_u32 from) {
    rf_bytes<16> to;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "r"(from));
    return to;
}

RF_INLINE rf_u32 rf_shared_load_2(rf_u32 from) {
    rf_u16 to;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(to) : "r"(from));
    return to;
}
RF_INLINE void rf_shared_store_2(rf_u32 to, rf_u32 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((rf_u16)value) : "memory");
}

/* Atomically adds; the second returns the old value. */
RF_INLINE void rf_shared_add(rf_u32 at, rf_u32 increment) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(increment) : "memory");
}
RF_INLINE rf_u32 rf_shared_add_from(rf_u32 at, rf_u32 increment) {
    rf_u32 was;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(was) : "r"(at), "r"(increment) : "memory");
    return was;
}

/* Copies 4, 8 or 16 bytes of memory into shared memory, asynchronously. The copies up to rf_shared_copies_end
 * are a group. */
template <int BYTES> RF_INLINE void rf_shared_copy(rf_u32 to, const void *from) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "as the instruction allows");
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}
RF_INLINE void rf_shared_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until all of the thread's groups except the last PENDING have arrived. */
template <int PENDING> RF_INLINE void rf_shared_copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
