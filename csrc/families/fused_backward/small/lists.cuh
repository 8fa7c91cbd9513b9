/* The lookups of a feature for lists.cu, with their rows and bags, and the layout of shared memory. The
 * including file defines BLOCK and WARPS, the threads and warps of a block. */
#ifndef RECFUSE_CUDA_BACKWARD_LISTS_CUH
#define RECFUSE_CUDA_BACKWARD_LISTS_CUH

#include "gpu/device/bags.cuh"
#include "gpu/device/shared.cuh"
#include "gpu/device/sums.cuh"
#include "families/fused_backward/small/backward_small_args.h"

enum {
    STEPS = 4, /* lookups that a lane loads at once */
    UNIT = STEPS * 32, /* consecutive lookups that a warp handles at once */
    UNIT_BITS = 7,
    MOST_MARKS = 1024,
    NEAR_LOOKUPS = 65536, /* up to this number, bags are found by bits in shared memory */
    TILE = 512, /* bytes of counters that a warp sums at once */
    MOST_SPANS = 4 /* spans of a list that does not fit at once */
};
static_assert(UNIT == 1 << UNIT_BITS, "as pieces are counted");
#define NO_ROW 0xffffffffu
#ifdef __CUDACC__
#define RF_APART \
    static __device__ __noinline__ /* for rare calls, so that they take no registers from the rest */
#else
#define RF_APART static
#endif

/* The feature of a block. */
struct feature_t {
    const RF_INDEX *indices; /* at its first lookup */
    const RF_OFFSET *offsets; /* [bags + 1] */
    rf_i64 first; /* lookup; with invalid offsets, the first lookup of any bag */
    rf_i64 lookups; /* lookups of the call */
    rf_u32 count, rows;
    int padding_idx, bags;
    bool is_first; /* the feature is the first of the call */
    bool sound; /* all bags are valid: they hold all lookups, in order */
};

/* The layout of shared memory. */
struct layout_t {
    rf_u32 *cells; /* counters [rows][parts], of 2 or 4 bytes */
    rf_u16 *marks; /* bag of the first lookup of each piece, followed by the last bag */
    /* If the offsets are valid and there are not too many bags (`near`): a bit a lookup, set at the start of
     * a bag; the number of bits in the previous words; the bag of each bit. Then there are no marks. */
    rf_u32 *begins;
    rf_u16 *before, *numbers;
    rf_u16 *window; /* a window of the list */
    bool near;
    int cell_bytes, cells_bytes, parts;
    int piece_bits; /* log2 of the lookups of a piece, at least UNIT_BITS */
    rf_u32 part_units; /* units of a part */
    rf_u32 window_size;
};

RF_INLINE bool is_bag(const feature_t &feature, int bag, rf_i64 from, rf_i64 to) {
    return rf_is_bag(feature.is_first && bag == 0, from, to, feature.lookups);
}

/* Finds the lookups of the feature, by the whole block. */
RF_INLINE feature_t feature_of(const rf_small_lists_args &args, const rf_small_list &task,
                               unsigned long long *bounds) {
    feature_t feature;
    feature.offsets = args.offsets + (rf_i64)task.number * args.bags;
    feature.lookups = args.lookups;
    feature.rows = task.rows;
    feature.padding_idx = task.padding_idx;
    feature.bags = args.bags;
    feature.is_first = task.number == 0;
    if (threadIdx.x == 0) {
        bounds[0] = args.lookups;
        bounds[1] = 0;
    }
    rf_i64 first = rf_load(feature.offsets), end = rf_load(feature.offsets + args.bags);
    bool bad = false;
    for (int bag = threadIdx.x; bag < args.bags; bag += BLOCK)
        bad |= !is_bag(feature, bag, rf_load(feature.offsets + bag), rf_load(feature.offsets + bag + 1));
    feature.sound = __syncthreads_or(bad) == 0;
    if (!feature.sound) {
        for (int bag = threadIdx.x; bag < args.bags; bag += BLOCK) {
            const rf_i64 from = rf_load(feature.offsets + bag), to = rf_load(feature.offsets + bag + 1);
            if (!is_bag(feature, bag, from, to) || from == to) continue;
            atomicMin(&bounds[0], (unsigned long long)from);
            atomicMax(&bounds[1], (unsigned long long)to);
        }
        __syncthreads();
        first = (rf_i64)bounds[0];
        end = (rf_i64)bounds[1];
    }
    feature.first = first;
    feature.indices = args.indices + first;
    feature.count = end > first ? (rf_u32)(end - first) : 0;
    return feature;
}

