/* The bags of a block's chunk of lookups: they are searched in the offsets, or, if all bags of a segment have the same
 * number of lookups, computed and checked. Requires the constants of keys.cu. */
#ifndef RECFUSE_CUDA_BACKWARD_CHUNK_BAGS_CUH
#define RECFUSE_CUDA_BACKWARD_CHUNK_BAGS_CUH

#include "gpu/device/bags.cuh"
#include "families/fused_backward/entries.cuh"

struct shared_t {
    rf_u32 begin_bits[WORDS]; /* a bit at the begin of each bag */
    rf_u16 before[WORDS]; /* number of bits in the previous words */
    rf_u16 bags[CHUNK]; /* slot of each bit, relative to the chunk's first */
    rf_u32 counts[1 << RF_BACKWARD_MOST_DIGIT_BITS];
    rf_u32 slots_found[2];
};

/* A slot is a bag of a feature, with the number feature * bags + bag. Returns the last slot of [first,
 * limit) that begins at or before `position`. Called by a warp, which compares 32 offsets at once. */
RF_INLINE rf_u32 slot_search(const rf_backward_keys_args &args, rf_u32 first, rf_u32 limit, rf_i64 position) {
    const rf_u32 lane = threadIdx.x % 32;
    rf_u32 count = limit - first;
    while (count > 1) {
        const rf_u32 step = (count + 31) / 32, at = lane * step;
        const bool before = at < count && rf_load(args.offsets + first + at) <= position;
        const rf_u32 begin_lanes = __ballot_sync(RF_FULL_WARP, before);
        const rf_u32 last = begin_lanes == 0 ? 0 : 31 - __clz(begin_lanes);
        first += last * step;
        count = min(step, count - last * step);
    }
    return first;
}

RF_INLINE rf_u32 far_slot(const rf_backward_keys_args &args, rf_u32 first, rf_u32 last, rf_i64 position) {
    while (last > first) {
        const rf_u32 middle = last - (last - first) / 2;
        if (rf_load(args.offsets + middle) <= position) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    return first;
}

RF_INLINE bool bag_holds(const rf_backward_keys_args &args, rf_u32 slot, rf_i64 position) {
    const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
    return rf_is_bag(slot == 0, from, to, args.lookups) && from <= position && position < to;
}

/* Returns the number of lookups of segment `lane` according to the offsets. Invalid offsets skip no lookup:
 * segments are contiguous. */
RF_INLINE rf_u32 length_of(const rf_backward_keys_args &args) {
    const int lane = threadIdx.x % 32;
    rf_i64 begin = args.lookups;
    if (lane < args.segments.count) {
        begin = rf_load(args.offsets + args.segments.slots[lane]);
        begin = lane == 0 ? 0 : min(max(begin, (rf_i64)0), args.lookups);
    }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const rf_i64 lower = __shfl_up_sync(RF_FULL_WARP, begin, apart);
        if (lane >= apart) begin = max(begin, lower);
    }
    const rf_i64 next = __shfl_sync(RF_FULL_WARP, begin, min(lane + 1, 31));
    return (rf_u32)((lane == 31 ? args.lookups : next) - begin);
}

/* Marks the begins of the bags [first_slot, last_slot] of a chunk. Returns true if their offsets are
 * valid. */
RF_INLINE bool bags_mark(const rf_backward_keys_args &args, const chunk_t &chunk, rf_u32 first_slot,
                         rf_u32 last_slot, shared_t &shared) {
    const int thread = threadIdx.x, count = (int)(last_slot - first_slot) + 1;
    bool bad = false;
    for (int i = thread; i < count; i += BLOCK) {
        const rf_u32 slot = first_slot + i;
        const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
        bad |= !rf_is_bag(slot == 0, from, to, args.lookups) || (i == 0 && from > chunk.first) ||
               (slot == last_slot && to < chunk.first + chunk.size);
        const rf_i64 at = max(from - chunk.first, (rf_i64)0);
        if (to > chunk.first && to > from && at < chunk.size)
            atomicOr(&shared.begin_bits[at / 32], 1u << at % 32);
    }
    if (__syncthreads_or(bad)) return false;
    if (thread < 32) {
        enum { EACH = WORDS / 32 };
        rf_u32 n_bits = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) n_bits += __popc(shared.begin_bits[thread * EACH + i]);
        rf_u32 before = rf_sum_of_lanes_to(n_bits) - n_bits;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            shared.before[thread * EACH + i] = (rf_u16)before;
            before += __popc(shared.begin_bits[thread * EACH + i]);
        }
    }
    __syncthreads();
    for (int i = thread; i < count; i += BLOCK) {
        const rf_u32 slot = first_slot + i;
        const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
        const rf_i64 at = max(from - chunk.first, (rf_i64)0);
        if (to <= chunk.first || to <= from || at >= chunk.size) continue;
        const rf_u32 below = shared.begin_bits[at / 32] & ((1u << at % 32) - 1);
        shared.bags[shared.before[at / 32] + __popc(below)] = (rf_u16)i;
    }
    __syncthreads();
    return true;
}

/* Returns the number of a lookup's bag within the chunk. The lanes of a warp share a word. */
RF_INLINE rf_u32 bag_number(const shared_t &shared, int word) {
    const rf_u32 upto = 0xffffffffu >> (31 - threadIdx.x % 32);
    return shared.bags[shared.before[word] + __popc(shared.begin_bits[word] & upto) - 1];
}

/* The bags of a chunk if all bags of its segment have equally many lookups: the position of a lookup gives
 * its bag. */
struct even_t {
    rf_u32 lookups_a_bag; /* lookups of a bag; 0: the numbers differ */
    rf_u32 first, last; /* bags within the segment */
};
RF_INLINE even_t even_of(const chunk_t &chunk, rf_u32 slots) {
    even_t even = {chunk.length / slots, 0, 0};
    if (even.lookups_a_bag * slots != chunk.length) even.lookups_a_bag = 0;
    if (even.lookups_a_bag == 0) return even;
    even.first = chunk.number * CHUNK / even.lookups_a_bag;
    even.last = (chunk.number * CHUNK + chunk.size - 1) / even.lookups_a_bag;
    return even;
}
/* Returns true if this thread finds an offset that disagrees; `slot`: the first bag of the segment. */
RF_INLINE bool is_uneven(const rf_backward_keys_args &args, const chunk_t &chunk, const even_t &even,
                         rf_u32 slot) {
    const rf_i64 begin = chunk.first - (rf_i64)chunk.number * CHUNK;
    const rf_u32 limit = even.last + 1;
    rf_i64 bag_offsets[ITEMS], end = 0;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const rf_u32 bag = even.first + k * BLOCK + threadIdx.x;
        bag_offsets[k] = bag < limit ? (rf_i64)rf_load(args.offsets + slot + bag) : 0;
    }
    if (threadIdx.x == 0) end = rf_load(args.offsets + slot + limit);
    bool is_different = threadIdx.x == 0 && end != begin + (rf_i64)limit * even.lookups_a_bag;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const rf_u32 bag = even.first + k * BLOCK + threadIdx.x;
        is_different |= bag < limit && bag_offsets[k] != begin + (rf_i64)bag * even.lookups_a_bag;
    }
    return is_different;
}

#endif
