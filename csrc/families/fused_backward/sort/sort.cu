/* One pass of a stable radix sort of entries by key: reorders the entries of each segment by RF_DIGIT_BITS
 * bits of the key. Three launches: rf_backward_count counts the digits of each chunk of entries (keys.cu does
 * it for the first pass), rf_backward_places computes the prefix sums over chunks, rf_backward_sort those
 * over digits, and moves the entries. (One sweep with decoupled look-back, Adinets and Merrill, "Onesweep",
 * 2022, is slower here: all chunks run at once, so each would look back at all previous chunks.)
 * The order is that of any stable sort. The first pass drops lookups that do not count.
 *
 * Thread mapping. In the first and the last kernel a block has a chunk; in the last, a warp has RF_ITEMS * 32
 * consecutive entries and a thread every 32nd of them. Shared memory of the last: counts per warp and digit,
 * then the chunk's entries in their new order. Launch: grid [chunks], block [RF_BACKWARD_SORT_BLOCK]. A block
 * of rf_backward_places has RF_BACKWARD_PLACES_DIGITS digits of a segment, a lane each; its warps share the
 * segment's chunks: grid [segments * ceil(digits / those)], the same block.
 */
#ifndef RF_DIGIT_BITS
#define RF_DIGIT_BITS 8
#endif

#include "families/fused_backward/sort/ranks.cuh"

enum {
    BLOCK = RF_BACKWARD_SORT_BLOCK,
    WARPS = BLOCK / 32,
    ITEMS = RF_ITEMS,
    CHUNK = CHUNK_ENTRIES,
    DIGITS = 1 << RF_DIGIT_BITS,
    DIGITS_A_THREAD = (DIGITS + BLOCK - 1) / BLOCK, /* consecutive digits of a thread */
    AT_ONCE = 8, /* counts that a thread loads at once */
    BLOCKS = sizeof(rf_backward_entry) > 8 ? 1 : 2 /* blocks per SM, by registers */
};

struct shared_t {
    union {
        rf_u16 counts[WARPS][DIGITS]; /* later the positions, in the chunk, of a warp's entries of a digit */
        rf_backward_entry entries[CHUNK];
    };
    rf_u32 begins[DIGITS]; /* begin of a digit's entries in the chunk */
    rf_u32 places[DIGITS]; /* begin in the sorted order, minus the begin in the chunk */
    rf_u64 of_warps[WARPS];
};
static_assert(sizeof(shared_t) <= RF_BACKWARD_SORT_SHARED(DIGITS, ITEMS, sizeof(rf_backward_entry)),
              "as the host counts");

RF_INLINE chunk_t chunk_of(const rf_backward_sort_args &args) {
    return chunk_find(rf_load(args.counts.lengths + threadIdx.x % 32), blockIdx.x);
}
RF_INLINE digits_t digits_of(const rf_backward_sort_args &args, int segment) {
    digits_t digits = digits_of(args.segments, args.counts, segment);
    digits.bits = RF_DIGIT_BITS;
    return digits;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK)
    rf_backward_count(const __grid_constant__ rf_backward_sort_args args) {
    __shared__ rf_u32 counts[DIGITS];
    const int thread = threadIdx.x;
    for (int digit = thread; digit < DIGITS; digit += BLOCK) counts[digit] = 0;
    rf_wait_for_previous_kernel();
    const chunk_t chunk = chunk_of(args);
    if (chunk.size == 0) return;
    const digits_t digits = digits_of(args, chunk.segment);
    RF_KEY keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int at = i * BLOCK + thread;
        keys[i] = at < chunk.size ? rf_load(&args.entries[chunk.first + at].key) : (RF_KEY)0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (i * BLOCK + thread < chunk.size) atomicAdd(&counts[digits.of(keys[i])], 1u);
    __syncthreads();
    counts_keep(args.counts, counts, digits.bits);
}

/* Loads a digit's counts of the chunks [start, end), and 0 past the end; `any`: the digit exists. */
RF_INLINE void counts_load(const rf_u32 *places, int start, int end, bool any, rf_u32 (&counts)[AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        counts[i] = any && start + i < end ? places[(rf_i64)(start + i) * DIGITS] : 0;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK)
    rf_backward_places(const __grid_constant__ rf_backward_sort_args args) {
    enum { BLOCK_DIGITS = RF_BACKWARD_PLACES_DIGITS };
    static_assert(BLOCK_DIGITS == 32, "a lane each");
    __shared__ rf_u32 sums[WARPS][BLOCK_DIGITS];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int blocks = (DIGITS + BLOCK_DIGITS - 1) / BLOCK_DIGITS; /* per segment */
    const int segment = (int)blockIdx.x / blocks, digit = (int)blockIdx.x % blocks * BLOCK_DIGITS + lane;
    const rf_u32 length = rf_load(args.counts.lengths + lane);
    const chunks_t chunks = chunks_of(length);
    if (digit - lane >= DIGITS) return;
    const int segment_end = (int)__shfl_sync(RF_FULL_WARP, chunks.upto, segment);
    const int count = (int)__shfl_sync(RF_FULL_WARP, chunks.n_chunks, segment);
    const int warp_chunks = (count + WARPS - 1) / WARPS, begin = segment_end - count + warp * warp_chunks;
    const int end = min(begin + warp_chunks, segment_end);
    const bool any = digit < DIGITS;
    rf_u32 *const places = args.counts.places + digit;
    rf_u32 sum = 0;
    for (int start = begin; start < end; start += AT_ONCE) {
        rf_u32 chunk_counts[AT_ONCE];
        counts_load(places, start, end, any, chunk_counts);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) sum += chunk_counts[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    rf_u32 position = 0, of_digit = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const rf_u32 chunk_counts = sums[w][lane];
        position += w < warp ? chunk_counts : 0;
        of_digit += chunk_counts;
    }
    if (warp == 0) {
        if (any) args.counts.digits[(rf_i64)segment * DIGITS + digit] = of_digit;
        const rf_u32 upto = rf_sum_of_lanes_to(of_digit);
        if (lane == 31 && args.counts.lengths != args.counts.totals)
            atomicAdd(args.counts.totals + segment, upto);
    }
    for (int start = begin; start < end; start += AT_ONCE) {
        rf_u32 chunk_counts[AT_ONCE];
        counts_load(places, start, end, any, chunk_counts);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (any && start + i < end) places[(rf_i64)(start + i) * DIGITS] = position;
            position += chunk_counts[i];
        }
    }
}

