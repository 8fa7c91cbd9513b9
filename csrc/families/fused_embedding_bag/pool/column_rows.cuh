/* The rows of the first lookups of bags, for schedule "columns" of the fused embedding bag.
 *
 * Thread mapping. A slot is the lanes of a tile with the same feature. The lanes of a warp share all slots
 * and their bags, adjacent lanes taking adjacent bags. Each reads the offsets and the first index of its bags
 * and checks the index for the table's bounds and for padding. The remaining row indices go to the lanes of
 * the slot through shared memory.
 *
 * So a warp waits once for the offsets and once for the indices of all these bags, and never for one kind of
 * load behind another. Instructions wait for loads by one of six barriers; rows that share a barrier with
 * offsets would wait for those.
 */
#ifndef RECFUSE_FUSED_COLUMN_ROWS_CUH
#define RECFUSE_FUSED_COLUMN_ROWS_CUH

#include "families/fused_embedding_bag/fused.cuh"

/* The rows that a warp exchanges: of each slot, the first lookups of as many bags as there is room for,
 * followed by their weights, if any. */
struct __align__(16) rf_column_rows {
    enum { COUNT = RF_FUSED_TILE_ROWS };
    rf_row_number number[COUNT];

    RF_INLINE float *scales() { return (float *)(this + 1); }
};

/* The slots of a tile: lane s describes slot s. */
struct rf_slots {
    int feature; /* -1: none */
    int count, log_bags; /* number of bags with rows */
    int own_slot; /* this lane's slot */
    rf_row_number rows, padding; /* of the feature's table */

    /* For a warp of `bags` bags, at least 1 << `least_log`. `shared`: an element a lane. */
    RF_INLINE rf_slots(const rf_fused_args &args, int lane_feature, int bags, int least_log,
                       rf_row_number *shared) {
        const int lane = threadIdx.x % 32, previous = __shfl_up_sync(RF_FULL_WARP, lane_feature, 1);
        const rf_u32 first_lanes = __ballot_sync(RF_FULL_WARP, lane == 0 || previous != lane_feature);
        own_slot = __popc(first_lanes << (31 - lane)) - 1;
        count = __popc(first_lanes);
        /* As many as there is room for, but not more than there are. */
        log_bags =
            min(__clz(count - 1) - __clz(rf_column_rows::COUNT - 1), max(32 - __clz(bags - 1), least_log));
        if (first_lanes >> lane & 1) shared[own_slot] = (rf_row_number)lane;
        __syncwarp();
        feature = __shfl_sync(RF_FULL_WARP, lane_feature, lane < count ? (int)shared[lane] : 0);
        if (lane >= count) feature = -1;
        const rf_fused_descriptor &descriptor = args.features[max(feature, 0)];
        rows = (rf_row_number)rf_rows_of(descriptor);
        padding = (rf_row_number)rf_load(&descriptor.padding_idx);
    }
};

/* Returns true if the row of a lookup is to be read. */
RF_INLINE bool rf_is_read(RF_INDEX index, rf_rows rows, RF_INDEX padding, bool &bad) {
    const bool inside = !RF_CHECK || rf_in_table(index, rows);
    bad |= !inside;
    return inside && index != padding;
}

/* Writes the row indices of bags [first, last) from position `position` on: ROWS_A_LANE for each lane. Returns false,
 * and writes nothing, if a bag has more than one lookup. Missing values are loaded from the first element, so
 * that no load depends on a check of another. */
