/* The indices of a batch of rows, for schedule "pool" of the fused embedding bag: how they come to the lanes that read rows.
 *
 * Who does what. A lane loads LOADS indices of its slot's BATCH, neighbouring lanes neighbouring ones, and looks at each
 * alone: is it in the table, is it padding. What is left is the number of a row, which goes to all lanes of the slot through shared
 * memory: two loads bring eight of them to a lane, which would else load as many indices, compare and count each. With
 * int64 that is also half of the way back from L1, which has 128 bytes a cycle, whether lanes ask for the same or not:
 * eight indices would take as much of it as four rows. Indices need not be aligned.
 *
 * Row numbers through shuffles are slower: each shuffle takes one of the six barriers that loads are waited for with, and then
 * rows wait for rows. tests/c/test_fused_kernels.py looks for such waits.
 */
#ifndef RECFUSE_FUSED_INDICES_CUH
#define RECFUSE_FUSED_INDICES_CUH

#include "families/fused_embedding_bag/fused.cuh"

/* Indices follow one another: what the next ones are in comes to L2 with these. */
RF_LOADER(rf_load_ahead, int, "L2::128B.s32", "=r")
RF_LOADER(rf_load_ahead, rf_i64, "L2::128B.s64", "=l")

/* The lookups of a bag, from this lane's first index of the next batch on. */
struct rf_rest {
    RF_POSITION position, left;

    RF_INLINE rf_rest(const rf_bag &bag, int first_lookup)
        : position(bag.begin + first_lookup), left(bag.end - bag.begin - first_lookup) {}
};

/* This lane's indices of the next batch. */
template <class S>
RF_INLINE void rf_load_indices(const rf_fused_args &args, RF_POSITION position, RF_POSITION left,
                               RF_INDEX (&indices)[S::LOADS]) {
    const RF_INDEX *from = args.indices + position;
    asm volatile("" : "+l"(from)); /* one address for all of them */
#pragma unroll
    for (int i = 0; i < S::LOADS; i++) {
        if (i * S::APART < left) indices[i] = rf_load_ahead(from + i * S::APART);
    }
}

/* Whether the row of an index is to be read; `there`: whether there is such a lookup. Sets `outside`: whether
 * its index names no row of the table; counts those whose rows are, and not padding. */
template <class S>
RF_INLINE bool rf_wants_row(RF_INDEX index, bool there, rf_rows rows, RF_INDEX padding, bool &outside,
                            int &counted) {
    const bool inside = !RF_CHECK || rf_in_table(index, rows);
    outside = there && !inside;
    bool use = there && inside;
    if (S::PADDED) {
        use = use && index != padding;
        counted += use;
    }
    return use;
}

/* The rows of this lane's indices, of which `left` are the bag's. */
template <class S>
RF_INLINE void rf_look_at(const RF_INDEX (&indices)[S::LOADS], RF_POSITION left, rf_rows rows,
                          RF_INDEX padding, rf_row_number (&numbers)[S::LOADS], int &bad, int &counted) {
#pragma unroll
    for (int i = 0; i < S::LOADS; i++) {
        bool outside;
        const bool use = rf_wants_row<S>(indices[i], i * S::APART < left, rows, padding, outside, counted);
        bad |= outside;
        numbers[i] = use ? (rf_row_number)indices[i] : RF_NO_ROW;
    }
}

/* All rows of this lane's slot, from those of each lane; `handed`: shared memory of the warp, BATCH of each slot. */
template <class S>
RF_INLINE void rf_hand_out(const rf_row_number (&mine)[S::LOADS], rf_row_number *handed,
                           rf_four_rows (&numbers)[S::BATCH / 4]) {
    if constexpr (S::LANES == 1) {
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) numbers[k / 4].number[k % 4] = mine[k];
    } else {
        rf_row_number *slot = handed + threadIdx.x % 32 / S::LANES * S::BATCH;
        __syncwarp(); /* those before have been read */
#pragma unroll
        for (int i = 0; i < S::LOADS; i++) slot[i * S::CHUNK + S::index_of_lane()] = mine[i];
        __syncwarp();
#pragma unroll
        for (int k = 0; k < S::BATCH / 4; k++) numbers[k] = ((const rf_four_rows *)slot)[k];
    }
}

#endif
