/* Schedule "columns" of the fused embedding bag: one-hot and other short bags.
 *
 * Who does what. A tile is 32 vectors of the output that lie side by side, as far as features allow: a lane has one
 * vector of one feature, and reads it from each row of the feature's bags. Lanes of a warp store 32 vectors of one
 * row of the output together: lanes over bags, each with a narrow row of its own, would store them apart. A warp
 * takes BAGS bags at a time; offsets and first ids of the next ones are loaded while rows are on their way.
 *
 * Bags that are longer than one lookup are summed by their lane alone, row after row.
 */
#ifndef RECFUSE_FUSED_COLUMNS_CUH
#define RECFUSE_FUSED_COLUMNS_CUH

#include "fused.cuh"

template <int DTYPE, int ALIGN_, int STORE_, int POOLING_> struct rf_columns_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN_> vector;
    static constexpr int ALIGN = ALIGN_, STORE = STORE_, POOLING = POOLING_;
    static constexpr int ELEMENTS = ALIGN_ / element::BYTES;
    static constexpr int SHAPE = rf_shape_code(DTYPE, ALIGN_, STORE_, 0, 0, 0, 0, 0);
    static constexpr int BAGS = ELEMENTS > 4 ? 2 : 4; /* that a warp takes at once */
};

/* A lane's feature. */
struct rf_column {
    const rf_u8 *table; /* this lane's vector of row 0 */
    rf_u8 *output;      /* of bag 0 */
    const RF_OFFSET *offsets;
    rf_rows rows;
    rf_u32 pitch;
    RF_INDEX padding;
    int last_bag; /* the task's, or 0 for a lane without a feature */
    bool mean;
};

template <class S> RF_INLINE rf_column rf_column_of(const rf_fused_arguments &my, const rf_task &task) {
    rf_lane lane = my.lanes[(rf_i64)task.feature * 32 + threadIdx.x % 32];
    if (RF_FOREIGN && lane.feature >= 0 &&
        (!rf_is_feature(my, lane.feature) ||
         (rf_load(&my.features[lane.feature].shape) & RF_COLUMN_CODE) != S::SHAPE ||
         (rf_u32)lane.column >= (rf_u32)rf_load(&my.features[lane.feature].columns))) {
        lane.feature = -1;
        lane.column = 0;
    }
    const rf_feature &feature = my.features[max(lane.feature, 0)];
    rf_column column;
    column.table = rf_load(&feature.weight) + (rf_i64)lane.column * S::ALIGN;
    column.output = my.output + rf_load(&feature.output_offset) +
                    (rf_i64)lane.column * S::ELEMENTS * rf_element<RF_OUTPUT>::BYTES;
    column.offsets = my.offsets + (rf_i64)max(lane.feature, 0) * my.bags;
    column.rows = rf_rows_of(feature);
    column.pitch = rf_load(&feature.pitch);
    column.padding = (RF_INDEX)rf_load(&feature.padding_idx);
    column.last_bag = lane.feature < 0 ? 0 : task.last_bag;
    column.mean = rf_load(&feature.pooling) == RF_MEAN;
    return column;
}

/* Whether a lookup's row is there to be read. */
RF_INLINE bool rf_wanted(const rf_column &column, RF_INDEX id, bool &bad) {
    const bool inside = !RF_CHECK || rf_in_table(id, column.rows);
    bad |= !inside;
    return inside && id != column.padding;
}

template <class S>
RF_INLINE void rf_add_row(float *sum, const typename S::vector &row, float scale, bool &any) {
#pragma unroll
    for (int e = 0; e < S::ELEMENTS; e++) {
        const float value = S::element::get(row, e);
        if (S::POOLING == RF_MAX) {
            if (!any || value > sum[e]) sum[e] = value;
        } else {
            sum[e] = RF_WEIGHTED ? fmaf(scale, value, sum[e]) : sum[e] + value;
        }
    }
    any = true;
}

