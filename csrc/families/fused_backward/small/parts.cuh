/* The lists that steps.cuh cannot build. A warp goes through each part of the lookups in order, 32 at once.
 * Within a step, lookups of one row and different bags must keep their order: the lanes with the same row
 * find each other (__match_any_sync), and one of them counts for all. If all lanes have one bag, each counts
 * for itself. Counters have 16 bits if the number of lookups allows it; shared memory limits the number of
 * parts. A row that is too long, and a feature with many more lookups than fit, are written directly to
 * memory.
 *
 * The bag of a lookup: a bit is set at the start of each non-empty bag, so that the bits up to a lookup count
 * the bags. If there are too many bags or lookups for that, by bisection between the bags of its piece and
 * the next, which are marked first. With invalid offsets, by bisection over all bags and a check that the bag
 * holds the lookup.
 */
#ifndef RECFUSE_CUDA_BACKWARD_PARTS_CUH
#define RECFUSE_CUDA_BACKWARD_PARTS_CUH

#include "families/fused_backward/small/lists.cuh"

/* The work of a block. */
struct block_t {
    rf_u32 first_row, rows;
    bool is_last; /* it has the last rows of the feature */
    rf_u32 *starts; /* begins of the feature's rows */
    rf_u16 *list; /* the list of all features */
    float *factors; /* of the feature if this block writes them, else nullptr */
};

/* The rows [first, last) of the block, listed together: positions [from, to) of the list. */
struct span_t {
    rf_u32 first, last, from, to;
    bool fits_window; /* true: the span fits into the window */
};

/* Initialises the counts of lookups of each bag, from which lookups that do not count are subtracted. */
RF_INLINE void counts_begin(const feature_t &feature, int *counts) {
    for (int bag = threadIdx.x; bag < feature.bags; bag += BLOCK) {
        const rf_i64 from = rf_load(feature.offsets + bag), to = rf_load(feature.offsets + bag + 1);
        counts[bag] = is_bag(feature, bag, from, to) ? (int)(to - from) : 0;
    }
}
RF_INLINE void counts_end(const feature_t &feature, float *factors) {
    for (int bag = threadIdx.x; bag < feature.bags; bag += BLOCK) {
        const int count = __ldcg((const int *)factors + bag);
        factors[bag] = count > 1 ? 1.0f / (float)count : 1.0f;
    }
}
RF_INLINE void count_less(const feature_t &feature, rf_u32 position, const rf_u32 (&rows)[STEPS],
                          int *counts) {
    rf_u32 validity[STEPS];
    bool any = false;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        validity[k] = position + k * 32 < feature.count ? 0 : NO_ROW;
        any |= rows[k] == NO_ROW && validity[k] == 0;
    }
    if (!any) return;
    int bags[STEPS];
    bags_find(feature, position, 0, feature.bags, bags);
    if (!feature.sound) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_i64 at = feature.first + (rf_i64)position + k * 32;
            const rf_i64 from = rf_load(feature.offsets + bags[k]);
            const rf_i64 to = rf_load(feature.offsets + bags[k] + 1);
            if (!is_bag(feature, bags[k], from, to) || at < from || at >= to) validity[k] = NO_ROW;
        }
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (rows[k] == NO_ROW && validity[k] == 0) atomicAdd(counts + bags[k], -1);
}

/* Counts all lookups. Returns the number of lookups of this thread in rows before the block's. */
RF_APART rf_u32 rows_count(const feature_t feature, const layout_t layout, rf_u32 first_row, rf_u32 n_rows,
                           int *counts) {
    const rf_u32 lane = threadIdx.x % 32, units = (feature.count + UNIT - 1) / UNIT;
    rf_u32 before = 0, part = 0, part_end = layout.part_units;
    RF_INDEX coming[STEPS];
    indices_load(feature, threadIdx.x / 32 * UNIT + lane, coming);
#pragma unroll 1
    for (rf_u32 unit = threadIdx.x / 32; unit < units; unit += WARPS) {
        const rf_u32 position = unit * UNIT + lane;
        rf_u32 rows[STEPS];
        rows_of(feature, coming, rows);
        indices_load(feature, position + WARPS * UNIT, coming);
        if (counts != nullptr) count_less(feature, position, rows, counts);
        if (!feature.sound) {
            int bags[STEPS];
            bags_load(feature, layout, position, rows, bags);
        }
        while (unit >= part_end) {
            part++;
            part_end += layout.part_units;
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_u32 row = rows[k] - first_row;
            const bool is_own = row < n_rows; /* false for NO_ROW */
            if (first_row > 0) before += rows[k] < first_row;
            if (n_rows <= RF_SMALL_FEW_ROWS) {
                const rf_u32 alike = __match_any_sync(RF_FULL_WARP, is_own ? (int)row : -1);
                if (is_own && (rf_u32)__ffs(alike) == lane + 1)
                    cell_add(layout, row * layout.parts + part, __popc(alike));
            } else if (is_own) {
                cell_add(layout, row * layout.parts + part, 1);
            }
        }
    }
    return before;
}

