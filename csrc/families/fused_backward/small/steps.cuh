/* Lists the lookups of small features by steps. A step is up to 32 consecutive lookups; if bags are long, of
 * one bag. The steps form up to 16 parts of consecutive steps. A warp has a part, and a part has a counter of
 * BITS for each row. Prefix sums (step_sums.cuh) give the positions at which each part's lookups of a row
 * begin. Then the warps go through their parts again, step by step: the position of a lookup is the start of
 * its row plus the old value of its counter (step_list.cuh). The order of lookups within a bag has no effect,
 * because the list holds only bags. If a step has several bags, the lanes with the same row find each other
 * (__match_any_sync), and one of them counts for all. So the list is that of a stable sort.
 *
 * Counters have 8 bits, so that many warps have a counter for each row. A row with more lookups than that
 * overflows, which shows in the total: the feature is then listed again with counters of 16 bits.
 */
#ifndef RECFUSE_CUDA_BACKWARD_STEPS_CUH
#define RECFUSE_CUDA_BACKWARD_STEPS_CUH

#include "families/fused_backward/small/parts.cuh"

enum {
    QUAD = 4, /* steps that a warp handles at once */
    LONG_BAG = 8, /* least mean number of lookups of a bag for steps of one bag */
    MOST_AVERAGE = 64, /* mean number of lookups of a row above which 8 bits may overflow */
    LEAST_WORDS = 2, /* words of counters of a row */
    MOST_WORDS = 4,
    SUMMED = 128, /* rows that a warp sums at once */
    LEAST_LIST = 1024 /* bytes: for the longest row and for rounding */
};
static_assert(QUAD * 32 == UNIT, "as indices are loaded");

/* Counters of BITS. */
template <int BITS> struct counters_t {
    enum {
        OF_WORD = 32 / BITS, /* parts per word */
        MOST = (1 << BITS) - 1
    };
    /* Returns an increment of a part's counter. */
    static RF_INLINE rf_u32 unit(rf_u32 part) { return 1u << part % OF_WORD * BITS; }
    /* Returns the selector of __byte_perm that extracts a part's counter. */
    static RF_INLINE rf_u32 byte_selector(rf_u32 part) {
        return BITS == 8 ? 0x4440 + part % OF_WORD : 0x4410 + part % OF_WORD * 0x22;
    }
    /* Returns the sum of a word's counters and `sum_before`. */
    static RF_INLINE rf_u32 sum(rf_u32 word, rf_u32 sum_before) {
        return BITS == 8 ? __dp4a(word, 0x01010101u, sum_before)
                         : sum_before + (word & 0xffffu) + (word >> 16);
    }
    /* Returns for each counter of a word the sum of the previous counters and `sum_before`. Sums do not carry. */
    static RF_INLINE rf_u32 sums_before(rf_u32 word, rf_u32 sum_before) {
        return BITS == 8 ? word * 0x01010100u + sum_before * 0x01010101u
                         : (word << 16) + sum_before * 0x00010001u;
    }
};

/* The layout of shared memory. */
struct steps_t {
    rf_u32
        *counts; /* [words][stride]: a counter per row and part, after a word per lane that is never read */
    rf_u32 stride; /* rows, rounded up to the rows that are summed at once */
    rf_u16 *begins; /* [stride]: begins of the rows in the list */
    bool long_bags;
    rf_u32 *firsts; /* [quads * QUAD + 1], of long bags: a step's bag and, 16 bits up, its first lookup */
    rf_u16 *bags; /* [lookups, up to whole quads], otherwise: the bag of each lookup */
    rf_u16 *window; /* the list, [window_size] and its alignment */
    rf_u32 window_size;
    rf_u32 quads, words, parts;
};

/* Returns true if a feature is listed by steps when there is room. With few rows the lanes would
 * serialise. */
RF_INLINE bool is_for_steps(const feature_t &feature) {
    return feature.sound && feature.count < NEAR_LOOKUPS && feature.rows > RF_SMALL_FEW_ROWS;
}

/* Divides shared memory. Returns false if there is too little. */
template <int BITS>
RF_INLINE bool steps_room(const feature_t &feature, const block_t &block, rf_u8 *memory, int bytes,
                          steps_t &steps) {
    const int count = (int)feature.count;
    /* The share of the list that the block's rows have on average. */
    const int list = (int)((rf_u64)feature.count * block.rows / feature.rows) * 2;
    steps.long_bags = count >= LONG_BAG * feature.bags;
    const int most_steps = count / 32 + feature.bags + 2 * QUAD + 1;
    const int bag_bytes = rounded_up(steps.long_bags ? most_steps * 4 : rounded_up(count, UNIT) * 2, 16);
    steps.stride = (block.rows + SUMMED - 1) / SUMMED * SUMMED;
    const int stride = (int)steps.stride, other_bytes = 32 * 4 + stride * 2 + bag_bytes + LEAST_LIST;
    int bytes_left = bytes - other_bytes - list; /* bytes for counters */
    if (bytes_left < LEAST_WORDS * 4 * stride)
        bytes_left += list / 4; /* a part of the list then goes directly to memory */
    if (bytes_left < LEAST_WORDS * 4 * stride) return false;
    typedef counters_t<BITS> counters;
    const rf_u32 useful = feature.count / UNIT / counters::OF_WORD + 1; /* a part has at least a quad */
    steps.words = min(min(bytes_left / 4 / steps.stride, (rf_u32)MOST_WORDS), useful);
    steps.parts = steps.words * counters::OF_WORD;
    steps.counts = (rf_u32 *)memory + 32;
    steps.begins = (rf_u16 *)(steps.counts + steps.words * steps.stride);
    steps.firsts = (rf_u32 *)(steps.begins + steps.stride);
    steps.bags = (rf_u16 *)steps.firsts;
    const int bytes_used = other_bytes - LEAST_LIST + (int)steps.words * 4 * stride;
    steps.window = (rf_u16 *)(memory + bytes_used);
    steps.window_size = (rf_u32)(bytes - bytes_used) / 2 - 8; /* the window has the alignment of the list */
    return true;
}