RF_INLINE int rounded_up(int bytes, int to) { return (bytes + to - 1) / to * to; }

/* Returns the words of a bit a lookup, for all units. */
RF_INLINE rf_u32 words_of(const feature_t &feature) { return (feature.count + UNIT - 1) / UNIT * STEPS; }

/* Returns 2 if counters of 2 bytes hold the number of lookups, else 4. */
RF_INLINE int cell_bytes_of(const feature_t &feature) { return feature.count > 65535 ? 4 : 2; }

/* Returns the number of parts, at most one a warp. */
RF_INLINE int parts_of(const feature_t &feature, int bytes, int rows) {
    enum { LEAST_LOOKUPS = 256 }; /* least lookups of a part */
    int parts = 1;
    while (parts * 2 <= (int)WARPS && (rf_u32)parts * LEAST_LOOKUPS < feature.count &&
           rows * parts * 2 * cell_bytes_of(feature) <= bytes / 8 * 5)
        parts *= 2;
    return parts;
}

/* Divides shared memory: counters take up to five eighths of it, the list the rest. */
RF_INLINE layout_t layout_of(const feature_t &feature, rf_u8 *memory, int bytes, int rows) {
    layout_t layout;
    layout.cell_bytes = cell_bytes_of(feature);
    layout.parts = parts_of(feature, bytes, rows);
    layout.cells_bytes = rounded_up(rows * layout.parts * layout.cell_bytes, TILE);
    layout.piece_bits = UNIT_BITS;
    while (feature.count >> layout.piece_bits >= MOST_MARKS) layout.piece_bits++;
    const rf_u32 pieces = (feature.count + (1u << layout.piece_bits) - 1) >> layout.piece_bits;
    const rf_u32 units = (feature.count + UNIT - 1) / UNIT;
    layout.part_units = (units + layout.parts - 1) / layout.parts;
    layout.cells = (rf_u32 *)memory;
    int bytes_used = layout.cells_bytes;
    const int near_bytes = rounded_up((int)words_of(feature) * 6 + feature.bags * 2, 16);
    layout.near = feature.sound && feature.count <= NEAR_LOOKUPS && bytes_used + near_bytes <= bytes;
    layout.begins = (rf_u32 *)(memory + bytes_used);
    layout.before = (rf_u16 *)(layout.begins + units * STEPS);
    layout.numbers = layout.before + units * STEPS;
    layout.marks = (rf_u16 *)(memory + bytes_used);
    bytes_used += layout.near ? near_bytes : rounded_up(((int)pieces + 1) * 2, 16);
    layout.window = (rf_u16 *)(memory + bytes_used);
    layout.window_size =
        (rf_u32)max((bytes - bytes_used) / 2 - 8, 0); /* the window has the alignment of the list */
    return layout;
}

RF_INLINE rf_u32 cell_at(const layout_t &layout, rf_u32 cell) {
    return layout.cell_bytes == 4 ? layout.cells[cell] : (rf_u32)((const rf_u16 *)layout.cells)[cell];
}
/* Adds to a counter and returns its old value. Two counters of 16 bits share a word; no counter overflows. */
RF_INLINE rf_u32 cell_add(const layout_t &layout, rf_u32 cell, rf_u32 increment) {
    if (layout.cell_bytes == 4) return atomicAdd(layout.cells + cell, increment);
    const rf_u32 shift = cell % 2 * 16;
    return atomicAdd(layout.cells + cell / 2, increment << shift) >> shift & 0xffffu;
}

