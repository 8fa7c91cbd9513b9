/* One pass of a stable radix sort of entries by key: they go by RF_DIGIT_BITS bits of it, all digits being counted by
 * keys.cu. One sweep over the entries: a chunk's counts of digits become places by looking back at the chunks before
 * (Adinets and Merrill, "Onesweep: a faster least significant digit radix sort for GPUs", 2022; decoupled look-back:
 * Merrill and Garland, 2016). The order is that of any stable sort, so it does not depend on which block was first.
 *
 * A block: the next chunk of RF_BACKWARD_CHUNK entries that nobody has taken; a warp: RF_BACKWARD_ITEMS * 32 of them in
 * order; a thread: every 32nd of those. Shared memory: counts a warp and digit, then the chunk's entries in their new
 * order. Launch: grid [chunks], block [RF_BACKWARD_SORT_BLOCK].
 */
#ifndef RF_DIGIT_BITS
#define RF_DIGIT_BITS 8
#endif

#include "device/common.cuh"
#include "fused_embedding_bag/backward/args.h"

enum {
    BLOCK = RF_BACKWARD_SORT_BLOCK,
    WARPS = BLOCK / 32,
    ITEMS = RF_BACKWARD_ITEMS,
    CHUNK = RF_BACKWARD_CHUNK,
    DIGITS = 1 << RF_DIGIT_BITS,
    EACH = (DIGITS + BLOCK - 1) / BLOCK, /* digits a thread */
    WINDOW = EACH <= 2   ? 8
             : EACH <= 4 ? 4
                         : 2
};

/* A state: of a chunk and digit, how many entries this chunk has, or all up to it. */
#define STATE_COUNT 0x40000000u
#define STATE_TOTAL 0x80000000u
#define STATE_VALUE 0x3fffffffu

struct entries_t {
    RF_KEY keys[CHUNK];
    RF_VALUE values[CHUNK];
};
struct shared_t {
    union {
        rf_u16 counts[WARPS][DIGITS]; /* then where a warp's entries of a digit go, in the chunk */
        entries_t entries;
    };
    rf_u32 begins[DIGITS]; /* where a digit's entries begin in the chunk */
    rf_u32 places[DIGITS]; /* and in the sorted order, less that */
    rf_u32 of_warps[WARPS], chunk;
};
static_assert(sizeof(shared_t) <= RF_BACKWARD_SORT_SHARED(DIGITS, sizeof(RF_KEY) + sizeof(RF_VALUE)),
              "as the host counts");

/* Exclusive sum over the block. */
RF_INLINE rf_u32 block_before(rf_u32 own, rf_u32 *of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    rf_u32 upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const rf_u32 other = __shfl_up_sync(RF_FULL_WARP, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    rf_u32 before = upto - own;
#pragma unroll
    for (int i = 0; i < WARPS; i++) before += i < warp ? of_warps[i] : 0;
    return before;
}

/* Entries of a digit in the chunks before this one: thread t asks for digits t, t + BLOCK, ... Chunks that run at once know
 * only their own counts for a while, so WINDOW of them are asked at a time. */
RF_INLINE void look_back(const rf_backward_sort_args &args, rf_u32 chunk, const rf_u32 *counts,
                         rf_u32 *before) {
    volatile rf_u32 *const own = (volatile rf_u32 *)args.states + (rf_i64)chunk * DIGITS;
    int at[EACH]; /* the chunk that is asked next; -1: all is known */
    bool open = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + threadIdx.x;
        before[i] = 0;
        at[i] = digit < DIGITS ? (int)chunk - 1 : -1;
        open |= at[i] >= 0;
        if (digit < DIGITS) own[digit] = counts[i] | (chunk == 0 ? STATE_TOTAL : STATE_COUNT);
    }
    while (open) {
        rf_u32 states[EACH][WINDOW];
        open = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int w = 0; w < WINDOW; w++) {
                const rf_i64 from = (rf_i64)(at[i] - w) * DIGITS + i * BLOCK + threadIdx.x;
                states[i][w] = at[i] >= w ? ((volatile rf_u32 *)args.states)[from] : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bool goes_on = at[i] >= 0;
#pragma unroll
            for (int w = 0; w < WINDOW; w++) {
                if (!goes_on || states[i][w] == 0) {
                    goes_on = false;
                    continue;
                }
                before[i] += states[i][w] & STATE_VALUE;
                at[i] = states[i][w] & STATE_TOTAL ? -1 : at[i] - 1;
                goes_on = at[i] >= 0;
            }
            open |= at[i] >= 0;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + threadIdx.x;
        if (digit < DIGITS && chunk > 0) own[digit] = (before[i] + counts[i]) | STATE_TOTAL;
    }
}