/* The caller must synchronise before counting. */
RF_INLINE void counters_clear(const feature_t &feature, const layout_t &layout) {
    for (int i = threadIdx.x; i < layout.cells_bytes / 16; i += BLOCK)
        ((rf_bytes<16> *)layout.cells)[i] = rf_bytes<16>{};
    begins_clear(feature, layout);
}

/* Returns the sum of four words of counters. */
RF_INLINE rf_u32 word_sum(const layout_t &layout, rf_u32 word) {
    return layout.cell_bytes == 4 ? word : (word & 0xffffu) + (word >> 16);
}
/* Replaces the counters of a word by positions and advances `at`. */
RF_INLINE rf_u32 word_places(const layout_t &layout, rf_u32 word, rf_u32 &at) {
    const rf_u32 first = at;
    at += word_sum(layout, word);
    if (layout.cell_bytes == 4) return first;
    return first | (first + (word & 0xffffu)) << 16;
}

/* Replaces counters by positions: exclusive prefix sums. Returns the total. */
RF_INLINE rf_u32 cells_sum(const layout_t &layout, rf_u32 *of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = layout.cells_bytes / TILE;
    const int tiles_a_warp = (tiles + WARPS - 1) / WARPS, first = warp * tiles_a_warp,
              limit = min(first + tiles_a_warp, tiles);
    rf_bytes<16> *words = (rf_bytes<16> *)layout.cells;
    rf_u32 sum = 0;
    for (int tile = first; tile < limit; tile++) {
        const rf_bytes<16> words_found = words[tile * 32 + lane];
#pragma unroll
        for (int i = 0; i < 4; i++) sum += word_sum(layout, words_found.word[i]);
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(RF_FULL_WARP, sum, apart);
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    rf_u32 total = 0, before = rf_sum_of_warps_before<(int)WARPS>(0u, of_warps, warp, total);
    for (int tile = first; tile < limit; tile++) {
        rf_bytes<16> words_found = words[tile * 32 + lane];
        rf_u32 is_own = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) is_own += word_sum(layout, words_found.word[i]);
        const rf_u32 upto = rf_sum_of_lanes_to(is_own);
        rf_u32 at = before + upto - is_own;
#pragma unroll
        for (int i = 0; i < 4; i++) words_found.word[i] = word_places(layout, words_found.word[i], at);
        words[tile * 32 + lane] = words_found;
        before += __shfl_sync(RF_FULL_WARP, upto, 31);
    }
    __syncthreads();
    return total;
}

/* Returns the rows from `first` on that are listed together. */
RF_INLINE span_t span_of(const layout_t &layout, rf_u32 first, rf_u32 rows, rf_u32 total) {
    span_t span = {first, rows, cell_at(layout, first * layout.parts), total, false};
    if (total > MOST_SPANS * layout.window_size) return span;
    span.fits_window = total - span.from <= layout.window_size;
    if (span.fits_window) return span;
    rf_u32 limit = rows; /* the first row that does not fit is in (span.last, limit] */
    span.last = first;
    while (limit - span.last > 1) {
        const rf_u32 middle = span.last + (limit - span.last) / 2;
        if (cell_at(layout, middle * layout.parts) - span.from <= layout.window_size) {
            span.last = middle;
        } else {
            limit = middle;
        }
    }
    span.fits_window = span.last > first;
    if (!span.fits_window) span.last = first + 1;
    span.to = span.last < rows ? cell_at(layout, span.last * layout.parts) : total;
    return span;
}

/* Lists the lookups of a warp's part whose rows are in the span; position p of the list is to[p]. */
RF_INLINE void part_list(const feature_t &feature, const layout_t &layout, rf_u32 first_row,
                         const span_t &span, rf_u16 *to) {
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = (1u << lane) - 1;
    const rf_u32 units = (feature.count + UNIT - 1) / UNIT;
    const rf_u32 limit = min((warp + 1) * layout.part_units, units);
    rf_u32 unit = warp * layout.part_units;
    if (warp >= (rf_u32)layout.parts || unit >= limit) return;
    RF_INDEX coming[STEPS];
    indices_load(feature, unit * UNIT + lane, coming);
#pragma unroll 1
    for (; unit < limit; unit++) {
        rf_u32 rows[STEPS];
        int bags[STEPS];
        rows_of(feature, coming, rows);
        indices_load(feature, (unit + 1) * UNIT + lane, coming);
        const bool one_bag = bags_load(feature, layout, unit * UNIT + lane, rows, bags);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const rf_u32 row = rows[k] - first_row;
            const bool is_own = row - span.first < span.last - span.first;
            const rf_u32 cell = row * layout.parts + warp;
            rf_u32 list_position = 0;
            const bool no_order = one_bag || (feature.sound && __shfl_sync(RF_FULL_WARP, bags[k], 0) ==
                                                                   __shfl_sync(RF_FULL_WARP, bags[k], 31));
            if (no_order) {
                if (is_own) list_position = cell_add(layout, cell, 1);
            } else {
                const rf_u32 alike = __match_any_sync(RF_FULL_WARP, is_own ? (int)row : -1);
                const int leader = __ffs(alike) - 1;
                if (is_own && (int)lane == leader) list_position = cell_add(layout, cell, __popc(alike));
                list_position = __shfl_sync(RF_FULL_WARP, list_position, leader) + __popc(alike & before);
            }
            if (is_own) to[list_position] = (rf_u16)bags[k];
            __syncwarp(); /* the leaders of the next step are other lanes and read these counters */
        }
    }
}

