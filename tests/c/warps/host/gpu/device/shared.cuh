/* gpu/device/shared.cuh on the host: an address of shared memory is an offset in the block's dynamic shared
 * memory. */
#ifndef RECFUSE_SHARED_CUH
#define RECFUSE_SHARED_CUH

#include "gpu/device/common.cuh"

extern thread_local rf_u8 memory[];

inline rf_u32 rf_shared_pinned(const void *address) {
    return (rf_u32)(rf_i32)((const rf_u8 *)address - memory);
}
inline rf_bytes<16> rf_shared_load(rf_u32 from) {
    return rf_load((const rf_bytes<16> *)(memory + (rf_i32)from));
}
inline rf_u32 rf_shared_load_2(rf_u32 from) { return *(const rf_u16 *)(memory + (rf_i32)from); }
inline void rf_shared_store_2(rf_u32 to, rf_u32 value) { *(rf_u16 *)(memory + (rf_i32)to) = (rf_u16)value; }
inline rf_u32 rf_shared_add_from(rf_u32 at, rf_u32 more) {
    return atomicAdd((rf_u32 *)(memory + (rf_i32)at), more);
}
inline void rf_shared_add(rf_u32 at, rf_u32 more) { (void)rf_shared_add_from(at, more); }
template <int BYTES> inline void rf_shared_copy(rf_u32 to, const void *from) {
    memcpy(memory + (rf_i32)to, from, BYTES);
}
inline void rf_shared_copies_end() {}
template <int LEFT> inline void rf_shared_copies_wait() {}

#endif
