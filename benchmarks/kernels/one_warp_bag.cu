/* rf_one_warp_bag: the usual mapping of a fused embedding bag, a warp per bag for any dimension. A stand-in
 * for libraries with this mapping, not a part of recfuse.
 *
 * Computes: output[b, column_f + d] = sum of table_f[indices[i], d] over i in [offsets[f * bags + b],
 * offsets[f * bags + b + 1]). Rows are float, or half with HALF 1; so is the output; sums are float.
 *
 * Shapes: features [n_features, 3]: address of the table, dim, first column; indices [lookups], offsets
 * [n_features * bags + 1], of type INDEX; output [bags, columns]. Each dim is a multiple of 4, tables and
 * output are aligned to 4 elements.
 *
 * Thread mapping. A lane has 4 columns of a row (16 bytes of float); a warp handles wider rows in steps of
 * 128 columns. In narrower rows surplus lanes are idle. A warp loads 32 indices at once and exchanges them by
 * shuffles; IN_FLIGHT rows are issued before the first is added.
 *
 * Launch: a warp for each feature and bag, 256 threads a block, no shared memory.
 */

#define ALL_LANES 0xffffffffu

struct feature {
    long long table, dim, column;
};

#if HALF
typedef ushort4 four;
static __device__ __forceinline__ float widen(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
static __device__ __forceinline__ unsigned short narrow(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
static __device__ __forceinline__ four rounded(const float4 &sum) {
    return make_ushort4(narrow(sum.x), narrow(sum.y), narrow(sum.z), narrow(sum.w));
}
#else
typedef float4 four;
static __device__ __forceinline__ float widen(float value) { return value; }
static __device__ __forceinline__ four rounded(const float4 &sum) { return sum; }
#endif

static __device__ __forceinline__ void add(float4 &sum, const four &row) {
    sum.x += widen(row.x);
    sum.y += widen(row.y);
    sum.z += widen(row.z);
    sum.w += widen(row.w);
}

/* The sum of a bag's rows, in this lane's four columns of them. */
static __device__ __forceinline__ float4 pool(const four *rows, int vectors, bool idle, const INDEX *indices,
                                              long long begin, long long end, int lane) {
    float4 sum = {};
    for (long long first = begin; first < end; first += 32) {
        const int count = (int)min(end - first, 32ll);
        const long long mine = lane < count ? (long long)__ldg(indices + first + lane) : 0;
        for (int step = 0; step < count; step += IN_FLIGHT) {
            four flight[IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                const long long id = __shfl_sync(ALL_LANES, mine, step + u);
                flight[u] = {};
                if (!idle && step + u < count) flight[u] = __ldg(rows + id * vectors);
            }
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) add(sum, flight[u]);
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    rf_one_warp_bag(const feature *features, const INDEX *indices, const INDEX *offsets, four *output,
                    int n_features, int bags, int columns) {
    const int lane = threadIdx.x % 32;
    const long long warp = blockIdx.x * 8ll + threadIdx.x / 32;
    if (warp >= (long long)n_features * bags) return;
    const feature mine = features[warp / bags];
    const int vectors = (int)mine.dim / 4;
    const long long begin = __ldg(offsets + warp), end = __ldg(offsets + warp + 1);
    four *to = output + ((warp % bags) * columns + mine.column) / 4;
    for (int vector = lane; vector - lane < vectors; vector += 32) {
        const bool idle = vector >= vectors;
        const float4 sum = pool((const four *)mine.table + vector, vectors, idle, indices, begin, end, lane);
        if (!idle) to[vector] = rounded(sum);
    }
}
