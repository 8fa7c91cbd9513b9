/* Schedule "columns" of the fused embedding bag: one-hot and other short bags.
 *
 * Who does what. A tile is 32 vectors of the output that lie side by side, as far as features allow: a lane has one
 * vector of one feature, and reads it from each row of the feature's bags. Lanes of a warp store 32 vectors of one
 * row of the output together: lanes over bags, each with a narrow row of its own, would store them apart.
 *
 * Each warp has half of the task's bags. Where they have one lookup or none, it takes as many at a time as there are keys
 * for (column_keys.cuh), and each lane reads rows, BATCH at a time. Where the mapping, or a look at offsets, says
 * that some have more, each lane goes through the bags of its feature by itself, row after row. So it does beside staged
 * tables: keys made those wait, with 257 bags of model D by 7 %.
 */
#ifndef RECFUSE_FUSED_COLUMNS_CUH
#define RECFUSE_FUSED_COLUMNS_CUH

#include "fused_embedding_bag/column_keys.cuh"

template <int DTYPE, int ALIGN_, int STORE_, int POOLING_> struct rf_columns_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN_> vector;
    static constexpr int ALIGN = ALIGN_, STORE = STORE_, POOLING = POOLING_;
    static constexpr int ELEMENTS = ALIGN_ / element::BYTES;
    static constexpr int SHAPE = rf_shape_code(DTYPE, ALIGN_, STORE_, 0, 0, 0, 0, 0);
    /* Rows in flight a lane, of as many bags; and where bags have more lookups than one. With more, the kernel takes more
     * registers than schedule "pool" does, and fewer warps run. */
    static constexpr int BATCH = ALIGN_ > 8 ? 4 : 8;
    static constexpr int LONGER = element::BYTES < 4 ? 3 : POOLING == RF_MAX ? 2 : 4;
};

/* A lane's vector of its feature's rows. */
struct rf_column {
    const rf_u8 *table; /* of row 0 */
    rf_u8 *output; /* of bag 0 */
    rf_u32 pitch;
};

template <class S> RF_INLINE rf_column rf_column_of(const rf_fused_arguments &my, const rf_lane &lane) {
    const rf_feature &feature = my.features[max(lane.feature, 0)];
    rf_column column;
    column.pitch = rf_load(&feature.pitch);
    column.table = rf_load(&feature.weight) + (rf_i64)lane.column * S::ALIGN;
    column.output = my.output + rf_load(&feature.output_offset) +
                    (rf_i64)lane.column * S::ELEMENTS * rf_element<RF_OUTPUT>::BYTES;
    asm volatile("" : "+l"(column.table), "+l"(column.output)); /* one address each, not sums */
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
RF_INLINE void rf_store_bag(const rf_fused_arguments &my, const rf_column &column, int bag,
                            const float *sum) {
    rf_store<S::STORE, S::ELEMENTS>(column.output + (rf_u64)(rf_u32)bag * my.output_pitch, sum);
}

/* Bags [first, last) of one lookup or none, whose keys are there, number `from` and on. */
template <class S>
RF_INLINE void rf_read_rows(const rf_fused_arguments &my, const rf_lane &lane, int first, int last,
                            rf_column_keys *keys, int from) {
    typedef typename S::vector vector;
    const rf_column column = rf_column_of<S>(my, lane);
#pragma unroll 1
    for (; first < last; first += S::BATCH, from += S::BATCH) {
        rf_key key[S::BATCH];
        vector row[S::BATCH];
#pragma unroll
        for (int k = 0; k < S::BATCH; k += 4) {
            const rf_four_keys four = *(const rf_four_keys *)(keys->key + from + k);
#pragma unroll
            for (int j = 0; j < 4; j++) key[k + j] = four.key[j];
        }
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) {
            row[k] = {};
            if (key[k] != RF_NO_KEY)
                row[k] = rf_load((const vector *)rf_row(column.table, key[k], column.pitch));
        }
        if (lane.feature < 0) continue;
#pragma unroll
        for (int k = 0; k < S::BATCH; k++) {
            if (first + k >= last) break;
            float sum[S::ELEMENTS] = {};
            const float scale = RF_WEIGHTED ? keys->scales()[from + k] : 1.0f;
            if (key[k] != RF_NO_KEY) rf_add_row<S>(sum, row[k], scale, false);
            rf_store_bag<S>(my, column, first + k, sum);
        }
    }
}

/* Some bags of a lane: where they begin and the last one ends, and the first id of each. */
template <class S> struct rf_longer_bags {
    RF_POSITION start[S::LONGER + 1];
    RF_INDEX id[S::LONGER];
    rf_u32 filled; /* a bit a bag that has lookups, and good offsets */

    RF_INLINE void load_bags(const rf_fused_arguments &my, int number, int first, int last, bool &bad) {
        const RF_OFFSET *offsets = my.offsets + (rf_i64)number * my.bags;
        RF_OFFSET offset[S::LONGER + 1];
        filled = 0;
#pragma unroll
        for (int k = 0; k <= S::LONGER; k++) {
            offset[k] = 0;
            if (first + k < last + (k > 0)) offset[k] = rf_load(offsets + first + k);
            start[k] = (RF_POSITION)offset[k] + my.lead;
        }
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            const bool good = !RF_CHECK || rf_good_bag(my, offset[k], offset[k + 1]);
            if (first + k >= last) continue;
            bad |= !good;
            if (good && offset[k] < offset[k + 1]) filled |= 1u << k;
        }
        if (!rf_bad_start(my, number, first)) return;
        bad = true;
        filled &= ~1u;
    }
    RF_INLINE void load_ids(const rf_fused_arguments &my) {
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) id[k] = filled & 1u << k ? rf_load(my.indices + start[k]) : 0;
    }
};

