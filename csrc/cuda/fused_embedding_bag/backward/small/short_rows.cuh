/* How lists.cu lists rows of few lookups: one counter a row. Lookups get places in any order, and then each row's bags are
 * sorted by themselves. A row of many lookups, of which there may be a few, is listed bag by bag instead. So the list is
 * that of a stable sort here too. Tables with more such rows go the other way. */
#ifndef RECFUSE_CUDA_BACKWARD_SHORT_ROWS_CUH
#define RECFUSE_CUDA_BACKWARD_SHORT_ROWS_CUH

#include "fused_embedding_bag/backward/small/row_counts.cuh"

/* Rows [first, last) of the block's, which are listed together: from place `from` to `to`. */
struct span_t {
    rf_u32 first, last, from, to;
    bool kept; /* in the window */
};

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
    const rf_u32 n_rows = span.last - span.first;
    const rf_u32 cells = rf_shared_kept(room.cells + span.first);
    const rf_u32 unread = rf_shared_kept(unread_of(room));
    rf_u32 unit = threadIdx.x / 32;
    RF_INDEX coming[STEPS];
    indices_load(feature, unit * UNIT + lane, coming);
#pragma unroll 1
    for (; unit < units; unit += WARPS) {
        rf_u32 places[STEPS];
        bool own[STEPS];
        int bags[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            places[k] = cell_of(feature, coming[k], first_row + span.first, n_rows, cells, unread, own[k]);
        indices_load(feature, (unit + WARPS) * UNIT + lane, coming);
#pragma unroll
        for (int k = 0; k < STEPS; k++) places[k] = rf_shared_count_from(places[k]);
        sound_bags_load(feature, room, unit * UNIT + lane, bags);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (own[k]) to[places[k]] = (rf_u16)bags[k];
    }
}

/* Two bags of 16 bits, of two rows, in their order. */
RF_INLINE void pairs_order(rf_u32 &first, rf_u32 &second) {
    const rf_u32 least = __vminu2(first, second);
    second = __vmaxu2(first, second);
    first = least;
}
/* Batcher's odd-even merge sort of pairs[FIRST ... FIRST + COUNT), of which those from MOST on are not there: they would be the
 * largest, and stay where they are. */
template <int MOST, int FIRST, int COUNT, int APART> RF_INLINE void pairs_merge(rf_u32 *pairs) {
    if constexpr (2 * APART < COUNT) {
        pairs_merge<MOST, FIRST, COUNT, 2 * APART>(pairs);
        pairs_merge<MOST, FIRST + APART, COUNT, 2 * APART>(pairs);
#pragma unroll
        for (int i = FIRST + APART; i + APART < FIRST + COUNT; i += 2 * APART)
            if (i + APART < MOST) pairs_order(pairs[i], pairs[i + APART]);
    } else if constexpr (FIRST + APART < MOST) {
        pairs_order(pairs[FIRST], pairs[FIRST + APART]);
    }
}
template <int MOST, int FIRST, int COUNT> RF_INLINE void pairs_sort(rf_u32 *pairs) {
    if constexpr (COUNT > 1) {
        pairs_sort<MOST, FIRST, COUNT / 2>(pairs);
        pairs_sort<MOST, FIRST + COUNT / 2, COUNT / 2>(pairs);
        pairs_merge<MOST, FIRST, COUNT, 1>(pairs);
    }
}

/* Sorts two rows of at most MOST bags each, which begin at a and b, side by side in registers. */
template <int MOST> RF_INLINE void two_rows_sort(rf_u16 *a, int a_size, rf_u16 *b, int b_size) {
    rf_u32 pairs[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const rf_u32 low = i < a_size ? a[i] : 0xffffu, high = i < b_size ? b[i] : 0xffffu;
        pairs[i] = low | high << 16;
    }
    pairs_sort<MOST, 0, MOST <= 8 ? 8 : 16>(pairs);
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        if (i < a_size) a[i] = (rf_u16)pairs[i];
        if (i < b_size) b[i] = (rf_u16)(pairs[i] >> 16);
    }
}

/* Sorts a row of at most LONG bags by a warp: each goes to the place that says how many are before it. */
RF_INLINE void row_sort(rf_u16 *row, int size) {
    const int lane = threadIdx.x % 32;
    rf_u32 own[LONG / 32], places[LONG / 32];
#pragma unroll
    for (int i = 0; i < LONG / 32; i++) {
        const int at = lane + i * 32;
        own[i] = (at < size ? row[at] : 0xffffu) * LONG + at;
        places[i] = 0;
    }
#pragma unroll 4
    for (int at = 0; at < size; at++) {
        const rf_u32 other = (rf_u32)row[at] * LONG + at;
#pragma unroll
        for (int i = 0; i < LONG / 32; i++) places[i] += other < own[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LONG / 32; i++)
        if (lane + i * 32 < size) row[places[i]] = (rf_u16)(own[i] / LONG);
}

/* Sorts the bags of each row of the span. Most rows have few: a lane sorts two of them in its registers. */
RF_INLINE void rows_sort(const room_t &room, const span_t &span, rf_u16 *list) {
    enum { FEW = 8, MORE = 12, SOME = 16 };
    for (rf_u32 start = span.first; start < span.last; start += 2 * BLOCK) {
        rf_u32 firsts[2];
        int sizes[2];
        rf_u32 warps[2]; /* rows that are the warp's */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const rf_u32 row = start + i * BLOCK + threadIdx.x;
            firsts[i] = span.from;
            sizes[i] = 0;
            if (row < span.last) {
                if (row > span.first) firsts[i] = room.cells[row - 1];
                sizes[i] = (int)(room.cells[row] - firsts[i]);
            }
            warps[i] = __ballot_sync(RF_FULL_WARP, sizes[i] > SOME && sizes[i] <= LONG);
        }
        const int few[2] = {sizes[0] > SOME ? 0 : sizes[0], sizes[1] > SOME ? 0 : sizes[1]};
        const int most = max(few[0], few[1]);
        if (__any_sync(RF_FULL_WARP, most > MORE)) {
            two_rows_sort<SOME>(list + firsts[0], few[0], list + firsts[1], few[1]);
        } else if (__any_sync(RF_FULL_WARP, most > FEW)) {
            two_rows_sort<MORE>(list + firsts[0], few[0], list + firsts[1], few[1]);
        } else if (__any_sync(RF_FULL_WARP, most > 1)) {
            two_rows_sort<FEW>(list + firsts[0], few[0], list + firsts[1], few[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (rf_u32 left = warps[i]; left != 0; left &= left - 1) {
                const int lane = __ffs(left) - 1;
                const rf_u32 first = __shfl_sync(RF_FULL_WARP, firsts[i], lane);
                row_sort(list + first, __shfl_sync(RF_FULL_WARP, sizes[i], lane));
            }
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
