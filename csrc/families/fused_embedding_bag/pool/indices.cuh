/* The indices of a batch of rows, for schedule "pool" of the fused embedding bag: from memory to the lanes
 * that read rows.
 *
 * Thread mapping. A lane loads LOADS indices of its slot's BATCH, adjacent lanes adjacent indices, and checks
 * each for the table's bounds and for padding. The remaining row indices go to all lanes of the slot through
 * shared memory: two loads return eight of them, instead of eight loads, comparisons and counts in each lane.
 * With int64 this also halves the traffic of L1, which returns 128 bytes a cycle even for equal addresses:
 * eight indices would take as much of it as four rows. Indices need not be aligned.
 *
 * Shuffles are slower: each takes one of the six barriers by which instructions wait for loads, and then rows
 * wait for rows. tests/c/test_fused_kernels.py looks for such waits.
 */
#ifndef RECFUSE_FUSED_INDICES_CUH
#define RECFUSE_FUSED_INDICES_CUH

#include "families/fused_embedding_bag/fused.cuh"

/* Indices are consecutive: these loads also prefetch the next ones into L2. */
RF_LOADER(rf_load_ahead, int, "L2::128B.s32", "=r")
RF_LOADER(rf_load_ahead, rf_i64, "L2::128B.s64", "=l")

/* The remaining lookups of a bag, from this lane's first index of the next batch on. */
struct rf_rest {
    RF_POSITION position, left;

    RF_INLINE rf_rest(const rf_bag &bag, int first_lookup)
        : position(bag.begin + first_lookup), left(bag.end - bag.begin - first_lookup) {}
};

/* Loads this lane's indices of the next batch. */
template <class S>
RF_INLINE void rf_load_indices(const rf_fused_args &args, RF_POSITION position, RF_POSITION left,
                               RF_INDEX (&indices)[S::LOADS]) {
    const RF_INDEX *from = args.indices + position;
    asm volatile("" : "+l"(from)); /* one base address for all loads */
#pragma unroll
    for (int i = 0; i < S::LOADS; i++) {
        if (i * S::APART < left) indices[i] = rf_load_ahead(from + i * S::APART);
    }
}

/* Returns true if the row of an index is to be read; `there`: the lookup exists. Sets `outside` if the index
 * is invalid; counts lookups that are valid and not padding. */
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

/* Checks this lane's indices, of which `left` belong to the bag, and returns their rows. */
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

/* Exchanges the rows of all lanes of a slot. `handed`: shared memory of the warp, BATCH per slot. */
template <class S>
RF_INLINE void rf_hand_out(const rf_row_number (&mine)[S::LOADS], rf_row_number *handed,
                           rf_four_rows (&numbers)[S::BATCH / 4]) {
    if constexpr (S::LANES == 1) {
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) numbers[k / 4].number[k % 4] = mine[k];
    } else {
        rf_row_number *slot = handed + threadIdx.x % 32 / S::LANES * S::BATCH;
        __syncwarp(); /* the previous rows have been read */
#pragma unroll
        for (int i = 0; i < S::LOADS; i++) slot[i * S::CHUNK + S::index_of_lane()] = mine[i];
        __syncwarp();
#pragma unroll
        for (int k = 0; k < S::BATCH / 4; k++) numbers[k] = ((const rf_four_rows *)slot)[k];
    }
}

#endif