/* Writes the bags of lookups: a thread has a bag, and the lanes of its warp share long bags. */
RF_INLINE void lookups_bags_write(const feature_t &feature, const steps_t &steps) {
    for (int start = 0; start < feature.bags; start += BLOCK) {
        const int bag = start + (int)threadIdx.x;
        auto [from, to] = bag_load(feature, bag);
        const rf_u32 first_end = min(to, from + LONG_BAG);
        for (; from < first_end; from++) steps.bags[from] = (rf_u16)bag;
        for (rf_u32 bytes_left = __ballot_sync(RF_FULL_WARP, from < to); bytes_left != 0;
             bytes_left &= bytes_left - 1) {
            const int lane = __ffs(bytes_left) - 1;
            const rf_u32 limit = __shfl_sync(RF_FULL_WARP, to, lane);
            const rf_u16 own_cells = (rf_u16)__shfl_sync(RF_FULL_WARP, bag, lane);
            for (rf_u32 at = __shfl_sync(RF_FULL_WARP, from, lane) + threadIdx.x % 32; at < limit; at += 32)
                steps.bags[at] = own_cells;
        }
    }
}

/* Writes the steps and clears counters. The caller must synchronise before they are read. */
RF_INLINE void steps_begin(const feature_t &feature, steps_t &steps, rf_u32 *of_warps) {
    for (rf_u32 i = threadIdx.x; i < steps.words * steps.stride / 4; i += BLOCK)
        ((rf_bytes<16> *)steps.counts)[i] = rf_bytes<16>{};
    if (!steps.long_bags) {
        steps.quads = (feature.count + UNIT - 1) / UNIT;
        lookups_bags_write(feature, steps);
        return;
    }
    rf_u32 n_steps = 0;
    for (int start = 0; start < feature.bags; start += BLOCK) {
        const int bag = start + (int)threadIdx.x;
        auto [from, to] = bag_load(feature, bag);
        rf_u32 sum;
        if (start > 0) __syncthreads(); /* all threads have read the previous sums */
        rf_u32 *next =
            steps.firsts + n_steps + rf_sum_of_block_before<(int)WARPS>((to - from + 31) / 32, of_warps, sum);
        for (; from < to; from += 32) *next++ = from << 16 | (rf_u32)bag;
        n_steps += sum;
    }
    steps.quads = (n_steps + QUAD - 1) / QUAD;
    /* Empty steps, including one prefetched quad past the end. */
    if (n_steps + threadIdx.x <= (steps.quads + 1) * QUAD)
        steps.firsts[n_steps + threadIdx.x] = feature.count << 16 | 0xffffu;
}

/* Returns the first quad of a part, and the first lookup of a quad. */
RF_INLINE rf_u32 quad_of(const steps_t &steps, rf_u32 part) { return part * steps.quads / steps.parts; }
RF_INLINE rf_u32 lookup_of(const feature_t &feature, const steps_t &steps, rf_u32 quad) {
    return steps.long_bags ? steps.firsts[quad * QUAD] >> 16 : min(quad * UNIT, feature.count);
}

/* Returns the address of a part's counter of row 0. */
template <int BITS> RF_INLINE rf_u32 counts_of(const steps_t &steps, rf_u32 part) {
    return rf_shared_pinned(steps.counts + part / counters_t<BITS>::OF_WORD * steps.stride);
}

/* Counts the lookups of the block's rows. Returns the number of this thread. MORE: also counts lookups of
 * rows before the block's, and subtracts lookups that do not count from their bags. Warps alternate between
 * two units, because a unit takes less time than a load, and load the next two before they handle these. */
template <int BITS, bool MORE>
RF_INLINE rf_u32 steps_count(const feature_t &feature, const steps_t &steps, const block_t &block,
                             rf_u32 &before) {
    enum { UNITS = sizeof(RF_INDEX) > 4 || MORE ? 1 : 2 };
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    rf_u32 n_counted = 0;
    if (warp >= steps.parts) return 0;
    const rf_u32 cells = counts_of<BITS>(steps, warp), unit = counters_t<BITS>::unit(warp);
    const rf_u32 unread = rf_shared_pinned(steps.counts - 32 + lane);
    rf_u32 at = lookup_of(feature, steps, quad_of(steps, warp));
    feature_t part = feature;
    part.count = lookup_of(feature, steps, quad_of(steps, warp + 1));
    RF_INDEX coming[UNITS][STEPS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) indices_load(part, at + u * UNIT + lane, coming[u]);
#pragma unroll 1
    for (; at < part.count; at += UNITS * UNIT) {
        rf_u32 own_cells[UNITS][STEPS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                bool is_own;
                own_cells[u][k] =
                    cell_of(feature, coming[u][k], block.first_row, block.rows, cells, unread, is_own);
                n_counted += is_own;
            }
            if (!MORE) continue;
            rf_u32 rows[STEPS];
            rows_of(feature, coming[u], rows);
#pragma unroll
            for (int k = 0; k < STEPS; k++) before += rows[k] < block.first_row;
            if (block.factors != nullptr) count_less(part, at + u * UNIT + lane, rows, (int *)block.factors);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) indices_load(part, at + (UNITS + u) * UNIT + lane, coming[u]);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int k = 0; k < STEPS; k++) rf_shared_add(own_cells[u][k], unit);
        }
    }
    return n_counted;
}

#endif
