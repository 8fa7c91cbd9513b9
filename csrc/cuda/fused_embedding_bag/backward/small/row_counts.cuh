/* One counter for each row of a block: the lookups of rows are counted, and counters become places of the list. */
#ifndef RECFUSE_CUDA_BACKWARD_ROW_COUNTS_CUH
#define RECFUSE_CUDA_BACKWARD_ROW_COUNTS_CUH

#include "fused_embedding_bag/backward/small/lists.cuh"

enum { LONG = 64, /* lookups of a row; more are many */ MOST_LONG = 8 /* rows with many */ };

/* What a block has to do. */
struct block_t {
    rf_u32 first_row, rows;
    bool is_last; /* of the feature */
    rf_u32 *starts; /* of the feature; nullptr: nobody asks */
    rf_u16 *list; /* of all */
    float *factors; /* of the feature, if they are this block's to write; else nullptr */
};

struct long_rows_t {
    rf_u32 count, row[MOST_LONG];
};

/* Counts the lookups of each of the block's rows. Warps take two units in turns, since one takes less time than memory, and load
 * the next two before they work on these. */
RF_INLINE void short_rows_count(const feature_t &feature, const room_t &room, rf_u32 first_row,
                                rf_u32 n_rows) {
    enum { UNITS = sizeof(RF_INDEX) > 4 ? 1 : 2 };
    const rf_u32 lane = threadIdx.x % 32, units = (feature.count + UNIT - 1) / UNIT;
    const rf_u32 cells = rf_shared_kept(room.cells), unread = rf_shared_kept(unread_of(room));
    rf_u32 unit = threadIdx.x / 32;
    RF_INDEX coming[UNITS][STEPS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) indices_load(feature, (unit + u * WARPS) * UNIT + lane, coming[u]);
#pragma unroll 1
    for (; unit < units; unit += UNITS * WARPS) {
        rf_u32 own[UNITS][STEPS];
        bool is_own;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                own[u][k] = cell_of(feature, coming[u][k], first_row, n_rows, cells, unread, is_own);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            indices_load(feature, (unit + (UNITS + u) * WARPS) * UNIT + lane, coming[u]);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int k = 0; k < STEPS; k++) rf_shared_count(own[u][k]);
        }
    }
}

/* Counters of rows become places, as cells_sum makes them, and where rows begin is written to the block's `starts`, if there are, `place` more. Rows with
 * many lookups are put into `many`, which is empty before. Returns the number of all, or NO_PLACES where they are too many: then
 * nothing is done. */
#define NO_PLACES 0xffffffffu
RF_INLINE rf_u32 rows_sum(const room_t &room, const block_t &block, rf_u32 place, rf_u32 *of_warps,
                          long_rows_t &many) {
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = room.cells_bytes / TILE;
    const rf_u32 each = (tiles + WARPS - 1) / WARPS, first = warp * each, behind = min(first + each, tiles);
    rf_bytes<16> *const words = (rf_bytes<16> *)room.cells;
    rf_u32 sum = 0;
#pragma unroll 1
    for (rf_u32 tile = first; tile < behind; tile++) {
        const rf_bytes<16> found = words[tile * 32 + lane];
        rf_u32 most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += found.word[i];
            most = max(most, found.word[i]);
        }
        if (most <= LONG) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (found.word[i] <= LONG) continue;
            const rf_u32 number = atomicAdd(&many.count, 1u);
            if (number < MOST_LONG) many.row[number] = (tile * 32 + lane) * 4 + i;
        }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(RF_FULL_WARP, sum, apart);
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    if (many.count > MOST_LONG) return NO_PLACES;
    rf_u32 before = 0, all = 0;
#pragma unroll
    for (rf_u32 i = 0; i < WARPS; i++) {
        before += i < warp ? of_warps[i] : 0;
        all += of_warps[i];
    }
    rf_u32 *const starts = block.starts + block.first_row;
    const rf_u32 n_starts = block.starts == nullptr ? 0 : block.rows + block.is_last;
    const bool aligned = (rf_u64)starts % 16 == 0;
#pragma unroll 1
    for (rf_u32 tile = first; tile < behind; tile++) {
        const rf_u32 at = tile * 32 + lane, row = at * 4;
        rf_bytes<16> found = words[at];
        const rf_u32 own = found.word[0] + found.word[1] + found.word[2] + found.word[3];
        const rf_u32 upto = rf_sum_of_lanes_to(own);
        rf_u32 next = before + upto - own;
        rf_bytes<16> begins;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const rf_u32 here = next;
            next += found.word[i];
            found.word[i] = here;
            begins.word[i] = place + here;
        }
        words[at] = found;
        before += __shfl_sync(RF_FULL_WARP, upto, 31);
        if (aligned && row + 4 <= n_starts) {
            *(rf_bytes<16> *)(starts + row) = begins;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (row + i < n_starts) starts[row + i] = begins.word[i];
        }
    }
    if (n_starts * 4 > (rf_u32)room.cells_bytes && threadIdx.x == 0)
        starts[block.rows] = place + all; /* no counter is there */
    __syncthreads();
    return all;
}

#endif
