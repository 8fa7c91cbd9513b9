/* Counters of rows and parts (steps.cuh) become places. */
#ifndef RECFUSE_CUDA_BACKWARD_STEP_SUMS_CUH
#define RECFUSE_CUDA_BACKWARD_STEP_SUMS_CUH

#include "families/fused_backward/small/steps.cuh"

#define NO_PLACES 0xffffffffu

/* Where a block writes where its rows begin. */
struct starts_t {
    rf_u32 *of; /* its rows */
    rf_u32 count;
    bool aligned;
};
RF_INLINE starts_t starts_of(const block_t &block) {
    rf_u32 *const of = block.starts + block.first_row;
    return {of, block.rows + block.is_last, (rf_u64)of % 16 == 0};
}
/* Of four rows, `place` more. */
RF_INLINE void starts_write_four(const starts_t &starts, rf_u32 row, rf_bytes<16> begins, rf_u32 place) {
#pragma unroll
    for (int i = 0; i < 4; i++) begins.word[i] += place;
    if (starts.aligned && row + 4 <= starts.count) {
        *(rf_bytes<16> *)(starts.of + row) = begins;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < starts.count) starts.of[row + i] = begins.word[i];
    }
}
/* The last one, where there are so many counters that it has none. */
RF_INLINE void starts_write_last(const starts_t &starts, rf_u32 counters, rf_u32 behind) {
    if (starts.count > counters && threadIdx.x == 0) starts.of[counters] = behind;
}

/* Counters of four rows, and how many lookups the rows have. */
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

/* Counters become how many lookups of the row are in parts before, and steps.begins where rows begin; that is written to the
 * block's starts too, `place` more. `seen`: as counted by this thread; `lost`: 0. Returns the number of all,
 * or NO_PLACES where a row has too many. */
template <int BITS>
RF_INLINE rf_u32 steps_sum(const steps_t &steps, const block_t &block, rf_u32 place, rf_u32 seen,
                           rf_u32 *of_warps, rf_u32 &lost) {
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = steps.stride / SUMMED;
    const rf_u32 each = (tiles + WARPS - 1) / WARPS;
    const rf_u32 first = min(warp * each, tiles), behind = min(first + each, tiles);
    rf_bytes<16> *const words = (rf_bytes<16> *)steps.counts;
    rf_u32 sum = 0, most = 0;
#pragma unroll 1
    for (rf_u32 tile = first; tile < behind; tile++) {
        counts_t<BITS> counts;
        counts_load(steps, words + tile * 32 + lane, counts);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += counts.rows[i];
            most = max(most, counts.rows[i]);
        }
    }
    rf_u32 missing = seen - sum;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        sum += __shfl_xor_sync(RF_FULL_WARP, sum, apart);
        missing += __shfl_xor_sync(RF_FULL_WARP, missing, apart);
    }
    if (lane == 0) {
        of_warps[warp] = sum;
        atomicAdd(&lost, missing);
    }
    if (__syncthreads_or(most > (rf_u32)counters_t<BITS>::MOST) || lost != 0) return NO_PLACES;
    rf_u32 all = 0, before = rf_sum_of_warps_before<(int)WARPS>(0u, of_warps, (int)warp, all);
    const starts_t starts = starts_of(block);
#pragma unroll 1
    for (rf_u32 tile = first; tile < behind; tile++) {
        const rf_u32 at = tile * 32 + lane;
        counts_t<BITS> counts;
        counts_load(steps, words + at, counts);
        const rf_u32 own = counts.rows[0] + counts.rows[1] + counts.rows[2] + counts.rows[3];
        const rf_u32 upto = rf_sum_of_lanes_to(own);
        rf_bytes<16> begins;
        rf_u32 next = before + upto - own;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            begins.word[i] = next;
            next += counts.rows[i];
        }
        before += __shfl_sync(RF_FULL_WARP, upto, 31);
        ((rf_bytes<8> *)steps.begins)[at] = {
            {begins.word[0] | begins.word[1] << 16, begins.word[2] | begins.word[3] << 16}};
        starts_write_four(starts, at * 4, begins, place);
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
    starts_write_last(starts, steps.stride, place + all);
    __syncthreads();
    return all;
}

#endif
