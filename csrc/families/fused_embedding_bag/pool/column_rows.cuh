/* The rows of the first lookups of bags, for schedule "columns" of the fused embedding bag.
 *
 * Who does what. A slot is the lanes of a tile that have the same feature. The lanes of a warp share out all slots and
 * their bags, neighbouring lanes neighbouring bags, and look at the offsets and the first index of each: is it in the
 * table, is it padding. The numbers of the rows that are left go to the lanes of the slot through shared memory.
 *
 * So a warp waits for offsets and for indices once for all of these bags, and never for one kind of loads while it waits
 * for another: an instruction waits for loads by one of six barriers, and rows that share one with offsets wait for
 * those. Where lanes looked at four bags at a time by themselves, eight bags of a tile took 4 µs, most of them for that.
 */
#ifndef RECFUSE_FUSED_COLUMN_ROWS_CUH
#define RECFUSE_FUSED_COLUMN_ROWS_CUH

#include "families/fused_embedding_bag/fused.cuh"

/* What a warp hands out: of each slot, which is the lanes of a tile that have the same feature, the first lookups of as
 * many bags as there is room for. Behind them are their weights, where they have some. */
struct __align__(16) rf_column_rows {
    enum { COUNT = RF_FUSED_TILE_ROWS };
    rf_row_number number[COUNT];

    RF_INLINE float *scales() { return (float *)(this + 1); }
};

/* The slots of a tile: lane s has what is known of slot s. */
struct rf_slots {
    int feature; /* -1: none */
    int count, log_bags; /* bags that each has rows of */
    int own; /* this lane's */
    rf_row_number rows, padding; /* of the feature's table */

    /* For a warp of so many bags, 1 << `least` at least. `shared`: an element a lane. */
    RF_INLINE rf_slots(const rf_fused_args &args, int of_lane, int bags, int least, rf_row_number *shared) {
        const int lane = threadIdx.x % 32, before = __shfl_up_sync(RF_FULL_WARP, of_lane, 1);
        const rf_u32 firsts = __ballot_sync(RF_FULL_WARP, lane == 0 || before != of_lane);
        own = __popc(firsts << (31 - lane)) - 1;
        count = __popc(firsts);
        /* As many as there is room for, but no more than there are. */
        log_bags = min(__clz(count - 1) - __clz(rf_column_rows::COUNT - 1), max(32 - __clz(bags - 1), least));
        if (firsts >> lane & 1) shared[own] = (rf_row_number)lane;
        __syncwarp();
        feature = __shfl_sync(RF_FULL_WARP, of_lane, lane < count ? (int)shared[lane] : 0);
        if (lane >= count) feature = -1;
        const rf_fused_descriptor &descriptor = args.features[max(feature, 0)];
        rows = (rf_row_number)rf_rows_of(descriptor);
        padding = (rf_row_number)rf_load(&descriptor.padding_idx);
    }
};

/* Whether a lookup's row is there to be read. */
RF_INLINE bool rf_wanted(RF_INDEX index, rf_rows rows, RF_INDEX padding, bool &bad) {
    const bool inside = !RF_CHECK || rf_in_table(index, rows);
    bad |= !inside;
    return inside && index != padding;
}

/* Leaves the row numbers of bags [first, last), from place `place` on: one in 32 of PART times 32. Returns false, and leaves
 * none, if one of these bags has more lookups than one. What is not there is loaded from the beginning, so that no load
 * waits for a look at another. */
