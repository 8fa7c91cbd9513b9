/* Lookups become entries: a key, the row that is looked up among all rows of the launch, and where in grad the columns of
 * its bag and feature begin. Lookups that do not count (a bad index or bag, padding, a feature of another launch) have
 * the key `trash`, behind all rows.
 *
 * A block: args.chunk neighbouring lookups, at most RF_BACKWARD_CHUNK; their bags are found among the offsets by one search
 * of a warp, then by bisection in shared memory.
 * Shared memory: static. Launch: grid [ceil(lookups / chunk)], block [RF_BACKWARD_BLOCK]. The second kernel: a
 * group of 8 lanes a bag, grid [ceil(slots / 32)], block [RF_BACKWARD_BLOCK].
 */
#ifndef RF_ENTRIES
#define RF_ENTRIES RF_ENTRIES_INDIRECT
#endif

#include "device/bags.cuh"
#include "fused_embedding_bag/backward/args.h"

enum { BLOCK = RF_BACKWARD_BLOCK, CHUNK = RF_BACKWARD_CHUNK };

/* A slot is a bag of a feature: number feature * bags + bag. The last one that begins at `position` or before among those
 * of [0, slots); by a warp, which looks at 32 places at once. */
RF_INLINE rf_u32 slot_search(const rf_backward_keys_args &args, rf_i64 position) {
    const rf_u32 lane = threadIdx.x % 32;
    rf_u32 first = 0, count = args.slots;
    while (count > 1) {
        const rf_u32 step = (count + 31) / 32, at = lane * step;
        const bool before = at < count && rf_load(args.offsets + first + at) <= position;
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, before);
        const rf_u32 last = all == 0 ? 0 : 31 - __clz(all);
        first += last * step;
        count = min(step, count - last * step);
    }
    return first;
}

/* The slot of a position among those that a chunk knows: begins[i] is where slot i + 1 begins, in the chunk. */
RF_INLINE int near_slot(const int *begins, int slots, int position) {
    int first = 0, behind = slots;
    while (behind - first > 1) {
        const int middle = (first + behind) / 2;
        if (begins[middle - 1] <= position) {
            first = middle;
        } else {
            behind = middle;
        }
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

RF_INLINE bool holds(const rf_backward_keys_args &args, rf_u32 slot, rf_i64 position) {
    const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
    return rf_is_bag(slot == 0, from, to, args.lookups) && from <= position && position < to;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, 6)
    rf_backward_keys(const __grid_constant__ rf_backward_keys_args args) {
    __shared__ int begins[CHUNK];
    __shared__ rf_u32 ends[2];
    rf_wait_for_previous_kernel();
    const int thread = threadIdx.x;
    const rf_i64 first = (rf_i64)blockIdx.x * args.chunk;
    const int size = (int)min((rf_i64)args.chunk, args.lookups - first);
    if (thread < 64) {
        const rf_u32 slot = slot_search(args, thread < 32 ? first : first + size - 1);
        if (thread % 32 == 0) ends[thread / 32] = slot;
    }
    __syncthreads();
    const rf_u32 first_slot = ends[0], last_slot = ends[1] < ends[0] ? ends[0] : ends[1];
    const bool is_near = last_slot - first_slot < CHUNK;
    bool bad = false; /* some offsets: then each lookup looks at its own */
    if (is_near) {
        for (rf_u32 i = thread; i <= last_slot - first_slot; i += BLOCK) {
            const rf_u32 slot = first_slot + i;
            const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
            bad |= !rf_is_bag(slot == 0, from, to, args.lookups) || (i == 0 && from > first) ||
                   (slot == last_slot && to < first + size);
            begins[i] = (int)min(max(to - first, (rf_i64)0), (rf_i64)CHUNK);
        }
    }
    bad = __syncthreads_or(bad) != 0;
#pragma unroll 4
    for (int at = thread; at < size; at += BLOCK) {
        const rf_i64 position = first + at;
        const rf_u32 slot = is_near ? first_slot + near_slot(begins, (int)(last_slot - first_slot) + 1, at)
                                    : far_slot(args, first_slot, last_slot, position);
        const rf_u32 number = slot / args.bags, bag = slot - number * args.bags;
        const rf_backward_feature *feature = args.features + number;
        rf_i64 entry = position, key = args.trash;
        const rf_i64 index = (rf_i64)rf_load(args.indices + position);
        if (args.listings != nullptr) {
            const rf_backward_listing *listing = args.listings + number;
            const rf_i64 from = position - rf_load(&listing->first_lookup);
            if ((rf_u64)from >= (rf_u64)rf_load(&listing->count)) continue;
            entry = rf_load(&listing->first_entry) + from;
        }
        const int pooling = rf_load(&feature->pooling);
        const bool counts_here = pooling >= 0 && (rf_u64)index < (rf_u64)rf_load(&feature->rows) &&
                                 index != rf_load(&feature->padding_idx) &&
                                 ((is_near && !bad) || holds(args, slot, position));
        if (counts_here) key = rf_load(&feature->first_row) + index;
        args.keys[entry] = (RF_KEY)key;
        args.sources[entry] = (RF_VALUE)(bag * args.output_dim + rf_load(&feature->output_column));
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
            float factor = args.sample_weights != nullptr ? rf_load(args.sample_weights + position) : 1.0f;
            if (pooling == RF_MEAN) factor = rf_load(args.bag_factors + slot);
            if (pooling == RF_MAX) factor = -(float)(number + 1);
            args.factors[entry] = factor;
        }
    }
}

/* One over the lookups of a bag that count, where its feature pools by mean. */
extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_bag_factors(const __grid_constant__ rf_backward_keys_args args) {
    enum { LANES = 8 };
    rf_wait_for_previous_kernel();
    const rf_u32 slot = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES;
    const bool any = slot < args.slots;
    const rf_backward_feature *feature = args.features + (any ? slot / args.bags : 0);
    int count = 0;
    if (any && rf_load(&feature->pooling) == RF_MEAN) {
        const rf_i64 rows = rf_load(&feature->rows), padding_idx = rf_load(&feature->padding_idx);
        const rf_i64 from = rf_load(args.offsets + slot), to = rf_load(args.offsets + slot + 1);
        for (rf_i64 i = rf_is_bag(slot == 0, from, to, args.lookups) ? from + threadIdx.x % LANES : to;
             i < to; i += LANES) {
            const rf_i64 index = (rf_i64)rf_load(args.indices + i);
            count += (rf_u64)index < (rf_u64)rows && index != padding_idx;
        }
    }
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) count += __shfl_xor_sync(RF_FULL_WARP, count, apart);
    if (any && threadIdx.x % LANES == 0) args.bag_factors[slot] = count > 1 ? 1.0f / (float)count : 1.0f;
}
