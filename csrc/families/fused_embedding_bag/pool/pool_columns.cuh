/* Schedule "columns" of the fused embedding bag: one-hot and other short bags.
 *
 * Thread mapping. A tile is 32 vectors of the output, adjacent as far as features allow. A lane has one
 * vector of one feature and reads it from each row of the feature's bags. The lanes of a warp store 32
 * vectors of one row of the output together; with lanes over bags, each with its own narrow row, the stores
 * would be scattered.
 *
 * Each warp has half of the task's bags. If they have at most one lookup, it takes as many at a time as fit
 * into the row indices in shared memory (column_rows.cuh), and each lane reads rows, BATCH at a time. If the
 * mapping or the offsets show longer bags, each lane goes through the bags of its feature alone, row by row.
 * So it does if staged tables run concurrently, because exchanging rows delays those (257 bags of model D: by
 * 7 %).
 */
#ifndef RECFUSE_FUSED_COLUMNS_CUH
#define RECFUSE_FUSED_COLUMNS_CUH

#include "families/fused_embedding_bag/pool/column_rows.cuh"

template <int DTYPE, int ALIGN_, int STORE_, int POOLING_> struct rf_columns_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN_> vector;
    static constexpr int ALIGN = ALIGN_, STORE = STORE_, POOLING = POOLING_;
    static constexpr int ELEMENTS = ALIGN_ / element::BYTES;
    static constexpr int SHAPE = rf_fused_shape_code({DTYPE, ALIGN_, STORE_, 0, 0, 0, 0, 0});
    /* Rows in flight of a lane, one a bag, and the same for longer bags. Larger values take more registers
     * than schedule "pool" does, so fewer warps run. */
    static constexpr int BATCH = ALIGN_ > 8 ? 4 : 8, LOG_BATCH = ALIGN_ > 8 ? 2 : 3;
    static constexpr int LONGER = element::BYTES < 4 ? 3 : POOLING == RF_MAX ? 2 : 4;
};

/* A lane's vector in the rows of its feature. */
struct rf_column {
    const rf_u8 *table; /* of row 0 */
    rf_u8 *output; /* of bag 0 */
    rf_u32 pitch;
};

/* `pitch` of the rows: it lies apart from the rest of the descriptor and is loaded long before its use. */
template <class S>
RF_INLINE rf_column rf_column_of(const rf_fused_args &args, const rf_fused_lane &lane, rf_u32 pitch) {
    const rf_fused_descriptor &feature = args.features[max(lane.feature, 0)];
    rf_column column;
    column.pitch = pitch;
    column.table = rf_load(&feature.weight) + (rf_i64)lane.column * S::ALIGN;
    column.output = args.output + rf_load(&feature.output_offset) +
                    (rf_i64)lane.column * S::ELEMENTS * rf_element<RF_OUTPUT>::BYTES;
    asm volatile("" : "+l"(column.table), "+l"(column.output)); /* one base address each */
    return column;
}

template <class S>
RF_INLINE void rf_add_row(float *sum, const typename S::vector &row, float scale, bool any) {
#pragma unroll
    for (int e = 0; e < S::ELEMENTS; e++) {
        const float value = S::element::get(row, e);
        if (S::POOLING == RF_MAX) {
            if (!any || value > sum[e]) sum[e] = value;
        } else {
            sum[e] = RF_WEIGHTED ? fmaf(scale, value, sum[e]) : sum[e] + value;
        }
    }
}

template <class S>
RF_INLINE void rf_store_bag(const rf_fused_args &args, const rf_column &column, int bag, const float *sum) {
    rf_store<S::STORE, S::ELEMENTS>(column.output + (rf_u64)(rf_u32)bag * args.output_pitch, sum);
}

/* Pools the bags [first, last) of at most one lookup, whose row indices are stored from position `from`
 * on. */
