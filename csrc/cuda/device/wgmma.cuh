/* Products of a warpgroup on tensor cores (wgmma, compute capability 9.0): sums [64, N] in float32 += A [64, 16] . B [16, N].
 *
 * A comes from registers, as ldmatrix leaves it; B from shared memory, K-major, by a descriptor. Sums that a product is
 * going to are not to be touched from rf_wgmma_begin until rf_wgmma_wait says that it is done. */
#ifndef RECFUSE_WGMMA_CUH
#define RECFUSE_WGMMA_CUH

#include "device/common.cuh"

/* Registers that were written, by a load say, are seen by the products that follow. */
RF_INLINE void rf_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products; rf_wgmma_wait<N>: all but the last N groups are done. */
RF_INLINE void rf_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> RF_INLINE void rf_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* The descriptor of B in rows of 64 bytes (32 elements of 2 bytes) with the swizzle of 64 bytes, where eight rows are 512
 * bytes apart: its lower word is the address / 16, so +1 is 16 bytes, and a step of 16 elements along K is +2. */
RF_INLINE rf_u32 rf_wgmma_rows_of_64_bytes(rf_u32 address) { return address >> 4; }
#define RF_WGMMA_ROWS_OF_64_BYTES "0x80000020" /* the upper word */

/* rf_wgmma<DTYPE>(float (&sums)[N / 2], const rf_u32 (&a)[4], rf_u32 b) */
#define RF_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define RF_SUMS_24 RF_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define RF_SUMS_32 RF_SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define RF_SUMS_40 RF_SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RF_SUMS_48 RF_SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RF_SUMS_56 RF_SUMS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define RF_SUMS_OUT_16(s)                                                                           \
    "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
        "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15])
#define RF_SUMS_OUT_24(s)                                                                            \
    RF_SUMS_OUT_16(s), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), \
        "+f"(s[22]), "+f"(s[23])
#define RF_SUMS_OUT_32(s)                                                                            \
    RF_SUMS_OUT_24(s), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), \
        "+f"(s[30]), "+f"(s[31])
#define RF_SUMS_OUT_40(s)                                                                            \
    RF_SUMS_OUT_32(s), "+f"(s[32]), "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), \
        "+f"(s[38]), "+f"(s[39])
#define RF_SUMS_OUT_48(s)                                                                            \
    RF_SUMS_OUT_40(s), "+f"(s[40]), "+f"(s[41]), "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), \
        "+f"(s[46]), "+f"(s[47])
#define RF_SUMS_OUT_56(s)                                                                            \
    RF_SUMS_OUT_48(s), "+f"(s[48]), "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), \
        "+f"(s[54]), "+f"(s[55])
#define RF_WGMMA_PRODUCT(columns, half, type, inputs, last)                               \
    asm volatile("{ .reg .b64 b; mov.b64 b, {" last ", " RF_WGMMA_ROWS_OF_64_BYTES        \
                 "}; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
                 " {" RF_SUMS_##half "}, " inputs ", b, 1, 1, 1, 0; }"                    \
                 : RF_SUMS_OUT_##half(sums)                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define RF_WGMMA(columns, half, inputs, last)                                                          \
    template <int DTYPE> RF_INLINE void rf_wgmma(float (&sums)[half], const rf_u32(&a)[4], rf_u32 b) { \
        if (DTYPE == RF_FLOAT16)                                                                       \
            RF_WGMMA_PRODUCT(columns, half, "f16", inputs, last);                                      \
        else                                                                                           \
            RF_WGMMA_PRODUCT(columns, half, "bf16", inputs, last);                                     \
    }
RF_WGMMA(32, 16, "{%16, %17, %18, %19}", "%20")
RF_WGMMA(48, 24, "{%24, %25, %26, %27}", "%28")
RF_WGMMA(64, 32, "{%32, %33, %34, %35}", "%36")
RF_WGMMA(80, 40, "{%40, %41, %42, %43}", "%44")
RF_WGMMA(96, 48, "{%48, %49, %50, %51}", "%52")
RF_WGMMA(112, 56, "{%56, %57, %58, %59}", "%60")

#endif
