/* Entries that one pass of sort.cu has brought together by digits, the first bits of their places, are sorted by all bits: entries of
 * equal keys become neighbours, in their order.
 *
 * A block: a tile of args.tile neighbouring entries of a segment. It sorts the digits that begin in it, as many at a time as there
 * is room for in shared memory: there, by passes of up to BITS bits.
 * A digit of very many entries has a row that many lookups want, as places scatter rows. It is cut into parts (sort.cu), which
 * the first args.part_blocks blocks take one after another. Entries of its most frequent key, of a sample that is the same for all
 * parts, go to where they belong, the digit's first places, since each part says how many it has to those
 * behind it, which begin later. Others go to the digit's last places, in reverse; they mostly fit in shared memory, where the last
 * block to come sorts them. Where they do not, it sorts them in global memory.
 * Shared memory: static. Launch: grid [part_blocks + tiles], block [RF_BACKWARD_BLOCK].
 */
#define RF_GROUPED 1
#include "families/fused_backward/sort/ranks.cuh"

enum {
    BLOCK = RF_BACKWARD_BLOCK,
    WARPS = BLOCK / 32,
    ROOM = RF_BACKWARD_ROOM, /* entries in shared memory */
    ITEMS = ROOM / BLOCK,
    BITS = sizeof(rf_backward_entry) > 8 ? 8 : 9, /* of a pass, at most */
    DIGITS = 1 << BITS,
    OWN = DIGITS / BLOCK, /* neighbouring digits of a thread */
    BLOCKS = 4 /* an SM */
};
static_assert(sizeof(RF_KEY) == 4, "places have 32 bits");
static_assert((int)RF_BACKWARD_MANY <= (int)ROOM,
              "each digit that is cut has more than that, as the host counts");
static_assert((int)ITEMS * (int)BLOCK == (int)ROOM, "as many a thread");

struct shared_t {
    rf_backward_entry entries[ROOM];
    rf_u16 counts[WARPS][DIGITS];
    rf_u32 begins[DIGITS]; /* entries of a digit, then where they begin */
    rf_u32 places[DIGITS]; /* where the next ones of a digit go, in global memory */
    rf_u32 of_warps[WARPS];
    rf_u32 chosen; /* what one thread finds out for all */
    digits_t digits; /* of the segment; here it takes no registers */
};

/* Entries [begin, end) of a digit. */
struct range_t {
    rf_u32 begin, end;
    RF_INLINE rf_u32 size() const { return end - begin; }
};

/* What a block works with. */
struct tile_t {
    const rf_backward_group_args &args;
    shared_t &shared;
};

/* Bits [shift, shift + count) of a place less `first`. */
struct bits_t {
    rf_u32 first;
    int shift, count;
    RF_INLINE int of(rf_u32 place) const { return (int)((place - first) >> shift & ((1u << count) - 1)); }
};

/* An entry that this launch has written. */
RF_INLINE rf_backward_entry entry_again(const rf_backward_entry *at) {
    return {__ldcg(&at->key), __ldcg(&at->value)};
}

RF_INLINE void entries_load(const tile_t &tile, rf_u32 from, int count) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += BLOCK) {
        const auto found =
            rf_load((const rf_bytes<sizeof(rf_backward_entry)> *)(tile.args.entries + from + i));
        memcpy(&tile.shared.entries[i], &found, sizeof found);
    }
    __syncthreads();
}

/* Numbers of the first `digits` digits become sums of those before. */
RF_INLINE void digits_add(rf_u32 *numbers, rf_u32 *of_warps, int digits) {
    const int digit = (int)threadIdx.x * OWN;
    rf_u32 own[OWN], sum = 0, all;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        own[i] = digit + i < digits ? numbers[digit + i] : 0;
        sum += own[i];
    }
    rf_u32 before = rf_sum_of_block_before<WARPS>(sum, of_warps, all);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (digit + i < digits) numbers[digit + i] = before;
        before += own[i];
    }
    __syncthreads();
}

/* The entries of a thread among `count` in shared memory: every 32nd of its warp's share. */
struct own_t {
    int first, each;
    RF_INLINE int at(int k) const { return first + 32 * k; }
};
RF_INLINE own_t own_of(int count) {
    const int each = (count + BLOCK - 1) / BLOCK;
    return {(int)(threadIdx.x / 32) * each * 32 + (int)threadIdx.x % 32, each};
}

