/* Entries: which of them a block of the sort has; of sorted ones how many there are, and where the first of a key is. */
#ifndef RECFUSE_CUDA_BACKWARD_ENTRIES_CUH
#define RECFUSE_CUDA_BACKWARD_ENTRIES_CUH

#include "gpu/device/sums.cuh"
#include "families/fused_backward/backward_args.h"

#ifndef RF_ITEMS
#define RF_ITEMS RF_BACKWARD_MOST_ITEMS
#endif
#ifndef RF_GROUPED
#define RF_GROUPED 0
#endif
enum { CHUNK_ENTRIES = RF_BACKWARD_SORT_BLOCK * RF_ITEMS };

/* The first entry of [first, behind) whose key is `key` or more. */
RF_INLINE rf_i64 entries_before(const rf_backward_entry *entries, rf_i64 first, rf_i64 behind, rf_i64 key) {
    while (first < behind) {
        const rf_i64 middle = first + (behind - first) / 2;
        if ((rf_i64)entries[middle].key < key) {
            first = middle + 1;
        } else {
            behind = middle;
        }
    }
    return first;
}

/* A chunk of the sort: so many neighbouring lookups or entries of a segment, the last one fewer. */
struct chunk_t {
    rf_i64 first;
    int size, segment; /* size 0: there is no such chunk */
    rf_u32 number, length; /* among those of the segment; of the segment */
};

/* The chunks of the segment `lane`, before its own and with them. */
struct chunks_t {
    rf_u32 length, before; /* of entries */
    rf_u32 own, upto; /* of chunks */
};
RF_INLINE chunks_t chunks_of(rf_u32 length, rf_u32 size = CHUNK_ENTRIES) {
    chunks_t chunks;
    chunks.length = length;
    chunks.before = rf_sum_of_lanes_to(length) - length;
    chunks.own = length / size + (length % size != 0);
    chunks.upto = rf_sum_of_lanes_to(chunks.own);
    return chunks;
}

/* By each warp; `length`: of the segment `lane`. */
RF_INLINE chunk_t chunk_find(rf_u32 length, rf_u32 number, rf_u32 size = CHUNK_ENTRIES) {
    const chunks_t chunks = chunks_of(length, size);
    const int segment = __popc(__ballot_sync(RF_FULL_WARP, chunks.upto <= number));
    const int lane = min(segment, 31);
    const rf_u32 upto = __shfl_sync(RF_FULL_WARP, chunks.upto, lane);
    const rf_u32 before = __shfl_sync(RF_FULL_WARP, chunks.before, lane);
    chunk_t chunk;
    chunk.number = number - (upto - __shfl_sync(RF_FULL_WARP, chunks.own, lane));
    chunk.length = __shfl_sync(RF_FULL_WARP, length, lane);
    chunk.first = (rf_i64)before + (rf_i64)chunk.number * size;
    chunk.size = segment < 32 ? (int)min(chunk.length - chunk.number * size, size) : 0;
    chunk.segment = lane;
    return chunk;
}

/* What a segment's keys are sorted by: a digit of the pass. Or they are only grouped: by places, of which all keys of a segment
 * have different ones, scattered whatever rows are looked up; a digit is as many of a place's first bits as a segment with so
 * many lookups takes. */
struct digits_t {
    RF_KEY base;
    rf_u32 factor; /* of groups */
    int shift, bits;
    rf_u32 most; /* entries of a digit of groups; one of more, which has a hot row, is cut into parts */
    RF_INLINE rf_u32 place(RF_KEY key) const { return (rf_u32)(key - base) * factor; }
    RF_INLINE int least() const { return __ffs((int)factor) - 1; } /* bit of a place that is not 0 */
    RF_INLINE int of(RF_KEY key) const {
        return RF_GROUPED ? (int)(place(key) >> shift)
                          : (int)((RF_KEY)(key - base) >> shift) & ((1 << bits) - 1);
    }
};
/* `length`: the segment's lookups. */
RF_INLINE int bits_of_groups(rf_u32 length, rf_u32 factor) {
    const int wanted = 32 - __clz((int)((length - 1) / RF_BACKWARD_DIGIT_ENTRIES));
    return min(max(wanted, 1), min((int)RF_BACKWARD_MOST_DIGIT_BITS, 33 - __ffs((int)factor)));
}
RF_INLINE digits_t digits_of(const rf_backward_segments &segments, const rf_backward_counts &counts,
                             int segment, rf_u32 length) {
    digits_t digits;
    digits.base = (RF_KEY)segments.bases[segment];
    digits.factor = RF_GROUPED ? segments.factors[segment] : 0;
    digits.bits = RF_GROUPED ? bits_of_groups(length, digits.factor) : counts.bits;
    digits.shift = RF_GROUPED ? 32 - digits.bits : counts.shift;
    digits.most = min((rf_u32)RF_BACKWARD_ROOM, max((rf_u32)RF_BACKWARD_MANY, 2 * (length >> digits.bits)));
    return digits;
}

/* The counts of the block's chunk [1 << bits] are in shared memory, and are kept. */
RF_INLINE void counts_keep(const rf_backward_counts &to, const rf_u32 *counts, int bits) {
    rf_u32 *const places = to.places + ((rf_u64)blockIdx.x << to.bits);
    for (int digit = threadIdx.x; digit < 1 << bits; digit += RF_BACKWARD_SORT_BLOCK)
        places[digit] = counts[digit];
}

#endif
