/* rf_gather: reads rows of a table by their indices and keeps nothing: the ceiling of every embedding bag.
 *
 * Shapes: table [rows, ROW_BYTES], 16-byte aligned; ids [lookups], each a row; checksum [4], may be NULL;
 * written [lookups / EVERY, ROW_BYTES]. Computes, if checksum is not NULL, the exclusive or of all rows read:
 * [4] for the words of 16 bytes. Timed calls pass NULL, which the compiler cannot know. With EVERY, each
 * EVERY-th row is written unchanged: as many bytes as the sums of bags of EVERY lookups; with 1 a copy of all
 * rows. With EVERY 0 nothing is written.
 *
 * Thread mapping. A warp has an equal, contiguous share of the indices. It loads 32 of them at once, one load
 * before their use, and exchanges them by shuffles. LANES lanes read a row with 16-byte loads, so that a warp
 * reads ROWS rows at once; IN_FLIGHT loads are issued before the first is used. ROLLING 1 loads a new row for
 * each row used, ROLLING 0 loads IN_FLIGHT rows after as many were used. L1 0 keeps rows out of the L1 cache.
 *
 * Launch: any grid, 256 threads, no shared memory. BLOCKS: blocks per SM for which registers must suffice.
 */

#define LANES (ROW_BYTES / 16 < 32 ? ROW_BYTES / 16 : 32)
#define VECTORS (ROW_BYTES / 16 / LANES)
#define ROWS (32 / LANES)
#define STEPS (32 / ROWS)
#define ALL_LANES 0xffffffffu

static_assert(ROW_BYTES % 16 == 0 && (LANES & (LANES - 1)) == 0 && VECTORS * LANES * 16 == ROW_BYTES,
              "a row is a power of two of 16-byte words, up to 32, or a multiple of 32 of them");
static_assert(STEPS % IN_FLIGHT == 0, "the rows in flight must divide the steps of a warp's 32 ids");

struct piece {
    uint4 word[VECTORS];
};

static __device__ __forceinline__ uint4 load_word(const uint4 *from) {
#if L1
    return __ldg(from);
#else
    uint4 word;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
        : "l"(from));
    return word;
#endif
}

/* This lane's part of a row; zeros for row -1, past the end of the share. */
static __device__ __forceinline__ piece load_row(const uint4 *table, int row, int column) {
    piece part = {};
    if (row >= 0) {
        const uint4 *from = table + (long long)row * (ROW_BYTES / 16) + column;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) part.word[v] = load_word(from + v * LANES);
    }
    return part;
}

static __device__ __forceinline__ void add(uint4 *sum, const piece &part) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        sum->x ^= part.word[v].x;
        sum->y ^= part.word[v].y;
        sum->z ^= part.word[v].z;
        sum->w ^= part.word[v].w;
    }
}

/* Stores the row of lookup `place` if it is to be written. */
static __device__ __forceinline__ void keep(uint4 *written, const piece &part, int place, int end,
                                            int column) {
#if EVERY
    if ((place + 1) % EVERY != 0 || place >= end) return;
    uint4 *to = written + (long long)(place / EVERY) * (ROW_BYTES / 16) + column;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) to[v * LANES] = part.word[v];
#endif
}

static __device__ __forceinline__ int load_id(const long long *ids, int place, int end) {
    return place < end ? (int)__ldg(ids + place) : -1;
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    rf_gather(const uint4 *table, const long long *ids, int lookups, unsigned *checksum, uint4 *written) {
    const int lane = threadIdx.x % 32, slot = lane / LANES, column = lane % LANES;
    const long long warp = blockIdx.x * 8ll + threadIdx.x / 32, warps = gridDim.x * 8ll;
    const int begin = (int)(lookups * warp / warps), end = (int)(lookups * (warp + 1) / warps);
    uint4 sum = {};
    int now = load_id(ids, begin + lane, end), next = load_id(ids, begin + 32 + lane, end);
    piece flight[IN_FLIGHT];
#if ROLLING
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++)
        flight[u] = load_row(table, __shfl_sync(ALL_LANES, now, u * ROWS + slot), column);
#endif
    for (int place = begin; place < end; place += 32) {
        const int after = load_id(ids, place + 64 + lane, end);
        /* Not unrolled: the compiler would shuffle all ids first, and spill them. */
#pragma unroll 1
        for (int step = 0; step < STEPS; step += IN_FLIGHT) {
#if ROLLING
            const int coming = step + IN_FLIGHT;
            const int ids_coming = coming < STEPS ? now : next;
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                const int id = __shfl_sync(ALL_LANES, ids_coming, (coming % STEPS + u) * ROWS + slot);
                add(&sum, flight[u]);
                keep(written, flight[u], place + (step + u) * ROWS + slot, end, column);
                flight[u] = load_row(table, id, column);
            }
#else
            /* All indices first: the compiler treats a load between two shuffles as divergent and waits for
             * it at the reconvergence. */
            int id[IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) id[u] = __shfl_sync(ALL_LANES, now, (step + u) * ROWS + slot);
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) flight[u] = load_row(table, id[u], column);
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                add(&sum, flight[u]);
                keep(written, flight[u], place + (step + u) * ROWS + slot, end, column);
            }
#endif
        }
        now = next;
        next = after;
    }
    if (checksum != nullptr) {
        atomicXor(checksum, sum.x);
        atomicXor(checksum + 1, sum.y);
        atomicXor(checksum + 2, sum.z);
        atomicXor(checksum + 3, sum.w);
    }
}