/* An entry's digit and its rank among those of the same digit; of no entry -1. */
RF_INLINE int digit_in(int ranked) { return ranked >> 16; }
RF_INLINE int rank_in(int ranked) { return ranked & 0xffff; }

/* Ranks `count` entries in shared memory; how many a digit has is left in `begins`. */
RF_INLINE void ranks_find(const tile_t &tile, const bits_t &bits, int count, const own_t &own,
                          int (&ranked)[ITEMS]) {
    shared_t &shared = tile.shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    rf_bytes<16> *const zeros = (rf_bytes<16> *)shared.counts[warp];
    for (int i = lane; i < ((1 << bits.count) + 7) / 8; i += 32) zeros[i] = {};
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        ranked[k] = k < own.each && own.at(k) < count
                        ? bits.of(tile.shared.digits.place(shared.entries[own.at(k)].key))
                        : -1;
    __syncwarp();
    ranks_of_warp<BITS, ITEMS>(
        shared.counts[warp], bits.count, own.each, [&](int k) { return ranked[k]; },
        [&](int k, int digit, rf_u32 rank) { ranked[k] = digit < 0 ? -1 : digit << 16 | (int)rank; });
    __syncthreads();
    warps_add<BLOCK, DIGITS>(shared.counts, shared.begins, 1 << bits.count);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (ranked[k] >= 0) ranked[k] += shared.counts[warp][digit_in(ranked[k])];
}

/* Sorts the first `count` entries in shared memory, whose places are [first, last], by all of their bits. */
RF_INLINE void sort_here(const tile_t &tile, int count, rf_u32 first, rf_u32 last) {
    shared_t &shared = tile.shared;
    const int least = tile.shared.digits.least(), all = 32 - __clz((int)(last - first)) - least;
    const int passes = (all + BITS - 1) / BITS, each = passes > 0 ? (all + passes - 1) / passes : 0;
    const own_t own = own_of(count);
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        const bits_t bits = {first, least + pass * each, min(each, all - pass * each)};
        int ranked[ITEMS];
        ranks_find(tile, bits, count, own, ranked);
        digits_add(shared.begins, shared.of_warps, 1 << bits.count);
        rf_backward_entry entries[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (ranked[k] >= 0) entries[k] = shared.entries[own.at(k)];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (ranked[k] >= 0)
                shared.entries[shared.begins[digit_in(ranked[k])] + rank_in(ranked[k])] = entries[k];
        __syncthreads();
    }
}

RF_INLINE void write_out(const tile_t &tile, rf_u32 to, int count) {
    for (int i = threadIdx.x; i < count; i += BLOCK) tile.args.sorted[to + i] = tile.shared.entries[i];
    __syncthreads();
}

/* The most frequent key of a sample of a digit's entries; by each warp. */
RF_INLINE RF_KEY frequent_key(const tile_t &tile, const range_t &range) {
    const rf_u32 lane = threadIdx.x % 32;
    const rf_u32 at = range.begin + (rf_u32)((rf_u64)range.size() * lane / 32);
    const RF_KEY own = rf_load(&tile.args.entries[at].key);
    rf_u32 best = (rf_u32)__popc(__match_any_sync(RF_FULL_WARP, own)) << 5 | lane;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) best = max(best, __shfl_xor_sync(RF_FULL_WARP, best, apart));
    return __shfl_sync(RF_FULL_WARP, own, (int)(best % 32));
}

/* Entries of the frequent key in `count` parts from `first` on; waits for them. */
RF_INLINE rf_u32 found_in(const tile_t &tile, rf_u32 first, rf_u32 count) {
    rf_u32 sum = 0, all;
    for (rf_u32 i = threadIdx.x; i < count; i += BLOCK) {
        const volatile rf_u32 *const from = tile.args.groups.found + first + i;
        rf_u32 found;
        do found = *from;
        while (found == 0);
        sum += found - 1;
    }
    rf_sum_of_block_before<WARPS>(sum, tile.shared.of_warps, all);
    __syncthreads();
    return all;
}

