/* How lists.cu lists rows of few lookups: one counter a row. Lookups get places in any order, and then each row's bags are
 * sorted by themselves. A row of many lookups, of which there may be a few, is listed bag by bag instead. So the list is
 * that of a stable sort here too. Tables with more such rows go the other way. */
#ifndef RECFUSE_CUDA_BACKWARD_SHORT_ROWS_CUH
#define RECFUSE_CUDA_BACKWARD_SHORT_ROWS_CUH

#include "fused_embedding_bag/backward/small/lists.cuh"

enum { LONG = 64, /* lookups of a row; more are many */ MOST_LONG = 8 /* rows with many */ };

/* Rows [first, last) of the block's, which are listed together: from place `from` to `to`. */
struct span_t {
    rf_u32 first, last, from, to;
    bool kept; /* in the window */
};

struct long_rows_t {
    rf_u32 count, row[MOST_LONG];
};

/* Finds the rows with many lookups, by their counts. */
RF_INLINE void long_rows_find(const room_t &room, rf_u32 n_rows, long_rows_t &found) {
    if (threadIdx.x == 0) found.count = 0;
    __syncthreads();
    for (rf_u32 row = threadIdx.x; row < n_rows; row += BLOCK) {
        if (room.cells[row] <= LONG) continue;
        const rf_u32 number = atomicAdd(&found.count, 1u);
        if (number < MOST_LONG) found.row[number] = row;
    }
    __syncthreads();
}

/* Lanes that share a bag of a long row, so that a lane has about STEPS of its lookups. */
RF_INLINE rf_u32 lanes_of(const feature_t &feature) {
    rf_u32 lanes = 1;
    while (lanes < 32 && lanes * STEPS * (rf_u32)feature.bags < feature.count) lanes *= 2;
    return lanes;
}

/* Writes the span's lookups to the window. Afterwards a counter says where its row ends. Warps take units in turns, and load
 * the next one before they work on this. */
RF_INLINE void bags_list(const feature_t &feature, const room_t &room, rf_u32 first_row, const span_t &span,
                         rf_u16 *to) {
    const rf_u32 lane = threadIdx.x % 32, units = (feature.count + UNIT - 1) / UNIT;
    rf_u32 unit = threadIdx.x / 32;
    RF_INDEX coming[STEPS];
    indices_load(feature, unit * UNIT + lane, coming);
#pragma unroll 1
    for (; unit < units; unit += WARPS) {
        rf_u32 rows[STEPS], places[STEPS];
        int bags[STEPS];
        rows_of(feature, coming, rows);
        indices_load(feature, (unit + WARPS) * UNIT + lane, coming);
        (void)bags_load(feature, room, unit * UNIT + lane, rows, bags);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_u32 row = rows[k] - first_row;
            places[k] = NO_ROW;
            if (rows[k] != NO_ROW && row >= span.first && row < span.last)
                places[k] = atomicAdd(room.cells + row, 1u);
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (places[k] != NO_ROW) to[places[k]] = (rf_u16)bags[k];
    }
}

/* Sorts the bags of each row of the span. Neighbouring units are listed at about the same time, so little is out of order. */
RF_INLINE void rows_sort(const room_t &room, const span_t &span, rf_u16 *list) {
    for (rf_u32 row = span.first + threadIdx.x; row < span.last; row += BLOCK) {
        const rf_u32 first = row > span.first ? room.cells[row - 1] : span.from, behind = room.cells[row];
        if (behind - first > LONG) continue;
        for (rf_u32 i = first + 1; i < behind; i++) {
            const rf_u16 bag = list[i];
            rf_u32 at = i;
            for (; at > first && list[at - 1] > bag; at--) list[at] = list[at - 1];
            if (at != i) list[at] = bag;
        }
    }
}

/* Lists the bags of one row, from to[0] on: each bag as often as it has the row. */
RF_INLINE void long_row_list(const feature_t &feature, rf_u32 row, rf_u16 *to, rf_u32 *of_warps) {
    const rf_u32 lanes = lanes_of(feature), lane = threadIdx.x % lanes, groups = BLOCK / lanes;
    for (int start = 0; start < feature.bags; start += (int)groups) {
        const int bag = start + (int)(threadIdx.x / lanes);
        rf_u32 own = 0;
        if (bag < feature.bags) {
            const rf_u32 first = (rf_u32)(rf_load(feature.offsets + bag) - feature.first);
            const rf_u32 behind = (rf_u32)(rf_load(feature.offsets + bag + 1) - feature.first);
            for (rf_u32 at = first + lane; at < behind; at += lanes)
                own += row_of(feature, rf_load(feature.indices + at)) == row;
        }
        rf_u32 all;
        __syncthreads();
        /* Each lane's part of a bag, one behind the other. */
        const rf_u32 place = rf_sum_of_block_before<(int)WARPS>(own, of_warps, all);
        for (rf_u32 i = 0; i < own; i++) to[place + i] = (rf_u16)bag;
        to += all;
    }
}

/* Lists a span: `to` + a place is where that place is, in the window or in memory. */
RF_INLINE void span_list(const feature_t &feature, const room_t &room, rf_u32 first_row, const span_t &span,
                         const long_rows_t &many, rf_u16 *to, rf_u32 *of_warps) {
    if (span.kept) {
        bags_list(feature, room, first_row, span, to);
        __syncthreads();
        rows_sort(room, span, to);
    }
    for (rf_u32 i = 0; i < many.count; i++) {
        const rf_u32 row = many.row[i];
        if (row < span.first || row >= span.last) continue;
        __syncthreads();
        const rf_u32 first = span.kept && row > span.first ? room.cells[row - 1] : span.from;
        long_row_list(feature, first_row + row, to + first, of_warps);
    }
}

#endif
