/* Ranks of a block's entries among the entries with the same digit, in their order, for sort.cu. */
#ifndef RECFUSE_CUDA_BACKWARD_RANKS_CUH
#define RECFUSE_CUDA_BACKWARD_RANKS_CUH

#include "families/fused_backward/entries.cuh"

/* Returns the lanes of `alike` whose number agrees with this lane's in a bit. */
RF_INLINE rf_u32 lanes_with(rf_u32 alike, int number, int bit) {
#ifdef __CUDA_ARCH__
    /* Four instructions; the compiler's code has seven, because it computes the bit twice. */
    asm volatile("{ .reg .pred own; .reg .b32 all, bits;\n"
                 "and.b32 bits, %1, %2;\n"
                 "setp.ne.b32 own, bits, 0;\n"
                 "vote.sync.ballot.b32 all, own, 0xffffffff;\n"
                 "@!own not.b32 all, all;\n"
                 "and.b32 %0, %0, all; }"
                 : "+r"(alike)
                 : "r"(number), "r"(1 << bit));
    return alike;
#else
    const bool own_digit = (number >> bit & 1) != 0;
    const rf_u32 bit_lanes = __ballot_sync(RF_FULL_WARP, own_digit);
    return alike & (own_digit ? bit_lanes : ~bit_lanes);
#endif
}

/* Returns the lanes that have the same digit of `bits` bits, at most MOST_BITS, by a vote per bit: faster
 * than __match_any_sync if lanes have many different digits. -1: no digit. */
template <int MOST_BITS> RF_INLINE rf_u32 lanes_alike(int digit, int bits) {
    rf_u32 alike = __ballot_sync(RF_FULL_WARP, digit >= 0);
#pragma unroll
    for (int bit = 0; bit < MOST_BITS;
         bit++) /* a surplus vote is harmless, and a branch per bit would cost as much */
        if (bit < 6 || bit / 2 * 2 < bits) alike = lanes_with(alike, digit, bit);
    return alike;
}

/* Computes the ranks of `n_items` entries of a lane among those of their warp with the same digit; digit(k): of
 * a lane's entry k, -1: none; keep(k, digit, rank) takes the result. `counts` [1 << bits]: the warp's,
 * initially zero. */
template <int MOST_BITS, int ITEMS, class digit_t, class store_t>
RF_INLINE void ranks_of_warp(rf_u16 *counts, int bits, int n_items, digit_t digit, store_t store) {
    const rf_u32 lower = (1u << threadIdx.x % 32) - 1;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= n_items) break;
        const int own_digit = digit(k);
        const rf_u32 alike = lanes_alike<MOST_BITS>(own_digit, bits), previous = __popc(alike & lower);
        rf_u32 first = 0;
        if (own_digit >= 0) first = counts[own_digit];
        __syncwarp();
        if (own_digit >= 0 && previous == 0) counts[own_digit] = (rf_u16)(first + __popc(alike));
        __syncwarp(); /* before other lanes read it for their next entry: votes do not order memory */
        store(k, own_digit, first + previous);
    }
}

/* Replaces the counts of the first `digits` digits of each warp by the sum over the previous warps; `sums`:
 * totals. Requires a barrier before and after. */
template <int BLOCK, int DIGITS>
RF_INLINE void warps_add(rf_u16 (*counts)[DIGITS], rf_u32 *sums, int digits) {
    enum {
        WARPS = BLOCK / 32,
        PAIRS = DIGITS / 2, /* pairs of digits, whose counts share a word */
        PAIRS_A_THREAD = (PAIRS + BLOCK - 1) / BLOCK, /* pairs of a thread */
        AT_ONCE = 8 /* counts that a thread loads at once */
    };
    rf_u32 *const words = (rf_u32 *)&counts[0][0];
#pragma unroll
    for (int i = 0; i < PAIRS_A_THREAD; i++) {
        const int pair = i * BLOCK + (int)threadIdx.x;
        if (pair >= PAIRS || 2 * pair >= digits) continue;
        rf_u32 sum = 0;
#pragma unroll
        for (int first = 0; first < WARPS; first += AT_ONCE) {
            rf_u32 warp_words[AT_ONCE];
#pragma unroll
            for (int w = 0; w < AT_ONCE; w++) warp_words[w] = words[(first + w) * PAIRS + pair];
#pragma unroll
            for (int w = 0; w < AT_ONCE; w++) {
                words[(first + w) * PAIRS + pair] = sum;
                sum += warp_words[w];
            }
        }
        sums[2 * pair] = sum & 0xffffu;
        sums[2 * pair + 1] = sum >> 16;
    }
}

#endif