/* Bags [first, last) of any lengths: their lanes sum each alone, row after row. The first rows of some are read at
 * once; offsets and first ids of the next ones are loaded while those are on their way. */
template <class S>
RF_INLINE void rf_read_longer(const rf_fused_arguments &my, const rf_lane &lane, int first, int last,
                              bool &bad) {
    typedef typename S::vector vector;
    if (lane.feature < 0) return;
    const rf_column column = rf_column_of<S>(my, lane);
    const rf_feature &feature = my.features[lane.feature];
    const rf_rows rows = rf_rows_of(feature);
    const RF_INDEX padding = (RF_INDEX)rf_load(&feature.padding_idx);
    const bool mean = rf_load(&feature.pooling) == RF_MEAN;
    rf_longer_bags<S> now, next;
    now.load_bags(my, lane.feature, first, last, bad);
    now.load_ids(my);
#pragma unroll 1
    for (; first < last; first += S::LONGER) {
        vector row[S::LONGER];
        bool there[S::LONGER];
        next.load_bags(my, lane.feature, first + S::LONGER, last, bad);
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            there[k] = now.filled & 1u << k && rf_wanted(now.id[k], rows, padding, bad);
            row[k] = {};
            if (there[k])
                row[k] = rf_load((const vector *)rf_row(column.table, (rf_key)now.id[k], column.pitch));
        }
        next.load_ids(my);
#pragma unroll
        for (int k = 0; k < S::LONGER; k++) {
            if (first + k >= last) break;
            float sum[S::ELEMENTS] = {};
            int count = there[k];
            const float scale = RF_WEIGHTED && there[k] ? rf_load(my.sample_weights + now.start[k]) : 1.0f;
            if (there[k]) rf_add_row<S>(sum, row[k], scale, false);
            const bool filled = now.filled & 1u << k;
#pragma unroll 1
            for (RF_POSITION i = now.start[k] + 1; filled && i < now.start[k + 1]; i++) {
                const RF_INDEX id = rf_load(my.indices + i);
                if (!rf_wanted(id, rows, padding, bad)) continue;
                const float weight = RF_WEIGHTED ? rf_load(my.sample_weights + i) : 1.0f;
                const rf_u8 *from = rf_row(column.table, (rf_key)id, column.pitch);
                rf_add_row<S>(sum, rf_load((const vector *)from), weight, count > 0);
                count++;
            }
            /* As for other schedules, a bad lookup counts in a mean where there is no padding. */
            const rf_i64 lookups = padding >= 0 ? count
                                   : filled     ? (rf_i64)(now.start[k + 1] - now.start[k])
                                                : 0;
            if (mean && lookups > 1) {
#pragma unroll
                for (int e = 0; e < S::ELEMENTS; e++) sum[e] = rf_divide(sum[e], (float)lookups);
            }
            rf_store_bag<S>(my, column, first + k, sum);
        }
        now = next;
    }
}

/* Whether a lane of the caller's mapping is one of a feature that these kernels are for. */
template <class S> RF_INLINE bool rf_is_lane(const rf_fused_arguments &my, const rf_lane &lane) {
    return rf_is_feature(my, lane.feature) &&
           (rf_load(&my.features[lane.feature].shape) & RF_COLUMN_CODE) == S::SHAPE &&
           (rf_u32)lane.column < (rf_u32)rf_load(&my.features[lane.feature].columns);
}

/* A task's bags, for the 32 lanes of its tile. */
template <class S>
RF_INLINE void rf_pool_columns(const rf_fused_arguments &my, const rf_task &task, rf_column_keys *keys) {
    if (RF_FOREIGN &&
        ((rf_u32)task.feature >= (rf_u32)my.limit || task.first_bag < 0 || task.first_bag >= task.last_bag))
        return;
    constexpr int WARPS = RF_BLOCK / 32, GRAIN = 4; /* bags of a warp are so many, or twice, or more */
    const int each = (task.last_bag - task.first_bag + WARPS * GRAIN - 1) / (WARPS * GRAIN) * GRAIN;
    int first = task.first_bag + (int)threadIdx.x / 32 * each;
    const int last = min(first + each, task.last_bag);
    if (first >= last) return;
    rf_lane lane = my.lanes[(rf_i64)task.feature * 32 + threadIdx.x % 32];
    if (RF_FOREIGN && !rf_is_lane<S>(my, lane)) lane = {-1, 0};
    bool bad = false;
    if (!RF_BESIDE && task.slice == 0) {
        const rf_slots slots(lane.feature, last - first, keys->key);
#pragma unroll 1
        while (first < last && rf_leave_keys(my, slots, first, last, keys, bad)) {
            const int next = min(first + (1 << slots.log_bags), last);
            rf_look_at_start(my, slots, first, keys, bad);
            rf_read_rows<S>(my, lane, first, next, keys, slots.own << slots.log_bags);
            first = next;
        }
    }
    if (first < last) rf_read_longer<S>(my, lane, first, last, bad);
    if (RF_CHECK && __any_sync(RF_FULL_WARP, bad) && lane.feature >= 0) rf_report_task(my, true);
}

#endif