/* One pass of a sort in global memory by a block. */
RF_INLINE void pass_there(const tile_t &tile, const bits_t &bits, const rf_backward_entry *from,
                          rf_backward_entry *to, rf_u32 count) {
    shared_t &shared = tile.shared;
    for (int digit = threadIdx.x; digit < DIGITS; digit += BLOCK) shared.places[digit] = 0;
    __syncthreads(); /* behind which the block's own writes are seen, too */
    for (rf_u32 i = threadIdx.x; i < count; i += BLOCK)
        atomicAdd(&shared.places[bits.of(tile.shared.digits.place(__ldcg(&from[i].key)))], 1u);
    __syncthreads();
    digits_add(shared.places, shared.of_warps, 1 << bits.count);
    for (rf_u32 start = 0; start < count; start += ROOM) {
        const int some = (int)min(count - start, (rf_u32)ROOM);
        const own_t own = own_of(some);
        int ranked[ITEMS];
        for (int i = threadIdx.x; i < some; i += BLOCK) shared.entries[i] = entry_again(from + start + i);
        __syncthreads();
        ranks_find(tile, bits, some, own, ranked);
#pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (ranked[k] >= 0)
                to[shared.places[digit_in(ranked[k])] + rank_in(ranked[k])] = shared.entries[own.at(k)];
        __syncthreads();
        for (int digit = threadIdx.x; digit < 1 << bits.count; digit += BLOCK)
            shared.places[digit] += shared.begins[digit];
        __syncthreads();
    }
}

/* Sorts what is left of a digit, its last `count` entries in reverse, where they do not fit in shared memory. Of the digit's `entries`
 * nobody needs more than that they are of it. */
RF_INLINE void sort_there(const tile_t &tile, const range_t &range, rf_u32 count, rf_u32 first) {
    rf_backward_entry *from = tile.args.entries + range.begin, *to = tile.args.sorted + (range.end - count);
    const int least = tile.shared.digits.least();
    for (rf_u32 i = threadIdx.x; i < count; i += BLOCK)
        from[i] = entry_again(tile.args.sorted + (range.end - 1 - i));
    for (int shift = least; shift < tile.shared.digits.shift; shift += BITS) {
        pass_there(tile, {first, shift, min((int)BITS, tile.shared.digits.shift - shift)}, from, to, count);
        rf_backward_entry *const other = from;
        from = to;
        to = other;
    }
    __syncthreads();
    to = tile.args.sorted + (range.end - count);
    for (rf_u32 i = threadIdx.x; from != to && i < count; i += BLOCK) to[i] = entry_again(from + i);
    __syncthreads();
}

/* Takes the entries of a part to their places; the last one of its digit sorts what is left. */
RF_INLINE void part_take(const tile_t &tile, const rf_backward_part &part, rf_u32 number) {
    shared_t &shared = tile.shared;
    const rf_backward_group_args &args = tile.args;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const range_t range = {part.begin, part.end};
    const rf_u32 from = range.begin + (number - part.first) * ROOM;
    const rf_u32 parts = (range.size() + ROOM - 1) / ROOM;
    const int count = (int)min(range.end - from, (rf_u32)ROOM);
    const RF_KEY key = frequent_key(tile, range);
    const own_t own = own_of(count);
    rf_u32 ranks[ITEMS], found = 0; /* of the frequent key */
    entries_load(tile, from, count);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const bool is_frequent = k < own.each && own.at(k) < count && shared.entries[own.at(k)].key == key;
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, is_frequent);
        ranks[k] = found + __popc(all & ((1u << lane) - 1));
        found += __popc(all);
    }
    if (lane == 0) shared.of_warps[warp] = found;
    __syncthreads();
    rf_u32 all = 0, before = rf_sum_of_warps_before<WARPS>(0u, shared.of_warps, warp, all);
    if (threadIdx.x == 0) *(volatile rf_u32 *)(args.groups.found + number) = all + 1;
    __syncthreads();
    before += found_in(tile, part.first, number - part.first);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= own.each || own.at(k) >= count) continue;
        const rf_u32 rank = before + ranks[k], others = from - range.begin + own.at(k) - rank;
        const rf_backward_entry entry = shared.entries[own.at(k)];
        args.sorted[entry.key == key ? range.begin + rank : range.end - 1 - others] = entry;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.chosen = atomicAdd(args.groups.done + part.first, 1u);
    __syncthreads();
    const bool is_last = shared.chosen == parts - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const rf_u32 left = range.size() - found_in(tile, part.first, parts);
    const rf_u32 first = (rf_u32)tile.shared.digits.of(key) << tile.shared.digits.shift;
    if (left > ROOM) return sort_there(tile, range, left, first);
    for (rf_u32 i = threadIdx.x; i < left; i += BLOCK)
        shared.entries[i] = entry_again(args.sorted + (range.end - 1 - i));
    __syncthreads();
    sort_here(tile, (int)left, first, first + ((1u << tile.shared.digits.shift) - 1));
    write_out(tile, range.end - left, (int)left);
}

