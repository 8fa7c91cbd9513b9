/* Sums of rows from the lists of their bags. The including file defines the names that small_columns.cuh
 * needs, and QUADS, the number of prefetched quads of bags. */
#ifndef RECFUSE_CUDA_BACKWARD_POOLED_CUH
#define RECFUSE_CUDA_BACKWARD_POOLED_CUH

#include "families/fused_backward/small/small_columns.cuh"

enum {
    AT_ONCE = 4, /* bags of a list in one load, a quad */
    GRADS_AT_ONCE = 2 /* bags whose gradients a lane loads at once */
};
typedef rf_bytes<2 * AT_ONCE> bags_t;

/* The bags of a row: a range of the list. */
struct range_t {
    rf_u32 from, to;
};

RF_INLINE rf_u32 lookups_of(const range_t &range) { return range.to - range.from; }
RF_INLINE bool is_short(const range_t &range) { return lookups_of(range) - 1 < RF_SMALL_LONG; }
RF_INLINE bool is_long(const range_t &range) { return lookups_of(range) > RF_SMALL_LONG; }

/* The inputs of a block's task. */
struct rows_t {
    const rf_u32 *starts; /* of the feature's row 0 */
    const rf_u16 *list; /* of all features; starts are positions in it */
    int row; /* first row of its table in the matrix */
    int first, last;

    RF_INLINE range_t range(int number) const {
        const rf_u32 *const at =
            (const rf_u32 *)rf_address((const rf_u8 *)starts, (rf_u32)number, sizeof *starts);
        range_t found = {0, 0};
        if (number < last) found = {rf_load(at), rf_load(at + 1)};
        return found;
    }
    /* Returns the quad that contains a position. */
    RF_INLINE const bags_t *quads_at(rf_u32 position) const {
        return (const bags_t *)rf_address((const rf_u8 *)list, position & ~(AT_ONCE - 1u), sizeof *list);
    }
};

/* The bags of a list from the last multiple of four at or before a row's first bag: enough for most rows.
 * They are prefetched a row earlier. A load issued while bags are added is waited for together with all loads
 * of the next row, because loads in flight share a counter. */
struct window_t {
    bags_t of[QUADS];
};
RF_INLINE window_t window_load(const rows_t &rows, const range_t &range, bool is_present) {
    const bags_t *const quads = rows.quads_at(range.from);
    const rf_u32 upto =
        is_present ? range.from % AT_ONCE + lookups_of(range) : 0; /* row's end in the window */
    window_t window = {};
#pragma unroll
    for (int i = 0; i < QUADS; i++)
        if (upto > (rf_u32)i * AT_ONCE) window.of[i] = rf_load(quads + i);
    return window;
}

/* Adds the gradients of the next AT_ONCE bags, or of the remaining ones, in their order. The bags are in two
 * adjacent quads of a window, from position `lead` of the first quad on. */
RF_INLINE void quad_add(const mapping_t &mapping, const bags_t &quad, const bags_t &next_quad, rf_u32 lead,
                        int remaining, sums_t &sums) {
    const rf_u32 low = lead < 2 ? quad.word[0] : quad.word[1], shift = lead % 2 * 16;
    const rf_u32 middle = lead < 2 ? quad.word[1] : next_quad.word[0];
    const rf_u32 high = lead < 2 ? next_quad.word[0] : next_quad.word[1];
    const rf_u32 pairs[] = {__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift)};
#pragma unroll
    for (int pair = 0; pair < AT_ONCE; pair += GRADS_AT_ONCE) {
        four_t found[GRADS_AT_ONCE][VECTORS];
        float factors[GRADS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < GRADS_AT_ONCE; k++) {
            const rf_u32 bag = pairs[(pair + k) / 2] >> (pair + k) % 2 * 16 & 0xffffu;
            factors[k] = 1.0f;
            if (pair + k >= remaining) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) found[k][v] = grad_load(mapping, bag, v);
            if (!RF_STAGED && mapping.factors != nullptr) factors[k] = rf_load(mapping.factors + bag);
        }
#pragma unroll
        for (int k = 0; k < GRADS_AT_ONCE; k++) {
            if (pair + k >= remaining) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                float *const to = sums.of[v].of;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    to[i] =
                        RF_STAGED ? to[i] + found[k][v].of[i] : fmaf(factors[k], found[k][v].of[i], to[i]);
            }
        }
    }
}