/* Finds the bag of a position in [first, first + span): the first bag whose end is past the position. */
RF_INLINE void bags_find(const feature_t &feature, rf_u32 position, int first, int span, int (&bags)[STEPS]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) bags[k] = first;
    while (span > 1) {
        const int half = span / 2;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_i64 end = rf_load(feature.offsets + bags[k] + half);
            bags[k] += end <= feature.first + (rf_i64)(position + k * 32) ? half : 0;
        }
        span -= half;
    }
}

/* Returns the row of an index, or NO_ROW if it does not count. */
RF_INLINE rf_u32 row_of(const feature_t &feature, RF_INDEX index) {
    const bool is_row =
        sizeof index == 4 ? (rf_u32)index < feature.rows : (rf_u64)index < (rf_u64)feature.rows;
    return is_row && (rf_i32)index != feature.padding_idx ? (rf_u32)index : NO_ROW;
}

/* Loads a lane's indices of a unit, the first at `position`; -1 past the end. rows_of checks them later, so
 * that a prefetch does not stall. */
RF_INLINE void indices_load(const feature_t &feature, rf_u32 position, RF_INDEX (&indices)[STEPS]) {
    const RF_INDEX *from =
        (const RF_INDEX *)rf_address((const rf_u8 *)feature.indices, position, sizeof(RF_INDEX));
    if (position - threadIdx.x % 32 + UNIT <= feature.count) { /* the unit is complete */
#pragma unroll
        for (int k = 0; k < STEPS; k++) indices[k] = rf_load(from + k * 32);
        return;
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        indices[k] = -1;
        if (position + k * 32 < feature.count) indices[k] = rf_load(from + k * 32);
    }
}
/* Prefetches indices into L2, unless there are very many: the counting pass loads only a few at a time. */
RF_INLINE void indices_prefetch(const feature_t &feature) {
    enum { LINE = 128 / sizeof(RF_INDEX) };
    const rf_u32 count = min(feature.count, (rf_u32)NEAR_LOOKUPS);
    for (rf_u32 at = threadIdx.x * LINE; at < count; at += BLOCK * LINE) rf_prefetch(feature.indices + at);
}
/* Returns the address, in shared memory, of the counter of an index: `cells` + its row - `first`, if the row
 * is one of `count` rows and counts; otherwise a counter that is never read, which saves a branch. */
RF_INLINE rf_u32 cell_of(const feature_t &feature, RF_INDEX index, rf_u32 first, rf_u32 count, rf_u32 cells,
                         rf_u32 unread, bool &is_own) {
    const rf_u32 row = (rf_u32)index - first;
    const bool far = sizeof index > 4 && (rf_u64)index >= (rf_u64)feature.rows;
    is_own = row < count && (rf_i32)index != feature.padding_idx && !far;
    return is_own ? cells + row * 4 : unread;
}
RF_INLINE void rows_of(const feature_t &feature, const RF_INDEX (&indices)[STEPS], rf_u32 (&rows)[STEPS]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) rows[k] = row_of(feature, indices[k]);
}

/* Loads the bags of a lane's lookups if the offsets are valid. Returns true if all lanes have the same
 * bag. */
RF_INLINE bool sound_bags_load(const feature_t &feature, const layout_t &layout, rf_u32 position,
                               int (&bags)[STEPS]) {
    const rf_u32 lane = threadIdx.x % 32;
    if (layout.near) {
        const rf_u32 word = (position - lane) / 32, upto = 0xffffffffu >> (31 - lane);
        const rf_bytes<16> begins = *(const rf_bytes<16> *)(layout.begins + word);
        const rf_bytes<8> before = *(const rf_bytes<8> *)(layout.before + word);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_u32 first = before.word[k / 2] >> k % 2 * 16 & 0xffffu;
            bags[k] = layout.numbers[first + __popc(begins.word[k] & upto) - 1];
        }
        return false;
    }
    const rf_u32 piece = (position - lane) >> layout.piece_bits;
    const int first = layout.marks[piece], last = layout.marks[piece + 1];
    bags_find(feature, position, first, last - first + 1, bags);
    return first == last;
}