template <int ROWS_A_LANE>
RF_INLINE bool rf_write_rows_part(const rf_fused_args &args, const rf_slots &slots, int position, int first,
                                  int last, rf_column_rows *numbers, bool &bad) {
    /* If there are as many lookups as bags, each bag most likely has one: the indices are loaded together
     * with the offsets, which confirm it. */
    const bool maybe_single = args.end - args.lead == (rf_i64)args.n_features * args.bags;
    RF_OFFSET begin[ROWS_A_LANE], end[ROWS_A_LANE];
    RF_POSITION bag[ROWS_A_LANE]; /* over all features; also the position if bags are single */
    RF_INDEX index[ROWS_A_LANE] = {};
    bool valid[ROWS_A_LANE], any = false, longer = false, single = maybe_single;
    int feature[ROWS_A_LANE]; /* shuffled first: a load between shuffles is divergent for the compiler */
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++)
        feature[i] = __shfl_sync(RF_FULL_WARP, slots.feature, position + i * 32 >> slots.log_bags);
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++) {
        const int at = first + (position + i * 32 & (1 << slots.log_bags) - 1);
        valid[i] = feature[i] >= 0 && at < last;
        const rf_i64 number = valid[i] ? (rf_i64)feature[i] * args.bags + at : 0;
        begin[i] = rf_load(args.offsets + number);
        end[i] = rf_load(args.offsets + number + 1);
        bag[i] = (RF_POSITION)number;
    }
    if (maybe_single) {
#pragma unroll
        for (int i = 0; i < ROWS_A_LANE; i++) index[i] = rf_load(args.indices + args.lead + bag[i]);
    }
    __syncwarp(); /* issues all these loads before the first wait */
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++) {
        const bool good = !RF_CHECK || rf_good_bag(args, begin[i], end[i]);
        bad |= valid[i] && !good;
        valid[i] = valid[i] && good && begin[i] < end[i];
        any |= valid[i];
        longer |= valid[i] && end[i] - begin[i] > 1;
        begin[i] = valid[i] ? begin[i] : 0;
        single &= !valid[i] || begin[i] == (RF_OFFSET)bag[i];
    }
    if (__any_sync(RF_FULL_WARP, longer)) return false;
    float scale[ROWS_A_LANE] = {};
    if (__any_sync(RF_FULL_WARP, any && (RF_WEIGHTED || !single))) {
#pragma unroll
        for (int i = 0; i < ROWS_A_LANE; i++) {
            index[i] = rf_load(args.indices + args.lead + begin[i]);
            if (RF_WEIGHTED) scale[i] = rf_load(args.sample_weights + args.lead + begin[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; i++) {
        const int slot = position + i * 32 >> slots.log_bags;
        const rf_row_number rows = __shfl_sync(RF_FULL_WARP, slots.rows, slot);
        const rf_row_number padding = __shfl_sync(RF_FULL_WARP, slots.padding, slot);
        bool outside = false;
        const bool is_read = rf_is_read(index[i], rows, (RF_INDEX)padding, outside);
        bad |= valid[i] && outside;
        numbers->number[position + i * 32] = valid[i] && is_read ? (rf_row_number)index[i] : RF_NO_ROW;
        if (RF_WEIGHTED) numbers->scales()[position + i * 32] = scale[i];
    }
    return true;
}

/* Writes the row indices of all bags that there is room for. Small batches have few bags: then a lane has one
 * and takes a third of the instructions, which matters if few other warps run on the SM. */
RF_INLINE bool rf_write_rows(const rf_fused_args &args, const rf_slots &slots, int first, int last,
                             rf_column_rows *numbers, bool &bad) {
    constexpr int ROWS_A_LANE = 4; /* eight take too many registers */
    const int lane = (int)threadIdx.x % 32, n_positions = slots.count << slots.log_bags;
    bool all_single = true;
    __syncwarp(); /* the previous rows have been read */
    if (n_positions <= 32) {
        all_single = rf_write_rows_part<1>(args, slots, lane, first, last, numbers, bad);
    } else {
#pragma unroll 1
        for (int position = 0; all_single && position < n_positions; position += ROWS_A_LANE * 32)
            all_single =
                rf_write_rows_part<ROWS_A_LANE>(args, slots, position + lane, first, last, numbers, bad);
    }
    __syncwarp();
    return all_single;
}

/* Checks that the very first offset is 0, or that the bag that it begins is empty. */
RF_INLINE void rf_check_start(const rf_fused_args &args, const rf_slots &slots, int first,
                              rf_column_rows *numbers, bool &bad) {
    if (!RF_CHECK || first > 0) return;
    const bool is_invalid = slots.feature == 0 && rf_load(args.offsets) != 0;
    bad |= is_invalid;
    if (is_invalid) numbers->number[threadIdx.x % 32 << slots.log_bags] = RF_NO_ROW;
    __syncwarp();
}

#endif
