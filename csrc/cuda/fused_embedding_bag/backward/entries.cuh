/* Entries: which of them a block of the sort has; of sorted ones how many there are, and where the first of a key is. */
#ifndef RECFUSE_CUDA_BACKWARD_ENTRIES_CUH
#define RECFUSE_CUDA_BACKWARD_ENTRIES_CUH

#include "device/sums.cuh"
#include "fused_embedding_bag/backward/args.h"

#ifndef RF_ITEMS
#define RF_ITEMS RF_BACKWARD_MOST_ITEMS
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

/* A chunk of the sort: CHUNK_ENTRIES neighbouring lookups or entries of a segment, the last one fewer. */
struct chunk_t {
    rf_i64 first;
    int size, segment; /* size 0: there is no such chunk */
};

/* The chunks of the segment `lane`, before its own and with them. */
struct chunks_t {
    rf_u32 length, before; /* of entries */
    rf_u32 own, upto; /* of chunks */
};
RF_INLINE chunks_t chunks_of(rf_u32 length) {
    chunks_t chunks;
    chunks.length = length;
    chunks.before = rf_sum_of_lanes_to(length) - length;
    chunks.own = length / CHUNK_ENTRIES + (length % CHUNK_ENTRIES != 0);
    chunks.upto = rf_sum_of_lanes_to(chunks.own);
    return chunks;
}

/* By each warp; `length`: of the segment `lane`. */
RF_INLINE chunk_t chunk_find(rf_u32 length, rf_u32 number) {
    const chunks_t chunks = chunks_of(length);
    const int segment = __popc(__ballot_sync(RF_FULL_WARP, chunks.upto <= number));
    const int lane = min(segment, 31);
    const rf_u32 within =
        number - (__shfl_sync(RF_FULL_WARP, chunks.upto, lane) - __shfl_sync(RF_FULL_WARP, chunks.own, lane));
    const rf_u32 before = __shfl_sync(RF_FULL_WARP, chunks.before, lane);
    const rf_u32 left = __shfl_sync(RF_FULL_WARP, length, lane) - within * CHUNK_ENTRIES;
    chunk_t chunk;
    chunk.first = (rf_i64)before + (rf_i64)within * CHUNK_ENTRIES;
    chunk.size = segment < 32 ? (int)min(left, (rf_u32)CHUNK_ENTRIES) : 0;
    chunk.segment = lane;
    return chunk;
}

/* The counts of the block's chunk [digits] are in shared memory, and are kept. */
RF_INLINE void counts_keep(const rf_backward_counts &to, const rf_u32 *counts) {
    rf_u32 *const places = to.places + ((rf_u64)blockIdx.x << to.bits);
    for (int digit = threadIdx.x; digit < 1 << to.bits; digit += RF_BACKWARD_SORT_BLOCK)
        places[digit] = counts[digit];
}

#endif