/* Sums of all digits before each one, in shared memory; `counts` in shared or global memory. A barrier follows. */
RF_INLINE void digits_scan(const rf_u32 *counts, rf_u32 *begins, rf_u32 *of_warps) {
    rf_u32 own[EACH], sum = 0; /* of neighbouring digits: thread * EACH + i */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = threadIdx.x * EACH + i;
        own[i] = digit < DIGITS ? counts[digit] : 0;
        sum += own[i];
    }
    rf_u32 begin = block_before(sum, of_warps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = threadIdx.x * EACH + i;
        if (digit < DIGITS) begins[digit] = begin;
        begin += own[i];
    }
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK)
    rf_backward_sort(const __grid_constant__ rf_backward_sort_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    shared_t &shared = *(shared_t *)memory;
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread == 0) shared.chunk = atomicAdd(args.taken, 1u);
    for (int i = thread; i < WARPS * DIGITS; i += BLOCK) (&shared.counts[0][0])[i] = 0;
    __syncthreads();
    const rf_u32 chunk = shared.chunk;
    const rf_i64 count = args.count != nullptr ? rf_load(args.count) : args.lookups;
    const rf_i64 first = (rf_i64)chunk * CHUNK;
    if (first >= count) return; /* as do all chunks behind: nobody looks back at it */
    const int size = (int)min((rf_i64)CHUNK, count - first);

    RF_KEY keys[ITEMS];
    RF_VALUE values[ITEMS];
    rf_u16 ranks[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int at = warp * (ITEMS * 32) + i * 32 + lane;
        keys[i] = at < size ? rf_load(args.keys + first + at) : (RF_KEY)0;
        values[i] = (RF_VALUE)(first + at);
        if (args.values != nullptr && at < size) values[i] = rf_load(args.values + first + at);
    }
    digits_scan(args.digits, shared.places, shared.of_warps); /* where a digit's entries begin in all */
    /* Ranks among the entries of the same warp and digit. */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const bool any = warp * (ITEMS * 32) + i * 32 + lane < size;
        const int digit = any ? (int)(keys[i] >> args.shift & (DIGITS - 1)) : -1;
        const rf_u32 same = __match_any_sync(RF_FULL_WARP, digit);
        const rf_u32 before = __popc(same & ((1u << lane) - 1));
        rf_u32 base = 0;
        if (any) base = shared.counts[warp][digit];
        __syncwarp();
        if (any && before == 0) shared.counts[warp][digit] = (rf_u16)(base + __popc(same));
        __syncwarp();
        ranks[i] = (rf_u16)(base + before);
    }
    __syncthreads();
    /* A digit's count, and of each warp those of warps before: digits t, t + BLOCK, ... are a thread's. */
    rf_u32 counts[EACH], before[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + thread;
        rf_u32 sum = 0;
        if (digit < DIGITS) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const rf_u32 own = shared.counts[w][digit];
                shared.counts[w][digit] = (rf_u16)sum;
                sum += own;
            }
            shared.begins[digit] = sum;
        }
        counts[i] = sum;
    }
    __syncthreads();
    digits_scan(shared.begins, shared.begins, shared.of_warps);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const bool any = warp * (ITEMS * 32) + i * 32 + lane < size;
        const int digit = any ? (int)(keys[i] >> args.shift & (DIGITS - 1)) : 0;
        ranks[i] += (rf_u16)(shared.counts[warp][digit] + shared.begins[digit]);
    }
    look_back(args, chunk, counts, before);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + thread;
        if (digit < DIGITS) shared.places[digit] += before[i] - shared.begins[digit];
    }
    __syncthreads(); /* nobody needs counts any more */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (warp * (ITEMS * 32) + i * 32 + lane >= size) continue;
        shared.entries.keys[ranks[i]] = keys[i];
        shared.entries.values[ranks[i]] = values[i];
    }
    __syncthreads();
    for (int at = thread; at < size; at += BLOCK) {
        const RF_KEY key = shared.entries.keys[at];
        const rf_i64 to = (rf_i64)shared.places[(int)(key >> args.shift & (DIGITS - 1))] + at;
        args.sorted_keys[to] = key;
        args.sorted_values[to] = shared.entries.values[at];
    }
}
