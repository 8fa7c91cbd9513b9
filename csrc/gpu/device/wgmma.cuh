/* Products of a warpgroup on tensor cores (wgmma, compute capability 9.0): sums [64, N] in float32 += A [64,
 * 16] . B [16, N].
 *
 * Descriptors name operands in shared memory. Their lower word is an address / 16, so +1 is 16 bytes. The
 * sums of a product must not be accessed from rf_wgmma_begin until rf_wgmma_wait has returned.
 */
#ifndef RECFUSE_WGMMA_CUH
#define RECFUSE_WGMMA_CUH

#include "gpu/device/common.cuh"

/* Makes earlier writes to registers, for example by loads, visible to the following products. */
RF_INLINE void rf_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products; rf_wgmma_wait<N>: all but the last N groups are done. */
RF_INLINE void rf_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> RF_INLINE void rf_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Upper words: rows along K of 64 bytes with the swizzle of 64 bytes, with 512 bytes per eight rows; rows of
 * 128 bytes with the swizzle of 128 bytes, with 1,024 bytes per eight rows, along K or across it. A step of
 * 16 elements along K is +2, across rows +128. */
RF_INLINE rf_u32 rf_wgmma_rows_of_64_bytes(rf_u32 address) { return address >> 4; }
#define RF_WGMMA_ROWS_OF_64_BYTES "0x80000020"
RF_INLINE rf_u32 rf_wgmma_rows_of_128_bytes(rf_u32 address) { return address >> 4; }
/* Rows across K hold 64 of N; the next 64 are `apart` bytes later. In a cluster an address has bits above
 * those of shared memory, which would overlap this field. */
RF_INLINE rf_u32 rf_wgmma_columns_of_128_bytes(rf_u32 address, rf_u32 apart) {
    return (address & 0x3ffffu) >> 4 | apart >> 4 << 16;
}
#define RF_WGMMA_ROWS_OF_128_BYTES "0x40000040"

#define RF_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define RF_SUMS_24 RF_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define RF_SUMS_32 RF_SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define RF_SUMS_40 RF_SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RF_SUMS_48 RF_SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RF_SUMS_56 RF_SUMS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define RF_SUMS_64 RF_SUMS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define RF_SUMS_96                                                                                       \
    RF_SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
               "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RF_SUMS_128                                                                                  \
    RF_SUMS_96                                                                                       \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
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
#define RF_SUMS_OUT_64(s)                                                                            \
    RF_SUMS_OUT_56(s), "+f"(s[56]), "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), \
        "+f"(s[62]), "+f"(s[63])
#define RF_SUMS_OUT_96(s)                                                                            \
    RF_SUMS_OUT_64(s), "+f"(s[64]), "+f"(s[65]), "+f"(s[66]), "+f"(s[67]), "+f"(s[68]), "+f"(s[69]), \
        "+f"(s[70]), "+f"(s[71]), "+f"(s[72]), "+f"(s[73]), "+f"(s[74]), "+f"(s[75]), "+f"(s[76]),   \
        "+f"(s[77]), "+f"(s[78]), "+f"(s[79]), "+f"(s[80]), "+f"(s[81]), "+f"(s[82]), "+f"(s[83]),   \
        "+f"(s[84]), "+f"(s[85]), "+f"(s[86]), "+f"(s[87]), "+f"(s[88]), "+f"(s[89]), "+f"(s[90]),   \
        "+f"(s[91]), "+f"(s[92]), "+f"(s[93]), "+f"(s[94]), "+f"(s[95])
#define RF_SUMS_OUT_128(s)                                                                                \
    RF_SUMS_OUT_96(s), "+f"(s[96]), "+f"(s[97]), "+f"(s[98]), "+f"(s[99]), "+f"(s[100]), "+f"(s[101]),    \
        "+f"(s[102]), "+f"(s[103]), "+f"(s[104]), "+f"(s[105]), "+f"(s[106]), "+f"(s[107]), "+f"(s[108]), \
        "+f"(s[109]), "+f"(s[110]), "+f"(s[111]), "+f"(s[112]), "+f"(s[113]), "+f"(s[114]), "+f"(s[115]), \
        "+f"(s[116]), "+f"(s[117]), "+f"(s[118]), "+f"(s[119]), "+f"(s[120]), "+f"(s[121]), "+f"(s[122]), \
        "+f"(s[123]), "+f"(s[124]), "+f"(s[125]), "+f"(s[126]), "+f"(s[127])

