/* Entries: the chunk of a block of the sort, and searches in sorted entries. */
#ifndef RECFUSE_CUDA_BACKWARD_ENTRIES_CUH
#define RECFUSE_CUDA_BACKWARD_ENTRIES_CUH

#include "gpu/device/sums.cuh"
#include "families/fused_backward/backward_args.h"

#ifndef RF_ITEMS
#define RF_ITEMS RF_BACKWARD_MOST_ITEMS
#endif
enum { CHUNK_ENTRIES = RF_BACKWARD_SORT_BLOCK * RF_ITEMS };

/* Returns the first entry of [first, end) whose key is at least `key`. */
RF_INLINE rf_i64 entries_before(const rf_backward_entry *entries, rf_i64 first, rf_i64 end, rf_i64 key) {
    while (first < end) {
        const rf_i64 middle = first + (end - first) / 2;
        if ((rf_i64)entries[middle].key < key) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return first;
}

/* A chunk of the sort: consecutive lookups or entries of a segment. The last chunk of a segment may be
 * shorter. */
struct chunk_t {
    rf_i64 first;
    int size, segment; /* size 0: no such chunk */
    rf_u32 number, length; /* number within the segment; length of the segment */
};

/* The chunks of segment `lane`: before it, and up to its end. */
struct chunks_t {
    rf_u32 length, before; /* of entries */
    rf_u32 n_chunks, upto; /* of chunks */
};
RF_INLINE chunks_t chunks_of(rf_u32 length, rf_u32 size = CHUNK_ENTRIES) {
    chunks_t chunks;
    chunks.length = length;
    chunks.before = rf_sum_of_lanes_to(length) - length;
    chunks.n_chunks = length / size + (length % size != 0);
    chunks.upto = rf_sum_of_lanes_to(chunks.n_chunks);
    return chunks;
}

/* Finds a chunk, by each warp; `length`: of segment `lane`. */
RF_INLINE chunk_t chunk_find(rf_u32 length, rf_u32 number, rf_u32 size = CHUNK_ENTRIES) {
    const chunks_t chunks = chunks_of(length, size);
    const int segment = __popc(__ballot_sync(RF_FULL_WARP, chunks.upto <= number));
    const int lane = min(segment, 31);
    const rf_u32 upto = __shfl_sync(RF_FULL_WARP, chunks.upto, lane);
    const rf_u32 before = __shfl_sync(RF_FULL_WARP, chunks.before, lane);
    chunk_t chunk;
    chunk.number = number - (upto - __shfl_sync(RF_FULL_WARP, chunks.n_chunks, lane));
    chunk.length = __shfl_sync(RF_FULL_WARP, length, lane);
    chunk.first = (rf_i64)before + (rf_i64)chunk.number * size;
    chunk.size = segment < 32 ? (int)min(chunk.length - chunk.number * size, size) : 0;
    chunk.segment = lane;
    return chunk;
}

/* The digit of this pass, of a segment's keys. */
struct digits_t {
    RF_KEY base;
    int shift, bits;
    RF_INLINE int of(RF_KEY key) const { return (int)((RF_KEY)(key - base) >> shift) & ((1 << bits) - 1); }
};
RF_INLINE digits_t digits_of(const rf_backward_segments &segments, const rf_backward_counts &counts,
                             int segment) {
    return {(RF_KEY)segments.bases[segment], counts.shift, counts.bits};
}

/* Writes the digit counts of the block's chunk, [1 << bits] in shared memory, to global memory. */
RF_INLINE void counts_keep(const rf_backward_counts &to, const rf_u32 *counts, int bits) {
    rf_u32 *const places = to.places + ((rf_u64)blockIdx.x << to.bits);
    for (int digit = threadIdx.x; digit < 1 << bits; digit += RF_BACKWARD_SORT_BLOCK)
        places[digit] = counts[digit];
}

#endif