template <class S>
RF_INLINE void rf_read_rows(const rf_fused_args &args, const rf_fused_lane &lane, const rf_column &column,
                            int first, int last, rf_column_rows *numbers, int from) {
    typedef typename S::vector vector;
#pragma unroll 1
    for (; first < last; first += S::BATCH, from += S::BATCH) {
        rf_row_number number[S::BATCH];
        vector row[S::BATCH];
#pragma unroll
        for (int k = 0; k < S::BATCH; k += 4) {
            const rf_four_rows four = *(const rf_four_rows *)(numbers->number + from + k);
#pragma unroll
            for (int j = 0; j < 4; j++) number[k + j] = four.number[j];
        }
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) {
            row[k] = {};
            if (number[k] != RF_NO_ROW)
                row[k] = rf_load((const vector *)rf_row(column.table, number[k], column.pitch));
        }
        if (lane.feature < 0) continue;
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) {
            if (first + k >= last) break;
            float sum[S::ELEMENTS] = {};
            const float scale = RF_WEIGHTED ? numbers->scales()[from + k] : 1.0f;
            if (number[k] != RF_NO_ROW) rf_add_row<S>(sum, row[k], scale, false);
            rf_store_bag<S>(args, column, first + k, sum);
        }
    }
}

/* Some bags of a lane: their begins, the end of the last, and the first index of each. */
template <class S> struct rf_longer_bags {
    RF_POSITION start[S::LONGER + 1];
    RF_INDEX index[S::LONGER];
    rf_u32 has_lookups; /* one bit per bag with lookups and valid offsets */

    RF_INLINE void load_bags(const rf_fused_args &args, int number, int first, int last, bool &bad) {
        const RF_OFFSET *offsets = args.offsets + (rf_i64)number * args.bags;
        RF_OFFSET offset[S::LONGER + 1];
        has_lookups = 0;
#pragma unroll
        for (int k = 0; k <= S::LONGER; k++) {
            offset[k] = 0;
            if (first + k < last + (k > 0)) offset[k] = rf_load(offsets + first + k);
            start[k] = (RF_POSITION)offset[k] + args.lead;
        }
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            const bool good = !RF_CHECK || rf_good_bag(args, offset[k], offset[k + 1]);
            if (first + k >= last) continue;
            bad |= !good;
            if (good && offset[k] < offset[k + 1]) has_lookups |= 1u << k;
        }
        if (!rf_bad_start(args, number, first)) return;
        bad = true;
        has_lookups &= ~1u;
    }
    RF_INLINE void load_indices(const rf_fused_args &args) {
#pragma unroll
        for (int k = 0; k < S::LONGER; k++)
            index[k] = has_lookups & 1u << k ? rf_load(args.indices + start[k]) : 0;
    }
};

/* Pools the bags [first, last) of any lengths: each lane sums its bags alone, row by row. The first rows of
 * several bags are loaded at once, and while they are in flight the offsets and first indices of the next
 * bags. */
template <class S>
RF_INLINE void rf_read_longer(const rf_fused_args &args, const rf_fused_lane &lane, rf_u32 pitch, int first,
                              int last, bool &bad) {
    typedef typename S::vector vector;
    if (lane.feature < 0) return;
    const rf_column column = rf_column_of<S>(args, lane, pitch);
    const rf_fused_descriptor &feature = args.features[lane.feature];
    const rf_rows rows = rf_rows_of(feature);
    const RF_INDEX padding = (RF_INDEX)rf_load(&feature.padding_idx);
    const bool mean = rf_load(&feature.pooling) == RF_MEAN;
    rf_longer_bags<S> now, next;
    now.load_bags(args, lane.feature, first, last, bad);
    now.load_indices(args);
#pragma unroll 1
    for (; first < last; first += S::LONGER) {
        vector row[S::LONGER];
        bool valid[S::LONGER];
        next.load_bags(args, lane.feature, first + S::LONGER, last, bad);
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            valid[k] = now.has_lookups & 1u << k && rf_is_read(now.index[k], rows, padding, bad);
            row[k] = {};
            if (valid[k])
                row[k] =
                    rf_load((const vector *)rf_row(column.table, (rf_row_number)now.index[k], column.pitch));
        }
        next.load_indices(args);
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            if (first + k >= last) break;
            float sum[S::ELEMENTS] = {};
            int count = valid[k];
            const float scale = RF_WEIGHTED && valid[k] ? rf_load(args.sample_weights + now.start[k]) : 1.0f;
            if (valid[k]) rf_add_row<S>(sum, row[k], scale, false);
            const bool has_lookups = now.has_lookups & 1u << k;
#pragma unroll 1
            for (RF_POSITION i = now.start[k] + 1; has_lookups && i < now.start[k + 1]; i++) {
                const RF_INDEX index = rf_load(args.indices + i);
                if (!rf_is_read(index, rows, padding, bad)) continue;
                const float weight = RF_WEIGHTED ? rf_load(args.sample_weights + i) : 1.0f;
                const rf_u8 *from = rf_row(column.table, (rf_row_number)index, column.pitch);
                rf_add_row<S>(sum, rf_load((const vector *)from), weight, count > 0);
                count++;
            }
            /* As in other schedules, an invalid lookup counts in a mean if there is no padding. */
            const rf_i64 lookups = padding >= 0  ? count
                                   : has_lookups ? (rf_i64)(now.start[k + 1] - now.start[k])
                                                 : 0;
            if (mean && lookups > 1) {
#pragma unroll
                for (int e = 0; e < S::ELEMENTS; e++) sum[e] = rf_divide(sum[e], (float)lookups);
            }
            rf_store_bag<S>(args, column, first + k, sum);
        }
        now = next;
    }
}