/* Loads the bags of a lane's lookups if offsets may be invalid: lookups of no bag get NO_ROW. */
RF_INLINE bool bags_load(const feature_t &feature, const layout_t &layout, rf_u32 position,
                         rf_u32 (&rows)[STEPS], int (&bags)[STEPS]) {
    if (feature.sound) return sound_bags_load(feature, layout, position, bags);
    bags_find(feature, position, 0, feature.bags, bags);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const rf_i64 at = feature.first + (rf_i64)position + k * 32;
        const rf_i64 from = rf_load(feature.offsets + bags[k]), to = rf_load(feature.offsets + bags[k] + 1);
        if (!is_bag(feature, bags[k], from, to) || at < from || at >= to) rows[k] = NO_ROW;
    }
    return false;
}

/* The lookups [from, to) of a bag if the offsets are valid; empty past the last bag. */
struct bag_t {
    rf_u32 from, to;
};
RF_INLINE bag_t bag_load(const feature_t &feature, int bag) {
    bag_t bag_range = {0, 0};
    if (bag < feature.bags) {
        bag_range.from = (rf_u32)(rf_load(feature.offsets + bag) - feature.first);
        bag_range.to = (rf_u32)(rf_load(feature.offsets + bag + 1) - feature.first);
    }
    return bag_range;
}

/* Clears the bits that begins_write sets. The caller must synchronise between the two. */
RF_INLINE void begins_clear(const feature_t &feature, const layout_t &layout) {
    if (!layout.near) return;
    for (rf_u32 i = threadIdx.x; i < words_of(feature); i += BLOCK) layout.begins[i] = 0;
}

/* Writes the bag in which each piece begins; nothing if offsets are invalid. */
RF_INLINE void marks_write(const feature_t &feature, const layout_t &layout, rf_u32 *of_warps) {
    if (!feature.sound) return;
    const rf_u32 size = layout.near ? 32 : 1u << layout.piece_bits;
    const rf_u32 words = words_of(feature);
    rf_u32 n_bags = 0; /* number of bags with lookups before this turn */
    for (int start = 0; start < feature.bags; start += BLOCK) {
        const int bag = start + (int)threadIdx.x;
        const auto [from, to] = bag_load(feature, bag);
        if (!layout.near) {
            for (rf_u32 piece = (from + size - 1) / size; piece * size < to; piece++)
                layout.marks[piece] = (rf_u16)bag;
            continue;
        }
        const rf_u32 is_own = __ballot_sync(RF_FULL_WARP, to > from);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = __popc(is_own);
        __syncthreads();
        const rf_u32 before = n_bags + __popc(is_own & ((1u << threadIdx.x % 32) - 1));
        const rf_u32 number =
            rf_sum_of_warps_before<(int)WARPS>(before, of_warps, (int)(threadIdx.x / 32), n_bags);
        if (start + BLOCK < feature.bags)
            __syncthreads(); /* separates turns; the caller synchronises after the last */
        if (to == from) continue;
        layout.numbers[number] = (rf_u16)bag;
        atomicOr(&layout.begins[from / 32], 1u << from % 32);
        const rf_u32 last =
            to == feature.count ? words - 1 : to / 32; /* past all lookups it is the last bag */
        for (rf_u32 word = from / 32 + 1; word <= last; word++) layout.before[word] = (rf_u16)(number + 1);
    }
    if (threadIdx.x != 0) return;
    if (layout.near) {
        layout.before[0] = 0;
    } else {
        layout.marks[(feature.count + size - 1) / size] = (rf_u16)(feature.bags - 1);
    }
}

#endif
