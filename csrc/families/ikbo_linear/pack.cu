/* Packs weights and bias in the layout that ikbo_linear_fused.cu and small.cu read, and sets their counters
 * to 0.
 *
 * The weight [m, k] of a level becomes images of its slots: [slot, rank, row, 32 of k], with zeros beyond m
 * and k. The four chunks of 16 bytes of a row are in the order of the tensor cores' swizzle of 64 bytes:
 * chunk c of row r is at c ^ (r / 2 % 4). Every call packs, because a change of a weight cannot be detected;
 * 1.6 MB take 3 microseconds. The bias fills the sums of a bias-only item, the parent of items without a
 * parent.
 * A thread has one chunk of 16 bytes of a level (blockIdx.y), then one float of its bias-only item. Launch:
 * grid [ceil(most chunks or floats of a level / RF_BLOCK), levels], block [RF_BLOCK].
 */
#include "gpu/device/common.cuh"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/bias.cuh"

#ifndef RF_DTYPE
#define RF_DTYPE 1
#endif
#ifndef RF_ROWS
#define RF_ROWS 224
#endif
#ifndef RF_BLOCK
#define RF_BLOCK 256
#endif

enum { CHUNK = 8, CHUNKS = RF_FUSED_K / CHUNK }; /* elements of a chunk; chunks of a row */

RF_INLINE void pack(const rf_pack_level &level, int m, int ranks, int at) {
    const int chunk = at % CHUNKS, row = at / CHUNKS % RF_ROWS, part = at / (CHUNKS * RF_ROWS);
    const int out_row = part % ranks * RF_ROWS + row, k = part / ranks * RF_FUSED_K + chunk * CHUNK;
    const rf_u16 *from = level.weight + out_row * level.pitch + k;
    rf_bytes<16> to;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
        const rf_u32 low = out_row < m && k + i < level.k ? from[i] : 0u;
        const rf_u32 high = out_row < m && k + i + 1 < level.k ? from[i + 1] : 0u;
        to.word[i / 2] = low | high << 16;
    }
    const int position = (part * RF_ROWS + row) * CHUNKS + (chunk ^ (row / 2 % CHUNKS));
    ((rf_bytes<16> *)level.packed)[position] = to;
}

/* Returns float `at` of [strips, rank, RF_ROWS / 8, 128 threads, 4]: rows as in the head of
 * ikbo_linear_fused.cu. */
RF_INLINE float bias_of(const rf_pack_args &args, int at) {
    const int rank = at / (RF_ROWS * RF_FUSED_COLUMNS) % args.ranks;
    const int inside = at % (RF_ROWS * RF_FUSED_COLUMNS);
    const int row = rank * RF_ROWS + inside / 512 * 8 + inside / 4 % 4 * 2 + inside % 2;
    return rf_bias_of<RF_DTYPE>(args.bias, row, args.m);
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_ikbo_pack(const __grid_constant__ rf_pack_args args) {
    rf_begin_next_kernel();
    const rf_pack_level &level = args.levels[blockIdx.y];
    const int at = blockIdx.x * RF_BLOCK + threadIdx.x;
    if (at < level.slots * args.ranks * RF_ROWS * CHUNKS) pack(level, args.m, args.ranks, at);
    if (at == 0 && level.done != nullptr) level.done[0] = level.done[RF_SMALL_TICKET] = 0;
    if (level.bias != nullptr && at < args.strips * args.ranks * RF_ROWS * RF_FUSED_COLUMNS)
        level.bias[at] = bias_of(args, at);
}
