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
RF_LOADER(rf_load_prefetching, int, "L2::128B.s32", "=r")
RF_LOADER(rf_load_prefetching, rf_i64, "L2::128B.s64", "=l")

/* The remaining lookups of a bag, from this lane's first index of the next batch on. */
struct rf_remaining {
    RF_POSITION position, count;

    RF_INLINE rf_remaining(const rf_bag &bag, int first_lookup)
        : position(bag.begin + first_lookup), count(bag.end - bag.begin - first_lookup) {}
};

/* Loads this lane's indices of the next batch. */
template <class S>
RF_INLINE void rf_load_indices(const rf_fused_args &args, RF_POSITION position, RF_POSITION count,
                               RF_INDEX (&indices)[S::LOADS]) {
    const RF_INDEX *from = args.indices + position;
    asm volatile("" : "+l"(from)); /* one base address for all loads */
#pragma unroll
    for (int i = 0; i < S::LOADS; i++) {
        if (i * S::LOAD_STEP < count) indices[i] = rf_load_prefetching(from + i * S::LOAD_STEP);
    }
}

/* Returns true if the row of an index is to be read; `valid`: the lookup exists. Sets `outside` if the index
 * is invalid; counts lookups that are valid and not padding. */
template <class S>
RF_INLINE bool rf_is_row_read(RF_INDEX index, bool valid, rf_rows rows, RF_INDEX padding, bool &outside,
                              int &counted) {
    const bool inside = !RF_CHECK || rf_in_table(index, rows);
    outside = valid && !inside;
    bool is_read = valid && inside;
    if (S::PADDED) {
        is_read = is_read && index != padding;
        counted += is_read;
    }
    return is_read;
}

/* Checks this lane's indices, of which `count` belong to the bag, and returns their rows. */
template <class S>
RF_INLINE void rf_check_indices(const RF_INDEX (&indices)[S::LOADS], RF_POSITION count, rf_rows rows,
                                RF_INDEX padding, rf_row_number (&numbers)[S::LOADS], int &bad,
                                int &counted) {
#pragma unroll
    for (int i = 0; i < S::LOADS; i++) {
        bool outside;
        const bool is_read =
            rf_is_row_read<S>(indices[i], i * S::LOAD_STEP < count, rows, padding, outside, counted);
        bad |= outside;
        numbers[i] = is_read ? (rf_row_number)indices[i] : RF_NO_ROW;
    }
}

/* Exchanges the rows of all lanes of a slot. `exchanged`: shared memory of the warp, BATCH per slot. */
template <class S>
RF_INLINE void rf_exchange(const rf_row_number (&lane_rows)[S::LOADS], rf_row_number *exchanged,
                           rf_four_rows (&numbers)[S::BATCH / 4]) {
    if constexpr (S::LANES == 1) {
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) numbers[k / 4].number[k % 4] = lane_rows[k];
    } else {
        rf_row_number *slot = exchanged + threadIdx.x % 32 / S::LANES * S::BATCH;
        __syncwarp(); /* the previous rows have been read */
#pragma unroll
        for (int i = 0; i < S::LOADS; i++) slot[i * S::CHUNK + S::index_of_lane()] = lane_rows[i];
        __syncwarp();
#pragma unroll
        for (int k = 0; k < S::BATCH / 4; k++) numbers[k] = ((const rf_four_rows *)slot)[k];
    }
}

#endif