template <int PART>
RF_INLINE bool rf_leave_part(const rf_fused_args &args, const rf_slots &slots, int place, int first, int last,
                             rf_column_rows *numbers, bool &bad) {
    /* As many lookups as bags are most often one each: those are loaded beside the offsets, which then say so. */
    const bool maybe_one_each = args.end - args.lead == (rf_i64)args.n_features * args.bags;
    RF_OFFSET begin[PART], end[PART];
    RF_POSITION bag[PART]; /* of all features; where there are as many lookups it is one of their positions */
    RF_INDEX index[PART] = {};
    bool there[PART], any = false, longer = false, one_each = maybe_one_each;
    /* A load between two shuffles is compiled for lanes that have diverged, too, and waited for where both ways meet. */
    int feature[PART];
#pragma unroll
    for (int i = 0; i < PART; i++)
        feature[i] = __shfl_sync(RF_FULL_WARP, slots.feature, place + i * 32 >> slots.log_bags);
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const int at = first + (place + i * 32 & (1 << slots.log_bags) - 1);
        there[i] = feature[i] >= 0 && at < last;
        const rf_i64 number = there[i] ? (rf_i64)feature[i] * args.bags + at : 0;
        begin[i] = rf_load(args.offsets + number);
        end[i] = rf_load(args.offsets + number + 1);
        bag[i] = (RF_POSITION)number;
    }
    if (maybe_one_each) {
#pragma unroll
        for (int i = 0; i < PART; i++) index[i] = rf_load(args.indices + args.lead + bag[i]);
    }
    __syncwarp(); /* all of these loads are on their way before the first is waited for */
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const bool good = !RF_CHECK || rf_good_bag(args, begin[i], end[i]);
        bad |= there[i] && !good;
        there[i] = there[i] && good && begin[i] < end[i];
        any |= there[i];
        longer |= there[i] && end[i] - begin[i] > 1;
        begin[i] = there[i] ? begin[i] : 0;
        one_each &= !there[i] || begin[i] == (RF_OFFSET)bag[i];
    }
    if (__any_sync(RF_FULL_WARP, longer)) return false;
    float scale[PART] = {};
    if (__any_sync(RF_FULL_WARP, any && (RF_WEIGHTED || !one_each))) {
#pragma unroll
        for (int i = 0; i < PART; i++) {
            index[i] = rf_load(args.indices + args.lead + begin[i]);
            if (RF_WEIGHTED) scale[i] = rf_load(args.sample_weights + args.lead + begin[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const int slot = place + i * 32 >> slots.log_bags;
        const rf_row_number rows = __shfl_sync(RF_FULL_WARP, slots.rows, slot);
        const rf_row_number padding = __shfl_sync(RF_FULL_WARP, slots.padding, slot);
        bool outside = false;
        const bool use = rf_wanted(index[i], rows, (RF_INDEX)padding, outside);
        bad |= there[i] && outside;
        numbers->number[place + i * 32] = there[i] && use ? (rf_row_number)index[i] : RF_NO_ROW;
        if (RF_WEIGHTED) numbers->scales()[place + i * 32] = scale[i];
    }
    return true;
}

/* The same for all of them, as many as there is room for. Small batches have few: a lane has one then, and goes through a third
 * of the instructions, which are much of the time where hardly another warp runs beside. */
RF_INLINE bool rf_leave_rows(const rf_fused_args &args, const rf_slots &slots, int first, int last,
                             rf_column_rows *numbers, bool &bad) {
    constexpr int PART = 4; /* eight take more registers than others have to give */
    const int lane = (int)threadIdx.x % 32, places = slots.count << slots.log_bags;
    bool one = true;
    __syncwarp(); /* what was there before has been read */
    if (places <= 32) {
        one = rf_leave_part<1>(args, slots, lane, first, last, numbers, bad);
    } else {
#pragma unroll 1
        for (int place = 0; one && place < places; place += PART * 32)
            one = rf_leave_part<PART>(args, slots, place + lane, first, last, numbers, bad);
    }
    __syncwarp();
    return one;
}

/* The very first offset is 0; or the bag that it begins has no lookups. */
RF_INLINE void rf_look_at_start(const rf_fused_args &args, const rf_slots &slots, int first,
                                rf_column_rows *numbers, bool &bad) {
    if (!RF_CHECK || first > 0) return;
    const bool mine = slots.feature == 0 && rf_load(args.offsets) != 0;
    bad |= mine;
    if (mine) numbers->number[threadIdx.x % 32 << slots.log_bags] = RF_NO_ROW;
    __syncwarp();
}

#endif