/* Neighbouring digits that are sorted at once. */
struct some_t {
    rf_u32 from; /* their first entry */
    int count; /* entries */
    int next; /* the first digit that is not looked at yet */
};
/* As many digits from `digit` on, of those before `behind`, as there is room for, up to one that is cut into parts, which is left
 * out. By each warp alike. */
RF_INLINE some_t some_find(const tile_t &tile, const rf_u32 *begins, int digit, int behind) {
    const int lane = threadIdx.x % 32;
    const rf_u32 from = rf_load(begins + digit);
    for (int next = digit;; next += 32) {
        const int at = min(next + lane, behind);
        const rf_u32 begin = rf_load(begins + at), end = at < behind ? rf_load(begins + at + 1) : begin;
        const bool is_cut = end - begin > tile.shared.digits.most;
        const rf_u32 stops = __ballot_sync(RF_FULL_WARP, at == behind || is_cut || end - from > (rf_u32)ROOM);
        if (stops == 0) continue;
        const int stop = __ffs((int)stops) - 1;
        return {from, (int)(__shfl_sync(RF_FULL_WARP, begin, stop) - from),
                next + stop + __shfl_sync(RF_FULL_WARP, (int)is_cut, stop)};
    }
}

/* Sorts digits [digit, behind) but those that are cut into parts. */
RF_INLINE void digits_sort(const tile_t &tile, const rf_u32 *begins, int digit, int behind) {
    const digits_t &digits = tile.shared.digits;
#pragma unroll 1
    while (digit < behind) {
        const some_t some = some_find(tile, begins, digit, behind);
        digit = some.next;
        if (some.count == 0) continue;
        entries_load(tile, some.from, some.count);
        const rf_u32 first = (rf_u32)digits.of(tile.shared.entries[0].key) << digits.shift;
        const rf_u32 last = (rf_u32)digits.of(tile.shared.entries[some.count - 1].key) << digits.shift;
        sort_here(tile, some.count, first, last + ((1u << digits.shift) - 1));
        write_out(tile, some.from, some.count);
    }
}

RF_INLINE void digits_keep(const tile_t &tile, int segment) {
    const rf_backward_group_args &args = tile.args;
    if (threadIdx.x == 0)
        tile.shared.digits =
            digits_of(args.segments, args.counts, segment, rf_load(args.counts.lengths + segment));
    __syncthreads();
}

/* Parts, in the order in which they are asked for: so those that one waits for have begun. */
RF_INLINE void parts_take(const tile_t &tile) {
    const rf_u32 count = rf_load(tile.args.groups.n_parts);
    while (blockIdx.x < count) {
        if (threadIdx.x == 0) tile.shared.chosen = atomicAdd(tile.args.groups.begun, 1u);
        __syncthreads();
        const rf_u32 number = tile.shared.chosen;
        if (number >= count) return;
        const auto found =
            rf_load((const rf_bytes<sizeof(rf_backward_part)> *)(tile.args.groups.parts + number));
        rf_backward_part part;
        memcpy(&part, &found, sizeof part);
        digits_keep(tile, part.segment);
        part_take(tile, part, number);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_group(const __grid_constant__ rf_backward_group_args args) {
    __shared__ __align__(16) shared_t shared;
    const tile_t tile = {args, shared};
    rf_wait_for_previous_kernel();
    if ((int)blockIdx.x < args.part_blocks) return parts_take(tile);
    const chunk_t chunk = chunk_find(rf_load(args.counts.totals + threadIdx.x % 32),
                                     blockIdx.x - args.part_blocks, (rf_u32)args.tile);
    if (chunk.size == 0) return;
    const rf_u32 first = (rf_u32)chunk.first, last = first + chunk.size - 1;
    digits_keep(tile, chunk.segment);
    /* Parts of a digit may be moved meanwhile, but only inside of it. */
    const rf_u32 *const begins =
        args.groups.begins + (rf_i64)chunk.segment * ((1 << RF_BACKWARD_MOST_DIGIT_BITS) + 1);
    const int front = shared.digits.of(rf_load(&args.entries[first].key));
    const int back = shared.digits.of(rf_load(&args.entries[last].key));
    digits_sort(tile, begins, front + (rf_load(begins + front) < first), back + 1);
}
