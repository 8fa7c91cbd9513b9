/* Converts counters of rows and parts (steps.cuh) into positions. */
#ifndef RECFUSE_CUDA_BACKWARD_STEP_SUMS_CUH
#define RECFUSE_CUDA_BACKWARD_STEP_SUMS_CUH

#include "families/fused_backward/small/steps.cuh"

#define NO_POSITIONS 0xffffffffu

/* The output for the begins of a block's rows. */
struct starts_t {
    rf_u32 *of; /* its rows */
    rf_u32 count;
    bool aligned;
};
RF_INLINE starts_t starts_of(const block_t &block) {
    rf_u32 *const of = block.starts + block.first_row;
    return {of, block.rows + block.is_last, (rf_u64)of % 16 == 0};
}
/* Writes the begins of four rows, plus `position`. */
RF_INLINE void starts_write_four(const starts_t &starts, rf_u32 row, rf_bytes<16> begins, rf_u32 position) {
#pragma unroll
    for (int i = 0; i < 4; i++) begins.word[i] += position;
    if (starts.aligned && row + 4 <= starts.count) {
        *(rf_bytes<16> *)(starts.of + row) = begins;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < starts.count) starts.of[row + i] = begins.word[i];
    }
}
/* Writes the begin past the last row, for which there is no counter if all counters are used. */
RF_INLINE void starts_write_last(const starts_t &starts, rf_u32 counters, rf_u32 limit) {
    if (starts.count > counters && threadIdx.x == 0) starts.of[counters] = limit;
}

/* The counters of four rows, and the number of lookups of each row. */
template <int BITS> struct counts_t {
    rf_bytes<16> words[MOST_WORDS];
    rf_u32 rows[4];
};
template <int BITS>
RF_INLINE void counts_load(const steps_t &steps, const rf_bytes<16> *from, counts_t<BITS> &counts) {
#pragma unroll
    for (int i = 0; i < 4; i++) counts.rows[i] = 0;
#pragma unroll
    for (int w = 0; w < MOST_WORDS; w++) {
        counts.words[w] = rf_bytes<16>{};
        if (w < (int)steps.words) counts.words[w] = from[w * (steps.stride / 4)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            counts.rows[i] = counters_t<BITS>::sum(counts.words[w].word[i], counts.rows[i]);
    }
}

/* Replaces each counter by the row's lookups in previous parts, and writes the begins of rows to steps.begins
 * and, plus `position`, to the block's starts. `n_counted`: lookups counted by this thread; `lost`: 0. Returns the
 * total, or NO_POSITIONS if a row has too many lookups. */
template <int BITS>
RF_INLINE rf_u32 steps_sum(const steps_t &steps, const block_t &block, rf_u32 position, rf_u32 n_counted,
                           rf_u32 *of_warps, rf_u32 &lost) {
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = steps.stride / SUMMED;
    const rf_u32 tiles_a_warp = (tiles + WARPS - 1) / WARPS;
    const rf_u32 first = min(warp * tiles_a_warp, tiles), limit = min(first + tiles_a_warp, tiles);
    rf_bytes<16> *const words = (rf_bytes<16> *)steps.counts;
    rf_u32 sum = 0, largest = 0;
#pragma unroll 1
    for (rf_u32 tile = first; tile < limit; tile++) {
        counts_t<BITS> counts;
        counts_load(steps, words + tile * 32 + lane, counts);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += counts.rows[i];
            largest = max(largest, counts.rows[i]);
        }
    }
    rf_u32 missing = n_counted - sum;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        sum += __shfl_xor_sync(RF_FULL_WARP, sum, apart);
        missing += __shfl_xor_sync(RF_FULL_WARP, missing, apart);
    }
    if (lane == 0) {
        of_warps[warp] = sum;
        atomicAdd(&lost, missing);
    }
    if (__syncthreads_or(largest > (rf_u32)counters_t<BITS>::MOST) || lost != 0) return NO_POSITIONS;
    rf_u32 counts_total = 0,
           before = rf_sum_of_warps_before<(int)WARPS>(0u, of_warps, (int)warp, counts_total);
    const starts_t starts = starts_of(block);
#pragma unroll 1
    for (rf_u32 tile = first; tile < limit; tile++) {
        const rf_u32 at = tile * 32 + lane;
        counts_t<BITS> counts;
        counts_load(steps, words + at, counts);
        const rf_u32 tile_sum = counts.rows[0] + counts.rows[1] + counts.rows[2] + counts.rows[3];
        const rf_u32 tile_sum_upto = rf_sum_of_lanes_to(tile_sum);
        rf_bytes<16> begins;
        rf_u32 next = before + tile_sum_upto - tile_sum;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            begins.word[i] = next;
            next += counts.rows[i];
        }
        before += __shfl_sync(RF_FULL_WARP, tile_sum_upto, 31);
        ((rf_bytes<8> *)steps.begins)[at] = {
            {begins.word[0] | begins.word[1] << 16, begins.word[2] | begins.word[3] << 16}};
        starts_write_four(starts, at * 4, begins, position);
        rf_u32 parts[4] = {};
#pragma unroll
        for (int w = 0; w < MOST_WORDS; w++) {
            if (w >= (int)steps.words) break;
            rf_bytes<16> to;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to.word[i] = counters_t<BITS>::sums_before(counts.words[w].word[i], parts[i]);
                parts[i] = counters_t<BITS>::sum(counts.words[w].word[i], parts[i]);
            }
            words[at + w * (steps.stride / 4)] = to;
        }
    }
    starts_write_last(starts, steps.stride, position + counts_total);
    __syncthreads();
    return counts_total;
}

#endif
