/* Shared by all kernels: loads of vectors, records of errors, the order of launches.
 *
 * Included by NVRTC from memory, and by nvcc and editors from csrc (-I).
 */
#ifndef RECFUSE_COMMON_CUH
#define RECFUSE_COMMON_CUH

#include "gpu/device/codes.h"
#include "gpu/device/error_word.h"
#include "gpu/device/types.h"

#define RF_INLINE __device__ __forceinline__
#define RF_FULL_WARP 0xffffffffu

/* 1, 2, 4, 8 or 16 bytes, moved by one instruction. */
template <int BYTES> struct __align__(BYTES) rf_bytes {
    rf_u32 word[BYTES / 4];
};
template <> struct __align__(2) rf_bytes<2> {
    rf_u16 word[1];
};
template <> struct rf_bytes<1> {
    rf_u8 word[1];
};

/* A read through the cache for constant data: tables do not change while a kernel runs. */
RF_INLINE rf_bytes<1> rf_load(const rf_bytes<1> *from) {
    rf_u16 word;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(word) : "l"(from));
    return {(rf_u8)word};
}
RF_INLINE rf_bytes<2> rf_load(const rf_bytes<2> *from) {
    rf_bytes<2> to;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(to.word[0]) : "l"(from));
    return to;
}
RF_INLINE rf_bytes<4> rf_load(const rf_bytes<4> *from) {
    rf_bytes<4> to;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to.word[0]) : "l"(from));
    return to;
}
RF_INLINE rf_bytes<8> rf_load(const rf_bytes<8> *from) {
    rf_bytes<8> to;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to.word[0]), "=r"(to.word[1]) : "l"(from));
    return to;
}
RF_INLINE rf_bytes<16> rf_load(const rf_bytes<16> *from) {
    rf_bytes<16> to;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "l"(from));
    return to;
}

/* As rf_load if `condition` is not negative, otherwise zeros, by one predicated instruction. For a branch around
 * rf_load the compiler copies to other registers, which waits for the load before the next load begins. */
RF_INLINE rf_bytes<2> rf_load_if(int condition, const rf_bytes<2> *from) {
    rf_bytes<2> to = {};
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p ld.global.nc.u16 %0, [%1]; }"
                 : "+h"(to.word[0])
                 : "l"(from), "r"(condition));
    return to;
}
RF_INLINE rf_bytes<4> rf_load_if(int condition, const rf_bytes<4> *from) {
    rf_bytes<4> to = {};
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, 0; @p ld.global.nc.u32 %0, [%1]; }"
                 : "+r"(to.word[0])
                 : "l"(from), "r"(condition));
    return to;
}
RF_INLINE rf_bytes<8> rf_load_if(int condition, const rf_bytes<8> *from) {
    rf_bytes<8> to = {};
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %3, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2]; }"
                 : "+r"(to.word[0]), "+r"(to.word[1])
                 : "l"(from), "r"(condition));
    return to;
}
RF_INLINE rf_bytes<16> rf_load_if(int condition, const rf_bytes<16> *from) {
    rf_bytes<16> to = {};
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to.word[0]), "+r"(to.word[1]), "+r"(to.word[2]), "+r"(to.word[3])
                 : "l"(from), "r"(condition));
    return to;
}

/* A read that stays before the stores that follow it: the assembler moves those above down to their uses,
 * which leaves fewer of them in flight. */
RF_INLINE rf_bytes<2> rf_load_first(const rf_bytes<2> *from) {
    rf_bytes<2> to;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(to.word[0]) : "l"(from) : "memory");
    return to;
}
RF_INLINE rf_bytes<4> rf_load_first(const rf_bytes<4> *from) {
    rf_bytes<4> to;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(to.word[0]) : "l"(from) : "memory");
    return to;
}
RF_INLINE rf_bytes<8> rf_load_first(const rf_bytes<8> *from) {
    rf_bytes<8> to;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to.word[0]), "=r"(to.word[1])
                 : "l"(from)
                 : "memory");
    return to;
}
RF_INLINE rf_bytes<16> rf_load_first(const rf_bytes<16> *from) {
    rf_bytes<16> to;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "l"(from)
                 : "memory");
    return to;
}

