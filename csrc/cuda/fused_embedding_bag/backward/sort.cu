/* One pass of a stable radix sort of entries by key: they go by RF_DIGIT_BITS bits of it. Three launches, each over chunks of
 * RF_BACKWARD_CHUNK entries: rf_backward_count counts the digits of each chunk, rf_backward_places makes of them where a
 * chunk's entries of a digit go, rf_backward_sort takes them there. (One sweep with decoupled look-back, as in Adinets and
 * Merrill, "Onesweep", 2022, is slower here: all chunks run at once, so each would look back at all before it.)
 * The order is that of any stable sort.
 *
 * A block of the first and the last: a chunk; a warp: RF_BACKWARD_ITEMS * 32 entries of it in order; a thread: every 32nd of
 * those. Shared memory of the last: counts a warp and digit, then the chunk's entries in their new order.
 * Launch: grid [chunks], block [RF_BACKWARD_SORT_BLOCK]; of rf_backward_places, a warp a digit: grid [digits / 8], block
 * [RF_BACKWARD_BLOCK].
 */
#ifndef RF_DIGIT_BITS
#define RF_DIGIT_BITS 8
#endif

#include "device/sums.cuh"
#include "fused_embedding_bag/backward/args.h"

enum {
    BLOCK = RF_BACKWARD_SORT_BLOCK,
    WARPS = BLOCK / 32,
    ITEMS = RF_BACKWARD_ITEMS,
    CHUNK = RF_BACKWARD_CHUNK,
    DIGITS = 1 << RF_DIGIT_BITS,
    EACH = (DIGITS + BLOCK - 1) / BLOCK /* digits a thread */
};

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
    rf_u32 of_warps[WARPS];
};
static_assert(sizeof(shared_t) <= RF_BACKWARD_SORT_SHARED(DIGITS, sizeof(RF_KEY) + sizeof(RF_VALUE)),
              "as the host counts");

/* Counts of digits become what all digits before have, in shared memory. A barrier follows. */
RF_INLINE void digits_scan(rf_u32 *begins, rf_u32 *of_warps) {
    rf_u32 own[EACH], sum = 0, all; /* of neighbouring digits: thread * EACH + i */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = threadIdx.x * EACH + i;
        own[i] = digit < DIGITS ? begins[digit] : 0;
        sum += own[i];
    }
    rf_u32 begin = rf_sum_of_block_before<WARPS>(sum, of_warps, all);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = threadIdx.x * EACH + i;
        if (digit < DIGITS) begins[digit] = begin;
        begin += own[i];
    }
}

RF_INLINE rf_i64 count_of(const rf_backward_sort_args &args) {
    return args.count != nullptr ? rf_load(args.count) : args.lookups;
}
RF_INLINE int digit_of(const rf_backward_sort_args &args, RF_KEY key) {
    return (int)(key >> args.shift & (DIGITS - 1));
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK)
    rf_backward_count(const __grid_constant__ rf_backward_sort_args args) {
    __shared__ rf_u32 counts[DIGITS];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    const rf_i64 first = (rf_i64)blockIdx.x * CHUNK, count = count_of(args);
    RF_KEY keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const rf_i64 at = first + i * BLOCK + thread;
        keys[i] = at < count ? rf_load(args.keys + at) : (RF_KEY)0;
    }
    for (int digit = thread; digit < DIGITS; digit += BLOCK) counts[digit] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (first + i * BLOCK + thread < count) atomicAdd(&counts[digit_of(args, keys[i])], 1u);
    __syncthreads();
    for (int digit = thread; digit < DIGITS; digit += BLOCK) {
        args.places[(rf_i64)digit * args.chunks + blockIdx.x] = counts[digit];
        if (counts[digit] != 0) atomicAdd(args.digits + digit, counts[digit]);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_places(const __grid_constant__ rf_backward_sort_args args) {
    enum { EACH_LANE = 8, PLACES_WARPS = RF_BACKWARD_BLOCK / 32 };
    __shared__ rf_u32 of_warps[PLACES_WARPS];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int first = (int)blockIdx.x * PLACES_WARPS, digit = first + warp;
    rf_u32 before = 0; /* entries of digits before the block's, then before the warp's */
    for (int i = thread; i < first; i += RF_BACKWARD_BLOCK) before += args.digits[i];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) before += __shfl_xor_sync(RF_FULL_WARP, before, apart);
    if (lane == 0) of_warps[warp] = before;
    __syncthreads();
    if (digit >= DIGITS) return;
    before = 0;
    for (int w = 0; w < PLACES_WARPS; w++) before += of_warps[w];
    for (int i = first; i < digit; i++) before += args.digits[i];
    rf_u32 *places = args.places + (rf_i64)digit * args.chunks;
    for (int start = 0; start < args.chunks; start += 32 * EACH_LANE) {
        rf_u32 own[EACH_LANE], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            const int at = start + lane * EACH_LANE + i;
            own[i] = at < args.chunks ? places[at] : 0;
        }
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) sum += own[i];
        const rf_u32 upto = rf_sum_of_lanes_to(sum);
        rf_u32 place = before + upto - sum;
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            const int at = start + lane * EACH_LANE + i;
            if (at < args.chunks) places[at] = place;
            place += own[i];
        }
        before += __shfl_sync(RF_FULL_WARP, upto, 31);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK)
    rf_backward_sort(const __grid_constant__ rf_backward_sort_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    shared_t &shared = *(shared_t *)memory;
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const rf_i64 first = (rf_i64)blockIdx.x * CHUNK, count = count_of(args);
    if (first >= count) return;
    const int size = (int)min((rf_i64)CHUNK, count - first);
    rf_u32 places[EACH]; /* of digits t, t + BLOCK, ... */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + thread;
        places[i] = digit < DIGITS ? rf_load(args.places + (rf_i64)digit * args.chunks + blockIdx.x) : 0;
    }
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
    rf_u32 *const zeros = (rf_u32 *)&shared.counts[0][0];
    for (int i = thread; i < WARPS * DIGITS / 2; i += BLOCK) zeros[i] = 0;
    __syncthreads();
    /* Ranks among the entries of the same warp and digit. */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const bool any = warp * (ITEMS * 32) + i * 32 + lane < size;
        const int digit = any ? digit_of(args, keys[i]) : -1;
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
    }
    __syncthreads();
    digits_scan(shared.begins, shared.of_warps);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const bool any = warp * (ITEMS * 32) + i * 32 + lane < size;
        const int digit = any ? digit_of(args, keys[i]) : 0;
        ranks[i] += (rf_u16)(shared.counts[warp][digit] + shared.begins[digit]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int digit = i * BLOCK + thread;
        if (digit < DIGITS) shared.places[digit] = places[i] - shared.begins[digit];
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
        const rf_i64 to = (rf_i64)shared.places[digit_of(args, key)] + at;
        args.sorted_keys[to] = key;
        args.sorted_values[to] = shared.entries.values[at];
    }
}