/* A from registers, as ldmatrix leaves it: NAME<DTYPE>(float (&sums)[N / 2], const rf_u32 (&a)[4], rf_u32 b,
 * int add = 1); `add` 0: sums = A . B, not += . B by rows
 *     rf_wgmma         along K, of 64 bytes
 *     rf_wgmma_columns across K, of 128 bytes */
#define RF_WGMMA_PRODUCT(columns, half, type, upper, transposed, in_a, in_b, in_add)                     \
    asm volatile("{ .reg .b64 b; .reg .pred p; mov.b64 b, {" in_b ", " upper "}; setp.ne.s32 p, " in_add \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type              \
                 " {" RF_SUMS_##half "}, " in_a ", b, p, 1, 1, " #transposed "; }"                       \
                 : RF_SUMS_OUT_##half(sums)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add))
#define RF_WGMMA(name, upper, transposed, columns, half, in_a, in_b, in_add)                \
    template <int DTYPE>                                                                    \
    RF_INLINE void name(float (&sums)[half], const rf_u32(&a)[4], rf_u32 b, int add = 1) {  \
        if (DTYPE == RF_FLOAT16)                                                            \
            RF_WGMMA_PRODUCT(columns, half, "f16", upper, transposed, in_a, in_b, in_add);  \
        else                                                                                \
            RF_WGMMA_PRODUCT(columns, half, "bf16", upper, transposed, in_a, in_b, in_add); \
    }
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 32, 16, "{%16, %17, %18, %19}", "%20", "%21")
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 48, 24, "{%24, %25, %26, %27}", "%28", "%29")
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 64, 32, "{%32, %33, %34, %35}", "%36", "%37")
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 80, 40, "{%40, %41, %42, %43}", "%44", "%45")
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 96, 48, "{%48, %49, %50, %51}", "%52", "%53")
RF_WGMMA(rf_wgmma, RF_WGMMA_ROWS_OF_64_BYTES, 0, 112, 56, "{%56, %57, %58, %59}", "%60", "%61")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 32, 16, "{%16, %17, %18, %19}", "%20", "%21")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 64, 32, "{%32, %33, %34, %35}", "%36", "%37")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 96, 48, "{%48, %49, %50, %51}", "%52", "%53")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 128, 64, "{%64, %65, %66, %67}", "%68", "%69")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 192, 96, "{%96, %97, %98, %99}", "%100", "%101")
RF_WGMMA(rf_wgmma_columns, RF_WGMMA_ROWS_OF_128_BYTES, 1, 256, 128, "{%128, %129, %130, %131}", "%132",
         "%133")

/* A and B from shared memory by rows along K of 128 bytes:
 * rf_wgmma_shared<DTYPE>(float (&sums)[N / 2], rf_u32 a, rf_u32 b, int add) */
#define RF_WGMMA_SHARED_PRODUCT(columns, half, type, in_a, in_b, in_add)                             \
    asm volatile("{ .reg .b64 a, b; .reg .pred p; mov.b64 a, {" in_a ", " RF_WGMMA_ROWS_OF_128_BYTES \
                 "}; mov.b64 b, {" in_b ", " RF_WGMMA_ROWS_OF_128_BYTES "}; setp.ne.s32 p, " in_add  \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type          \
                 " {" RF_SUMS_##half "}, a, b, p, 1, 1, 0, 0; }"                                     \
                 : RF_SUMS_OUT_##half(sums)                                                          \
                 : "r"(a), "r"(b), "r"(add))
#define RF_WGMMA_SHARED(columns, half, in_a, in_b, in_add)                                                  \
    template <int DTYPE> RF_INLINE void rf_wgmma_shared(float (&sums)[half], rf_u32 a, rf_u32 b, int add) { \
        if (DTYPE == RF_FLOAT16)                                                                            \
            RF_WGMMA_SHARED_PRODUCT(columns, half, "f16", in_a, in_b, in_add);                              \
        else                                                                                                \
            RF_WGMMA_SHARED_PRODUCT(columns, half, "bf16", in_a, in_b, in_add);                             \
    }
RF_WGMMA_SHARED(48, 24, "%24", "%25", "%26")
RF_WGMMA_SHARED(64, 32, "%32", "%33", "%34")
RF_WGMMA_SHARED(128, 64, "%64", "%65", "%66")

#endif