/* Adds the gradients of consecutive bags of the list in their order; `window`: the first bags. */
RF_INLINE void range_add(const rows_t &rows, const mapping_t &mapping, rf_u32 from, rf_u32 lookups,
                         const window_t &window, sums_t &sums) {
    const rf_u32 lead = from % AT_ONCE;
    int remaining = (int)lookups;
#pragma unroll
    for (int i = 0; i + 1 < QUADS; i++, remaining -= AT_ONCE) {
        if (remaining <= 0) return;
        quad_add(mapping, window.of[i], window.of[i + 1], lead, remaining, sums);
    }
    if (remaining <= 0) return;
    enum { DEEP = QUADS > 2 }; /* deeper prefetch if registers allow it */
    const bags_t *next = rows.quads_at(from);
    bags_t now = window.of[QUADS - 1], next_quad = {}, after_next = {};
    if (remaining > AT_ONCE - (int)lead) next_quad = rf_load(next + QUADS);
    if (DEEP && remaining > 2 * AT_ONCE - (int)lead) after_next = rf_load(next + QUADS + 1);
#pragma unroll 1
    for (; remaining > 0; remaining -= AT_ONCE) {
        quad_add(mapping, now, next_quad, lead, remaining, sums);
        next++;
        now = next_quad;
        if (DEEP) next_quad = after_next;
        if (remaining > (DEEP ? 3 : 2) * AT_ONCE - (int)lead)
            (DEEP ? after_next : next_quad) = rf_load(next + QUADS + DEEP);
    }
}

/* Sums one row by the whole block. `partials`: [WARPS][columns]. */
RF_INLINE void row_pool_long(const rf_small_args &args, const rf_epilogue_t &epilogue,
                             const mapping_t &mapping, const rows_t &rows, int number, float *partials) {
    const int warp = threadIdx.x / 32;
    const range_t range = rows.range(number);
    const rf_u32 lookups = range.to - range.from;
    const rf_u32 group_lookups =
        (lookups + mapping.groups * AT_ONCE - 1) / (mapping.groups * AT_ONCE) * AT_ONCE;
    range_t part_range;
    part_range.from = min(range.from + mapping.group * group_lookups, range.to);
    part_range.to = min(part_range.from + group_lookups, range.to);
    row_t row;
    row_load(mapping, number, mapping.group == 0, row);
    sums_t sums = {};
    range_add(rows, mapping, part_range.from, lookups_of(part_range),
              window_load(rows, part_range, part_range.from < part_range.to), sums);
    for (int stride = mapping.lanes; stride < 32; stride *= 2) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.of[v].of[i] += __shfl_xor_sync(RF_FULL_WARP, sums.of[v].of[i], stride);
        }
    }
    if (threadIdx.x % 32 < (rf_u32)mapping.lanes) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            sums_store(partials + 4 * ((warp * VECTORS + v) * mapping.lanes + mapping.lane), sums.of[v]);
    }
    __syncthreads();
    if (mapping.group == 0) {
        for (int other = 1; other < WARPS; other++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const float *from = partials + 4 * ((other * VECTORS + v) * mapping.lanes + mapping.lane);
                const four_t part = sums_load(rf_shared_pinned(from));
#pragma unroll
                for (int i = 0; i < 4; i++) sums.of[v].of[i] += part.of[i];
            }
        }
    }
    if (threadIdx.x < 32)
        row_epilogue(args, epilogue, mapping, {number, rows.row + number, lookups, mapping.group == 0}, row,
                     sums);
    __syncthreads(); /* before the parts of the next row are written */
}

/* Sums the rows that many bags look up. `found`: [WARPS]. */
RF_INLINE void rows_pool_long(const rf_small_args &args, const rf_epilogue_t &epilogue,
                              const mapping_t &mapping, const rows_t &rows, rf_u32 *found, float *partials) {
    for (int first = rows.first; first < rows.last; first += BLOCK) {
        const range_t range = rows.range(first + threadIdx.x);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, is_long(range));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = all;
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) {
            for (rf_u32 remaining = found[warp]; remaining != 0; remaining &= remaining - 1)
                row_pool_long(args, epilogue, mapping, rows, first + warp * 32 + __ffs(remaining) - 1,
                              partials);
        }
        __syncthreads(); /* all threads have read `found` */
    }
}

#endif