/* Copies the window to the list; both have the same position modulo 16 bytes. */
RF_INLINE void window_copy(const rf_u16 *from, rf_u16 *to, rf_u32 count) {
    const rf_u32 lead = min((rf_u32)((16 - (rf_u64)to % 16) % 16 / 2), count);
    const rf_u32 vectors = (count - lead) / 8, tail = lead + vectors * 8;
    if (threadIdx.x < lead) to[threadIdx.x] = from[threadIdx.x];
    if (threadIdx.x < count - tail) to[tail + threadIdx.x] = from[tail + threadIdx.x];
    for (rf_u32 i = threadIdx.x; i < vectors; i += BLOCK)
        ((rf_bytes<16> *)(to + lead))[i] = ((const rf_bytes<16> *)(from + lead))[i];
}

/* Writes the begins of the rows in the list. Returns the address of the block's part of the list. */
RF_INLINE rf_u16 *starts_write(const feature_t &feature, const layout_t &layout, const block_t &block,
                               rf_u32 before, rf_u32 total) {
    const rf_u32 list_position = (rf_u32)feature.first + before;
    for (rf_u32 row = threadIdx.x; row < block.rows; row += BLOCK)
        block.starts[block.first_row + row] = list_position + cell_at(layout, row * layout.parts);
    if (threadIdx.x == 0 && block.is_last) block.starts[block.first_row + block.rows] = list_position + total;
    return block.list + list_position;
}

/* Returns the sum of a number of each thread to all threads; of_warps [WARPS]. Synchronises before their next
 * use. */
RF_INLINE rf_u32 sum_of_block(rf_u32 is_own, rf_u32 *of_warps) {
    rf_u32 total;
    (void)rf_sum_of_block_before<(int)WARPS>(is_own, of_warps, total);
    return total;
}

/* Lists span by span; spans built on chip are then copied. */
RF_INLINE void spans_list(const feature_t &feature, const layout_t &layout, const block_t &block,
                          rf_u16 *list, rf_u32 total) {
    for (rf_u32 next = 0; next < block.rows && total > 0;) {
        const span_t span = span_of(layout, next, block.rows, total);
        rf_u16 *to = list + span.from;
        rf_u16 *window = layout.window + (rf_u64)to % 16 / 2;
        __syncthreads(); /* all threads have read the end of the span and copied the previous one */
        part_list(feature, layout, block.first_row, span, span.fits_window ? window - span.from : list);
        __syncthreads();
        if (span.fits_window) window_copy(window, to, span.to - span.from);
        next = span.last;
    }
}

/* Prepares shared memory before the block counts lookups. */
RF_INLINE void counting_begin(const feature_t &feature, const block_t &block) {
    if (block.factors != nullptr) counts_begin(feature, (int *)block.factors);
    __syncthreads();
}
/* Ends the counting; `before`: this thread's lookups in rows before the block's. Returns the sum over all
 * threads. */
RF_INLINE rf_u32 counting_end(const feature_t &feature, const block_t &block, rf_u32 before,
                              rf_u32 *of_warps) {
    before = block.first_row > 0 ? sum_of_block(before, of_warps) : 0;
    __syncthreads();
    if (block.factors != nullptr) counts_end(feature, block.factors);
    return before;
}

/* Lists all rows, a warp a part. */
RF_APART void list_by_parts(const rf_small_lists_args &args, const feature_t feature, const block_t block,
                            rf_u8 *memory, rf_u32 *of_warps) {
    const layout_t layout = layout_of(feature, memory, args.shared_bytes, (int)block.rows);
    counters_clear(feature, layout);
    marks_write(feature, layout, of_warps);
    counting_begin(feature, block);
    rf_u32 before = rows_count(feature, layout, block.first_row, block.rows, (int *)block.factors);
    before = counting_end(feature, block, before, of_warps);
    const rf_u32 total = cells_sum(layout, of_warps);
    spans_list(feature, layout, block, starts_write(feature, layout, block, before, total), total);
}

#endif
