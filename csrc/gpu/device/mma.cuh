/* Products of one warp on tensor cores (mma.sync): sums [16, 8] in float32 += A [16, 16] . B [16, 8]. A
 * thread has, of the sums, number e: row lane / 4 + e / 2 * 8, column 2 (lane % 4) + e % 2, as wgmma's
 * (wgmma.cuh). */
#ifndef RECFUSE_MMA_CUH
#define RECFUSE_MMA_CUH

#include "gpu/device/common.cuh"

/* Four matrices of 8 rows of 16 bytes from shared memory; a lane names row lane % 8 of matrix lane / 8. */
RF_INLINE void rf_load_matrices(rf_u32 (&to)[4], rf_u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

#define RF_MMA_PRODUCT(type)                                                            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
/* sums: 4, b: 2 registers. */
template <int DTYPE> RF_INLINE void rf_mma(float *sums, const rf_u32 (&a)[4], const rf_u32 *b) {
    if (DTYPE == RF_FLOAT16)
        RF_MMA_PRODUCT("f16");
    else
        RF_MMA_PRODUCT("bf16");
}

#endif
