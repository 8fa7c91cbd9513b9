/* Converts lookups to entries: a key, which is the row among all rows of the launch, and the position in grad
 * at which the columns of its bag and feature begin. Lookups that do not count (invalid index or bag,
 * padding, a feature of another launch) have the key `invalid_key`; the first pass of the sort drops them. This
 * kernel counts the digits of that pass.
 *
 * Thread mapping. A block has a chunk of consecutive lookups. A warp finds the bags that begin in it by two
 * searches in the offsets. Each bag sets a bit at its first lookup, so that the number of bits up to a lookup
 * is the number of its bag: this costs the same for long and short bags. A warp has 32 consecutive lookups at
 * once, that is one word of the bits. With invalid offsets, or more bags than lookups in a chunk, each lookup
 * searches its own bag. If all bags of a segment have the same number of lookups, no search is needed: the
 * block only checks the offsets of the chunk's bags. Shared memory: static. Launch: grid [chunks], block
 * [RF_BACKWARD_SORT_BLOCK]. The second kernel: a group of 8 lanes a bag, grid [ceil(slots / 32)], block
 * [RF_BACKWARD_BLOCK].
 */
#ifndef RF_ENTRIES
#define RF_ENTRIES RF_ENTRIES_INDIRECT
#endif

#include "families/fused_backward/entries.cuh"

enum {
    BLOCK = RF_BACKWARD_SORT_BLOCK,
    WARPS = BLOCK / 32,
    ITEMS = RF_ITEMS,
    CHUNK = CHUNK_ENTRIES,
    WORDS = CHUNK / 32
};

#include "families/fused_backward/chunk_bags.cuh"

RF_INLINE rf_backward_feature feature_load(const rf_backward_keys_args &args, rf_u32 number) {
    const rf_backward_feature *from = args.features + number;
    return {rf_load(&from->first_row), rf_load(&from->rows), rf_load(&from->padding_idx),
            rf_load(&from->output_column), rf_load(&from->pooling)};
}

/* A lookup, its slot, and the number of its bag within the feature. */
struct lookup_t {
    rf_i64 position;
    rf_u32 slot, bag;
    bool is_entry; /* it counts, and has the key */
    RF_KEY key;
};