/* Prefetches the line at an address into L2 without waiting. Allowed before rf_wait_for_previous_kernel,
 * because later writes of a kernel go to L2 too. */
RF_INLINE void rf_prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/* Keeps an address in registers, so that an offset from it takes one multiplication and addition. */
RF_INLINE void rf_keep(const rf_u8 *&address) { asm volatile("" : "+l"(address)); }
RF_INLINE void rf_keep(rf_u8 *&address) { asm volatile("" : "+l"(address)); }
/* Hides the origin of a number, so that the compiler does not hold values derived from it in registers. */
RF_INLINE void rf_forget(int &number) { asm volatile("" : "+r"(number)); }

/* Returns first + number * pitch by one multiplication and addition; otherwise a compiler may multiply 64
 * bits. */
RF_INLINE rf_u8 *rf_address(const rf_u8 *first, rf_u32 number, rf_u32 pitch) {
    rf_u64 bytes;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(number), "r"(pitch));
    return (rf_u8 *)first + bytes;
}
RF_INLINE rf_u8 *rf_address(const rf_u8 *first, rf_u64 number, rf_u32 pitch) {
    return (rf_u8 *)first + number * pitch;
}

/* As rf_load for one number; `how`: the rest of the instruction. Not __ldg, because a compiler may move it
 * above rf_wait_for_previous_kernel. */
#define RF_LOADER(name, number, how, result)                                     \
    RF_INLINE number name(const number *from) {                                  \
        number to;                                                               \
        asm volatile("ld.global.nc." how " %0, [%1];" : result(to) : "l"(from)); \
        return to;                                                               \
    }
RF_LOADER(rf_load, int, "s32", "=r")
RF_LOADER(rf_load, rf_i64, "s64", "=l")
RF_LOADER(rf_load, float, "f32", "=f")
RF_LOADER(rf_load, rf_u32, "u32", "=r")
RF_LOADER(rf_load, rf_u64, "u64", "=l")
RF_INLINE const rf_u8 *rf_load(const rf_u8 *const *from) {
    return (const rf_u8 *)rf_load((const rf_i64 *)from);
}

/* The number of a float16, and the nearest float16 and bfloat16 of a number: bits. */
RF_INLINE float rf_float16_number(rf_u16 bits) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
}
RF_INLINE rf_u16 rf_float16_of(float number) {
    rf_u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
    return bits;
}
RF_INLINE rf_u16 rf_bfloat16_of(float number) {
    rf_u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(number));
    return bits;
}

/* A kernel's report of an invalid value (error_word.h). */
struct rf_offender {
    rf_argument argument;
    rf_i64 position, bag, value, limit, lookups;
};

/* In line, because a call would cost the caller registers on its hot path. */
template <rf_operator OPERATOR>
RF_INLINE void rf_report(const rf_error_word &errors, const rf_offender &offender, int feature = -1) {
    volatile rf_error_record *record = errors.record;
    const rf_u32 raised = record->raised;
    if (atomicCAS(errors.claimed, raised, raised + 1u) != raised) return;
    record->argument = offender.argument;
    record->operator_number = OPERATOR;
    record->feature = feature;
    record->position = offender.position;
    record->bag = offender.bag;
    record->value = offender.value;
    record->limit = offender.limit;
    record->lookups = offender.lookups;
    __threadfence_system();
    record->ready = RF_ERROR_READY;
}

/* Consecutive launches in a stream may overlap (rf__overlap defines when). A kernel waits here until all
 * previous kernels have finished and their writes are visible. From here on the next kernel may be set up,
 * but not the one after it. */
RF_INLINE void rf_wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Lets the next kernel begin concurrently. Requires that the next kernel waits for this one before
 * conflicting accesses, and until then reads no data that the kernel before this one writes, unless this one
 * has waited. */
RF_INLINE void rf_begin_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A root and a quotient with errors of at most two units in the last place, without the branches and calls of
 * exact ones. A divisor above 2^126 gives the quotient 0. */
RF_INLINE float rf_near_root(float of) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(of));
    return root;
}
RF_INLINE float rf_near_quotient(float value, float divisor) { return __fdividef(value, divisor); }

#endif