/* Returns true if a lane of the caller's mapping belongs to a feature of these kernels. */
template <class S> RF_INLINE bool rf_is_lane(const rf_fused_args &args, const rf_fused_lane &lane) {
    return rf_is_feature(args, lane.feature) &&
           (rf_load(&args.features[lane.feature].shape) & RF_FUSED_COLUMN_CODE) == S::SHAPE &&
           (rf_u32)lane.column < (rf_u32)rf_load(&args.features[lane.feature].columns);
}

/* Returns this lane of a tile. */
RF_INLINE rf_fused_lane rf_load_lane(const rf_fused_args &args, int tile) {
    typedef rf_bytes<sizeof(rf_fused_lane)> words;
    const words lane = rf_load((const words *)(args.lanes + (rf_i64)tile * 32 + threadIdx.x % 32));
    return {(rf_i32)lane.word[0], (rf_i32)lane.word[1]};
}

/* The lane of the tile that the block probably has, loaded together with the task, which confirms it. If all
 * features are in tiles that are cut alike, the tasks of a tile are consecutive. */
struct rf_guess {
    int tile; /* -1: none */
    rf_fused_lane lane;

    RF_INLINE explicit rf_guess(const rf_fused_args &args) : tile(-1), lane{-1, 0} {
        if (args.tiles_a_task == 0) return;
        tile = min((int)__umulhi(blockIdx.x, args.tiles_a_task), args.limit - 1);
        lane = rf_load_lane(args, tile);
    }
    RF_INLINE rf_fused_lane lane_of(const rf_fused_args &args, int tile_number) const {
        return tile_number == tile ? lane : rf_load_lane(args, tile_number);
    }
};

/* Pools the bags of a task for the 32 lanes of its tile. */
template <class S>
RF_INLINE void rf_pool_columns(const rf_fused_args &args, const rf_fused_task &task, const rf_guess &guess,
                               rf_column_rows *numbers) {
    if (RF_CALLERS_MAPPING &&
        ((rf_u32)task.feature >= (rf_u32)args.limit || task.first_bag < 0 || task.first_bag >= task.last_bag))
        return;
    constexpr int WARPS = RF_BLOCK / 32, GRAIN = 4; /* a warp has a multiple of so many bags */
    const int bags_a_warp = (task.last_bag - task.first_bag + WARPS * GRAIN - 1) / (WARPS * GRAIN) * GRAIN;
    int first = task.first_bag + (int)threadIdx.x / 32 * bags_a_warp;
    const int last = min(first + bags_a_warp, task.last_bag);
    if (first >= last) return;
    rf_fused_lane lane = guess.lane_of(args, task.feature);
    if (RF_CALLERS_MAPPING && !rf_is_lane<S>(args, lane)) lane = {-1, 0};
    const rf_u32 pitch = rf_load(&args.features[max(lane.feature, 0)].pitch);
    bool bad = false;
    if (!RF_WITH_STAGED && task.slice == 0) {
        const rf_slots slots(args, lane.feature, last - first, S::LOG_BATCH, numbers->number);
        const rf_column column = rf_column_of<S>(args, lane, pitch);
        rf_wait_for_inputs();
#pragma unroll 1
        while (first < last && rf_write_rows(args, slots, first, last, numbers, bad)) {
            const int next = min(first + (1 << slots.log_bags), last);
            rf_check_start(args, slots, first, numbers, bad);
            rf_read_rows<S>(args, lane, column, first, next, numbers, slots.own_slot << slots.log_bags);
            first = next;
        }
    }
    rf_wait_for_inputs();
    if (first < last) rf_read_longer<S>(args, lane, pitch, first, last, bad);
    if (RF_CHECK && __any_sync(RF_FULL_WARP, bad) && lane.feature >= 0) rf_report_task(args, true);
}

#endif