/* Writes the entry of a lookup. */
RF_INLINE void entry_write(const rf_backward_keys_args &args, shared_t &shared,
                           const rf_backward_feature &feature, rf_u32 number, const lookup_t &lookup,
                           const digits_t &digits) {
    const RF_VALUE source =
        (RF_VALUE)lookup.bag * (RF_VALUE)args.output_dim + (RF_VALUE)feature.output_column;
    rf_backward_entry entry = {lookup.is_entry ? lookup.key : (RF_KEY)args.invalid_key, source};
    if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
        float factor = args.sample_weights != nullptr ? rf_load(args.sample_weights + lookup.position) : 1.0f;
        if (feature.pooling == RF_MEAN) factor = rf_load(args.bag_factors + lookup.slot);
        if (feature.pooling == RF_MAX) factor = -(float)(number + 1);
        args.factors[lookup.position] = factor;
        args.sources[lookup.position] = source;
        entry.value = (RF_VALUE)lookup.position;
    }
    args.entries[lookup.position] = entry;
    if (lookup.is_entry) atomicAdd(&shared.counts[digits.of(lookup.key)], 1u);
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_SORT_BLOCK, 2)
    rf_backward_keys(const __grid_constant__ rf_backward_keys_args args) {
    __shared__ shared_t shared;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    for (int digit = thread; digit < 1 << args.counts.bits; digit += BLOCK) shared.counts[digit] = 0;
    if (thread < WORDS) shared.begin_bits[thread] = 0;
    rf_wait_for_previous_kernel();
    const rf_u32 length = length_of(args);
    const chunk_t chunk = chunk_find(length, blockIdx.x);
    if (blockIdx.x == 0 && thread < 32) {
        args.counts.lengths[thread] = length;
        args.counts.totals[thread] = 0;
    }
    if (chunk.size == 0) return;
    RF_INDEX indices[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int at = (k * WARPS + warp) * 32 + lane;
        indices[k] = at < chunk.size ? rf_load(args.indices + chunk.first + at) : (RF_INDEX)-1;
    }
    const bool is_last = chunk.segment + 1 >= args.segments.count;
    const rf_u32 start = args.segments.slots[chunk.segment];
    const rf_u32 limit = is_last ? args.slots : args.segments.slots[chunk.segment + 1];
    even_t even = even_of(chunk, limit - start);
    if (even.lookups_a_bag > 0 && __syncthreads_or(is_uneven(args, chunk, even, start)))
        even.lookups_a_bag = 0;
    rf_u32 first_slot = start + even.first, last_slot = start + even.last;
    bool is_near = true;
    if (even.lookups_a_bag == 0) {
        if (warp < 2) {
            const rf_u32 found =
                slot_search(args, start, limit, warp == 0 ? chunk.first : chunk.first + chunk.size - 1);
            if (lane == 0) shared.slots_found[warp] = found;
        }
        __syncthreads();
        first_slot = shared.slots_found[0];
        last_slot = max(shared.slots_found[1], first_slot);
        is_near = last_slot - first_slot < CHUNK && bags_mark(args, chunk, first_slot, last_slot, shared);
    }
    const auto bag_of =
        [&](int word) { /* number within the chunk */
                        if (even.lookups_a_bag == 0) return bag_number(shared, word);
                        return (chunk.number * CHUNK + word * 32 + lane) / even.lookups_a_bag - even.first;
        };
    const rf_u32 first_number = first_slot / args.bags, next_number = (first_number + 1) * args.bags;
    const rf_backward_feature first_feature = feature_load(args, first_number);
    const digits_t digits = digits_of(args.segments, args.counts, chunk.segment);
    const rf_i64 base = args.segments.bases[chunk.segment];
    if (is_near && last_slot < next_number) { /* the common case */
        const RF_KEY rows = (RF_KEY)(first_feature.pooling >= 0 ? first_feature.rows : 0);
        const RF_KEY first_row = (RF_KEY)first_feature.first_row, padding = (RF_KEY)first_feature.padding_idx;
        const rf_u32 first_bag = first_slot - first_number * args.bags;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int word = k * WARPS + warp, at = word * 32 + lane;
            if (at >= chunk.size) continue;
            const rf_u32 number = bag_of(word);
            const RF_KEY index = (RF_KEY)indices[k];
            const bool is_representable =
                sizeof(RF_INDEX) <= sizeof(RF_KEY) || (rf_i64)indices[k] == (rf_i64)index;
            const bool is_entry = is_representable && index < rows && index != padding;
            entry_write(
                args, shared, first_feature, first_number,
                {chunk.first + at, first_slot + number, first_bag + number, is_entry, first_row + index},
                digits);
        }
    } else {
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int word = k * WARPS + warp, at = word * 32 + lane;
            if (at >= chunk.size) continue;
            const rf_i64 position = chunk.first + at, index = (rf_i64)indices[k];
            const rf_u32 slot =
                is_near ? first_slot + bag_of(word) : far_slot(args, first_slot, last_slot, position);
            const rf_u32 number = slot < next_number ? first_number : slot / args.bags;
            rf_backward_feature feature = first_feature;
            if (number != first_number) feature = feature_load(args, number);
            const rf_i64 key = feature.first_row + index;
            const bool is_entry = feature.pooling >= 0 && (rf_u64)index < (rf_u64)feature.rows &&
                                  index != feature.padding_idx &&
                                  (is_near || bag_holds(args, slot, position)) &&
                                  (rf_u64)(key - base) < (rf_u64)args.span;
            entry_write(args, shared, feature, number,
                        {position, slot, slot - number * args.bags, is_entry, (RF_KEY)key}, digits);
        }
    }
    __syncthreads();
    counts_keep(args.counts, shared.counts, digits.bits);
}

/* Writes 1 / counted lookups for each bag of features that pool by mean. */
extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_bag_factors(const __grid_constant__ rf_backward_keys_args args) {
    enum { LANES = 8 };
    rf_wait_for_previous_kernel();
    const rf_u32 slot = blockIdx.x * (RF_BACKWARD_BLOCK / LANES) + threadIdx.x / LANES;
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