/* A warp's next BAGS bags: where they begin and the last one ends, and the first id of each. */
template <class S> struct rf_short_bags {
    RF_POSITION start[S::BAGS + 1];
    RF_INDEX id[S::BAGS];
    rf_u32 filled; /* a bit a bag that has lookups, and good offsets */

    RF_INLINE void load_bags(const rf_fused_arguments &my, const rf_column &column, int first, bool &bad) {
        RF_OFFSET offset[S::BAGS + 1];
        filled = 0;
#pragma unroll
        for (int k = 0; k <= S::BAGS; k++) {
            offset[k] = 0;
            if (first + k < column.last_bag + (k > 0)) offset[k] = rf_load(column.offsets + first + k);
            start[k] = (RF_POSITION)offset[k] + my.lead;
        }
#pragma unroll
        for (int k = 0; k < S::BAGS; k++) {
            if (first + k >= column.last_bag) continue;
            const bool good = !RF_CHECK || rf_good_bag(my, offset[k], offset[k + 1]);
            bad |= !good;
            if (good && offset[k] < offset[k + 1]) filled |= 1u << k;
        }
    }
    RF_INLINE void load_ids(const rf_fused_arguments &my) {
#pragma unroll
        for (int k = 0; k < S::BAGS; k++) id[k] = filled & 1u << k ? rf_load(my.indices + start[k]) : 0;
    }
};

/* The lookups of a bag behind its first. */
template <class S>
RF_INLINE void rf_add_rest(const rf_fused_arguments &my, const rf_column &column, RF_POSITION begin,
                           RF_POSITION end, float *sum, bool &any, int &count, bool &bad) {
#pragma unroll 1
    for (RF_POSITION i = begin; i < end; i++) {
        const RF_INDEX id = rf_load(my.indices + i);
        if (!rf_wanted(column, id, bad)) continue;
        const float scale = RF_WEIGHTED ? rf_load(my.sample_weights + i) : 1.0f;
        rf_add_row<S>(sum,
                      rf_load((const typename S::vector *)rf_row(column.table, (rf_key)id, column.pitch)),
                      scale, any);
        count++;
    }
}

/* A task's bags, for the 32 lanes of its tile. */
template <class S> RF_INLINE void rf_pool_columns(const rf_fused_arguments &my, const rf_task &task) {
    typedef typename S::vector vector;
    constexpr int STEP = RF_BLOCK / 32 * S::BAGS;
    if (RF_FOREIGN &&
        ((rf_u32)task.feature >= (rf_u32)my.limit || task.first_bag < 0 || task.first_bag >= task.last_bag))
        return;
    const rf_column column = rf_column_of<S>(my, task);
    int first = task.first_bag + (int)threadIdx.x / 32 * S::BAGS;
    /* Not of a lane without a feature: what it reports, it reads again. */
    const bool is_first = column.last_bag > 0 && column.offsets == my.offsets;
    const bool bad_start = is_first && rf_bad_start(my, 0, task.first_bag);
    bool bad = bad_start;
    rf_short_bags<S> now, next;
    now.load_bags(my, column, first, bad);
    if (bad_start && first == 0) now.filled &= ~1u;
    now.load_ids(my);
#pragma unroll 1
    for (; first < task.last_bag; first += STEP) {
        vector row[S::BAGS];
        bool there[S::BAGS];
        next.load_bags(my, column, first + STEP, bad);
#pragma unroll
        for (int k = 0; k < S::BAGS; k++) {
            there[k] = now.filled & 1u << k && rf_wanted(column, now.id[k], bad);
            row[k] = {};
            if (there[k])
                row[k] = rf_load((const vector *)rf_row(column.table, (rf_key)now.id[k], column.pitch));
        }
        next.load_ids(my);
#pragma unroll
        for (int k = 0; k < S::BAGS; k++) {
            float sum[S::ELEMENTS] = {};
            bool any = false;
            int count = there[k];
            const float scale = RF_WEIGHTED && there[k] ? rf_load(my.sample_weights + now.start[k]) : 1.0f;
            if (there[k]) rf_add_row<S>(sum, row[k], scale, any);
            const bool filled = now.filled & 1u << k;
            if (filled) rf_add_rest<S>(my, column, now.start[k] + 1, now.start[k + 1], sum, any, count, bad);
            if (first + k >= column.last_bag) continue;
            /* As for other schedules, a bad lookup counts in a mean where there is no padding. */
            const rf_i64 lookups = column.padding >= 0 ? count
                                   : filled            ? (rf_i64)(now.start[k + 1] - now.start[k])
                                                       : 0;
            if (column.mean && lookups > 1) {
#pragma unroll
                for (int e = 0; e < S::ELEMENTS; e++) sum[e] = rf_divide(sum[e], (float)lookups);
            }
            rf_store<S::STORE, S::ELEMENTS>(column.output + (rf_u64)(rf_u32)(first + k) * my.output_pitch,
                                            sum);
        }
        now = next;
    }
    if (RF_CHECK && bad) rf_report_task(my, true);
}

#endif