/* Replaces the counts of each warp and digit by positions in the chunk relative to the begin of the digit,
 * which goes to `begins`. `places` become positions in the sorted order, minus `begins`. `of_digits`: entries
 * of the segment. Returns the number of entries of the chunk. */
RF_INLINE int digits_scan(shared_t &shared, const rf_u32 *of_digits, int digits) {
    const int digit = (int)threadIdx.x * DIGITS_A_THREAD;
    rf_u32 digit_totals[DIGITS_A_THREAD];
#pragma unroll
    for (int i = 0; i < DIGITS_A_THREAD; i++)
        digit_totals[i] = digit + i < digits ? rf_load(of_digits + digit + i) : 0;
    warps_add<BLOCK, DIGITS>(shared.counts, shared.begins, digits);
    __syncthreads();
    rf_u64 counts[DIGITS_A_THREAD], sum = 0,
                                    counts_total; /* low bits: of the chunk, high bits: of the segment */
#pragma unroll
    for (int i = 0; i < DIGITS_A_THREAD; i++) {
        counts[i] = (rf_u64)digit_totals[i] << 32 | (digit + i < digits ? shared.begins[digit + i] : 0);
        sum += counts[i];
    }
    rf_u64 begin = rf_sum_of_block_before<WARPS>(sum, shared.of_warps, counts_total);
#pragma unroll
    for (int i = 0; i < DIGITS_A_THREAD; i++) {
        if (digit + i < digits) {
            shared.begins[digit + i] = (rf_u32)begin;
            shared.places[digit + i] += (rf_u32)(begin >> 32) - (rf_u32)begin;
        }
        begin += counts[i];
    }
    __syncthreads();
    return (int)(rf_u32)counts_total;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK, BLOCKS)
    rf_backward_sort(const __grid_constant__ rf_backward_sort_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    shared_t &shared = *(shared_t *)memory;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    rf_bytes<16> *const zeros = (rf_bytes<16> *)&shared.counts[0][0];
    for (int i = thread; i < WARPS * DIGITS / 8; i += BLOCK) zeros[i] = {};
    rf_wait_for_previous_kernel();
    const chunk_t chunk = chunk_of(args);
    const rf_u32 total = rf_load(args.counts.totals + lane), upto = rf_sum_of_lanes_to(total);
    if (blockIdx.x == 0 && thread == 31) *args.count = (rf_i64)upto;
    if (chunk.size == 0) return;
    const digits_t digits = digits_of(args, chunk.segment);
    const rf_u32 begin = __shfl_sync(RF_FULL_WARP, upto - total, chunk.segment);
    const RF_KEY invalid_key = (RF_KEY)args.invalid_key;
    RF_KEY keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int at = warp * (ITEMS * 32) + i * 32 + lane;
        keys[i] = at < chunk.size ? rf_load(&args.entries[chunk.first + at].key) : invalid_key;
    }
    const rf_u32 *const places = args.counts.places + (rf_i64)blockIdx.x * DIGITS;
    for (int digit = thread; digit < 1 << digits.bits; digit += BLOCK)
        shared.places[digit] = begin + rf_load(places + digit);
    __syncthreads(); /* all threads have cleared the counts of all warps */
    rf_u32 ranks[ITEMS]; /* the digit in the upper 16 bits */
    ranks_of_warp<RF_DIGIT_BITS, ITEMS>(
        shared.counts[warp], digits.bits, ITEMS,
        [&](int i) { return keys[i] < invalid_key ? digits.of(keys[i]) : -1; },
        [&](int i, int digit, rf_u32 rank) { ranks[i] = (rf_u32)digit << 16 | rank; });
    __syncthreads();
    const int size =
        digits_scan(shared, args.counts.digits + (rf_i64)chunk.segment * DIGITS, 1 << digits.bits);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const rf_u32 digit = ranks[i] >> 16;
        if (keys[i] < invalid_key)
            ranks[i] = (ranks[i] & 0xffff) + shared.counts[warp][digit] + shared.begins[digit];
    }
    RF_VALUE values[ITEMS]; /* loaded late: keys and ranks take the registers before */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int at = warp * (ITEMS * 32) + i * 32 + lane;
        if (keys[i] < invalid_key) values[i] = rf_load(&args.entries[chunk.first + at].value);
    }
    __syncthreads(); /* counts are no longer needed */
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (keys[i] < invalid_key) shared.entries[ranks[i]] = {keys[i], values[i]};
    __syncthreads();
#pragma unroll 4
    for (int at = thread; at < size; at += BLOCK) {
        const rf_backward_entry entry = shared.entries[at];
        args.sorted[(rf_i64)shared.places[digits.of(entry.key)] + at] = entry;
    }
}
