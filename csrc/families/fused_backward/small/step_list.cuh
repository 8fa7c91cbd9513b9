/* Builds the list step by step (steps.cuh) from counters that hold positions (step_sums.cuh). */
#ifndef RECFUSE_CUDA_BACKWARD_STEP_LIST_CUH
#define RECFUSE_CUDA_BACKWARD_STEP_LIST_CUH

#include "families/fused_backward/small/step_sums.cuh"

/* The prefetched data of a quad of steps. */
struct step_quad_t {
    RF_INDEX indices[QUAD]; /* -1: none */
    rf_bytes<16> firsts; /* of long bags */
};
/* `is_own`: the lane's index of the feature's first step. */
template <bool LONG_BAGS>
RF_INLINE void quad_load(const feature_t &feature, const steps_t &steps, const rf_u8 *is_own, rf_u32 quad,
                         step_quad_t &to) {
    const rf_u32 lane = threadIdx.x % 32;
    rf_u32 at[QUAD];
    bool valid[QUAD];
    if (LONG_BAGS) {
        const rf_u32 *const from = steps.firsts + quad * QUAD;
        to.firsts = *(const rf_bytes<16> *)from;
        const rf_u32 next = from[QUAD], upto = (lane + 1) << 16;
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            const rf_u32 next_first = k + 1 < QUAD ? to.firsts.word[k + 1] : next;
            at[k] = to.firsts.word[k] >> 16;
            valid[k] =
                next_first - to.firsts.word[k] >= upto; /* ascending bags: the difference does not wrap */
        }
    } else {
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            at[k] = quad * UNIT + k * 32;
            valid[k] = at[k] + lane < feature.count;
        }
    }
#pragma unroll
    for (int k = 0; k < QUAD; k++) {
        to.indices[k] = -1;
        if (valid[k]) to.indices[k] = rf_load((const RF_INDEX *)rf_address(is_own, at[k], sizeof(RF_INDEX)));
    }
}

/* Adds the lookups of a step to their counters. Returns the old value of each counter. */
template <bool LONG_BAGS> RF_INLINE rf_u32 step_add(rf_u32 at, rf_u32 unit, rf_u32 byte_selector) {
    rf_u32 was = 0;
    if (LONG_BAGS) {
        was = __byte_perm(rf_shared_add_from(at, unit), 0, byte_selector);
    } else {
        const rf_u32 alike = __match_any_sync(RF_FULL_WARP, at), lane = threadIdx.x % 32;
        const int leader = __ffs(alike) - 1;
        if ((int)lane == leader) was = rf_shared_add_from(at, unit * __popc(alike));
        was = __byte_perm(__shfl_sync(RF_FULL_WARP, was, leader), 0, byte_selector) +
              __popc(alike & ((1u << lane) - 1));
    }
    __syncwarp(); /* lookups of the next step come later */
    return was;
}

/* Lists the lookups: position p is at to + 2 * p in shared memory, from position `near` on at far[p] in
 * memory. Lookups that do not count increment a counter that is never read, which saves a branch. */
template <int BITS, bool LONG_BAGS, bool FAR>
RF_INLINE void part_list_by_steps(const feature_t &feature, const steps_t &steps, const block_t &block,
                                  rf_u32 to, rf_u32 near, rf_u16 *far) {
    const rf_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= steps.parts) return;
    const rf_u32 cells = counts_of<BITS>(steps, warp);
    const rf_u32 unit = counters_t<BITS>::unit(warp), byte_selector = counters_t<BITS>::byte_selector(warp);
    const rf_u32 unread = rf_shared_pinned(steps.counts - 32 + lane);
    /* The begin of a row is at `begins` + half of the address of its counter; for the unread counter this is
     * some address of the counters. */
    const rf_u32 begins = rf_shared_pinned(steps.begins) - cells / 2;
    const rf_u32 bags_at = rf_shared_pinned(steps.bags + lane), next_first = quad_of(steps, warp + 1);
    const rf_u8 *indices = (const rf_u8 *)(feature.indices + lane);
    rf_keep(indices);
    rf_u32 quad = quad_of(steps, warp);
    step_quad_t coming;
    quad_load<LONG_BAGS>(feature, steps, indices, quad, coming);
#pragma unroll 2
    for (; quad < next_first; quad++) {
        rf_u32 at[QUAD], bags[QUAD], positions[QUAD];
        bool is_own[QUAD];
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            at[k] =
                cell_of(feature, coming.indices[k], block.first_row, block.rows, cells, unread, is_own[k]);
            bags[k] = LONG_BAGS ? coming.firsts.word[k] : 0;
        }
        quad_load<LONG_BAGS>(feature, steps, indices, quad + 1, coming);
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            positions[k] = rf_shared_load_2(begins + at[k] / 2);
            positions[k] += step_add<LONG_BAGS>(at[k], unit, byte_selector);
        }
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            const rf_u32 bag = LONG_BAGS ? bags[k] : rf_shared_load_2(bags_at + (quad * UNIT + k * 32) * 2);
            const bool is_near = !FAR || positions[k] < near;
            if (is_own[k] && is_near) rf_shared_store_2(to + positions[k] * 2, bag);
            if (FAR && is_own[k] && !is_near) far[positions[k]] = (rf_u16)bag;
        }
    }
}

/* Writes the list of the block's `all` lookups, most of it through shared memory. */
template <int BITS>
RF_INLINE void steps_list(const feature_t &feature, const steps_t &steps, const block_t &block, rf_u32 all,
                          rf_u16 *list) {
    rf_u16 *const window = steps.window + (rf_u64)list % 16 / 2;
    const rf_u32 to = rf_shared_pinned(window), near = min(all, steps.window_size);
    if (!steps.long_bags) {
        part_list_by_steps<BITS, false, true>(feature, steps, block, to, near, list);
    } else if (near < all) {
        part_list_by_steps<BITS, true, true>(feature, steps, block, to, near, list);
    } else {
        part_list_by_steps<BITS, true, false>(feature, steps, block, to, near, list);
    }
    __syncthreads();
    window_copy(window, list, near);
}

#endif
