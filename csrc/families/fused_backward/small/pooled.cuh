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
struct places_t {
    rf_u32 from, to;
};

RF_INLINE rf_u32 lookups_of(const places_t &places) { return places.to - places.from; }
RF_INLINE bool is_short(const places_t &places) { return lookups_of(places) - 1 < RF_SMALL_LONG; }
RF_INLINE bool is_long(const places_t &places) { return lookups_of(places) > RF_SMALL_LONG; }

/* The inputs of a block's task. */
struct rows_t {
    const rf_u32 *starts; /* of the feature's row 0 */
    const rf_u16 *list; /* of all features; starts are positions in it */
    int row; /* first row of its table in the matrix */
    int first, last;

    RF_INLINE places_t places(int number) const {
        const rf_u32 *const at =
            (const rf_u32 *)rf_place((const rf_u8 *)starts, (rf_u32)number, sizeof *starts);
        places_t found = {0, 0};
        if (number < last) found = {rf_load(at), rf_load(at + 1)};
        return found;
    }
    /* Returns the quad that contains a position. */
    RF_INLINE const bags_t *quads_at(rf_u32 place) const {
        return (const bags_t *)rf_place((const rf_u8 *)list, place & ~(AT_ONCE - 1u), sizeof *list);
    }
};

/* The bags of a list from the last multiple of four at or before a row's first bag: enough for most rows.
 * They are prefetched a row earlier. A load issued while bags are added is waited for together with all loads
 * of the next row, because loads in flight share a counter. */
struct window_t {
    bags_t of[QUADS];
};
RF_INLINE window_t window_load(const rows_t &rows, const places_t &places, bool there) {
    const bags_t *const quads = rows.quads_at(places.from);
    const rf_u32 upto = there ? places.from % AT_ONCE + lookups_of(places) : 0; /* row's end in the window */
    window_t window = {};
#pragma unroll
    for (int i = 0; i < QUADS; i++)
        if (upto > (rf_u32)i * AT_ONCE) window.of[i] = rf_load(quads + i);
    return window;
}

/* Adds the gradients of the next AT_ONCE bags, or of the remaining ones, in their order. The bags are in two
 * adjacent quads of a window, from position `lead` of the first quad on. */
RF_INLINE void quad_add(const place_t &place, const bags_t &quad, const bags_t &behind, rf_u32 lead, int left,
                        sums_t &sums) {
    const rf_u32 low = lead < 2 ? quad.word[0] : quad.word[1], shift = lead % 2 * 16;
    const rf_u32 middle = lead < 2 ? quad.word[1] : behind.word[0];
    const rf_u32 high = lead < 2 ? behind.word[0] : behind.word[1];
    const rf_u32 pairs[] = {__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift)};
#pragma unroll
    for (int pair = 0; pair < AT_ONCE; pair += GRADS_AT_ONCE) {
        four_t found[GRADS_AT_ONCE][VECTORS];
        float factors[GRADS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < GRADS_AT_ONCE; k++) {
            const rf_u32 bag = pairs[(pair + k) / 2] >> (pair + k) % 2 * 16 & 0xffffu;
            factors[k] = 1.0f;
            if (pair + k >= left) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) found[k][v] = grad_load(place, bag, v);
            if (!RF_STAGED && place.factors != nullptr) factors[k] = rf_load(place.factors + bag);
        }
#pragma unroll
        for (int k = 0; k < GRADS_AT_ONCE; k++) {
            if (pair + k >= left) continue;
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
RF_INLINE void places_add(const rows_t &rows, const place_t &place, rf_u32 from, rf_u32 lookups,
                          const window_t &window, sums_t &sums) {
    const rf_u32 lead = from % AT_ONCE;
    int left = (int)lookups;
#pragma unroll
    for (int i = 0; i + 1 < QUADS; i++, left -= AT_ONCE) {
        if (left <= 0) return;
        quad_add(place, window.of[i], window.of[i + 1], lead, left, sums);
    }
    if (left <= 0) return;
    enum { DEEP = QUADS > 2 }; /* deeper prefetch if registers allow it */
    const bags_t *next = rows.quads_at(from);
    bags_t now = window.of[QUADS - 1], behind = {}, later = {};
    if (left > AT_ONCE - (int)lead) behind = rf_load(next + QUADS);
    if (DEEP && left > 2 * AT_ONCE - (int)lead) later = rf_load(next + QUADS + 1);
#pragma unroll 1
    for (; left > 0; left -= AT_ONCE) {
        quad_add(place, now, behind, lead, left, sums);
        next++;
        now = behind;
        if (DEEP) behind = later;
        if (left > (DEEP ? 3 : 2) * AT_ONCE - (int)lead)
            (DEEP ? later : behind) = rf_load(next + QUADS + DEEP);
    }
}

/* Sums one row by the whole block. `parts`: [WARPS][columns]. */
RF_INLINE void row_pool_long(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                             const rows_t &rows, int number, float *parts) {
    const int warp = threadIdx.x / 32;
    const places_t places = rows.places(number);
    const rf_u32 lookups = places.to - places.from;
    const rf_u32 share = (lookups + place.groups * AT_ONCE - 1) / (place.groups * AT_ONCE) * AT_ONCE;
    places_t own;
    own.from = min(places.from + place.group * share, places.to);
    own.to = min(own.from + share, places.to);
    row_t row;
    row_load(place, number, place.group == 0, row);
    sums_t sums = {};
    places_add(rows, place, own.from, lookups_of(own), window_load(rows, own, own.from < own.to), sums);
    for (int apart = place.lanes; apart < 32; apart *= 2) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.of[v].of[i] += __shfl_xor_sync(RF_FULL_WARP, sums.of[v].of[i], apart);
        }
    }
    if (threadIdx.x % 32 < (rf_u32)place.lanes) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            sums_keep(parts + 4 * ((warp * VECTORS + v) * place.lanes + place.lane), sums.of[v]);
    }
    __syncthreads();
    if (place.group == 0) {
        for (int other = 1; other < WARPS; other++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const float *from = parts + 4 * ((other * VECTORS + v) * place.lanes + place.lane);
                const four_t part = sums_kept(rf_shared_pinned(from));
#pragma unroll
                for (int i = 0; i < 4; i++) sums.of[v].of[i] += part.of[i];
            }
        }
    }
    if (threadIdx.x < 32)
        row_emit(args, emit, place, {number, rows.row + number, lookups, place.group == 0}, row, sums);
    __syncthreads(); /* before the parts of the next row are written */
}

/* Sums the rows that many bags look up. `found`: [WARPS]. */
RF_INLINE void rows_pool_long(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                              const rows_t &rows, rf_u32 *found, float *parts) {
    for (int first = rows.first; first < rows.last; first += BLOCK) {
        const places_t places = rows.places(first + threadIdx.x);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, is_long(places));
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = all;
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) {
            for (rf_u32 left = found[warp]; left != 0; left &= left - 1)
                row_pool_long(args, emit, place, rows, first + warp * 32 + __ffs(left) - 1, parts);
        }
        __syncthreads(); /* all threads have read `found` */
    }
}

#endif
