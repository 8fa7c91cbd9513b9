/* Columns whose samples have any number of lookups: lists of their lookups. */
#ifndef RECFUSE_COLUMNS_BAGS_CUH
#define RECFUSE_COLUMNS_BAGS_CUH

#include "gpu/device/sums.cuh"
#include "families/embedding_columns/columns.cuh"

/* The values of a sample's bag, or pairs of values: the first element and the number of elements of each
 * source. */
struct rf_column_bag {
    rf_i64 left, right; /* first elements of the inputs */
    rf_i64 count, of_right; /* lookups of the bag; lookups per left value */
};

RF_INLINE rf_i64 rf_column_offset(const rf_columns_tensor &input, rf_i64 at) {
    if (input.offset_type == RF_INT64) return rf_load((const rf_i64 *)input.offsets + at);
    return rf_load((const int *)input.offsets + at);
}

/* Returns the number of values of a sample and sets `begin` to the first. Invalid offsets give 0. */
RF_INLINE rf_i64 rf_column_count(const rf_columns_args &args, const rf_columns_column &column,
                                 const rf_columns_source &source, rf_i64 sample, rf_i64 &begin) {
    const rf_columns_tensor input = rf_column_tensor_of(args, source.input);
    begin = 0;
    if (source.width > 0) {
        begin = sample * input.sample_stride + source.slot * input.value_stride;
        return source.width;
    }
    const rf_i64 bag = source.slot * args.batch + sample, lookups = input.sample_stride;
    const rf_i64 from = rf_column_offset(input, bag), to = rf_column_offset(input, bag + 1);
    const bool bad_first = from < 0 || from > lookups || (bag == 0 && from != 0);
    if (RF_CHECK && (bad_first || to < from || to > lookups)) {
        rf_column_report(args.errors, RF_ARGUMENT_column_offsets, column.number, bad_first ? bag : bag + 1,
                         sample, bad_first ? from : to, bad_first ? 0 : from, lookups);
        return 0;
    }
    begin = from;
    return to - from;
}

RF_INLINE rf_column_bag rf_column_bag_of(const rf_columns_args &args, const rf_column_work &work,
                                         int sample) {
    const rf_columns_column &column = work.column(0);
    rf_column_bag bag = {};
    bag.count = rf_column_count(args, column, work.source(column.left), work.first + sample, bag.left);
    bag.of_right = 1;
    if (column.right >= 0)
        bag.of_right =
            rf_column_count(args, column, work.source(column.right), work.first + sample, bag.right);
    bag.count *= bag.of_right;
    return bag;
}

/* Returns the element of an input that a lookup of a bag reads from one of its sources. */
RF_INLINE rf_i64 rf_column_element(const rf_columns_column &column, const rf_columns_source &source,
                                   const rf_columns_tensor &input, const rf_column_bag &bag, rf_i64 number,
                                   int right) {
    const rf_i64 stride = source.width > 0 ? input.value_stride : 1;
    const rf_i64 row = column.right >= 0 ? number / bag.of_right : number;
    return right ? bag.right + (number - row * bag.of_right) * stride : bag.left + row * stride;
}

/* Data in shared memory that all threads of a block read, stored after the body. */
struct rf_column_bags {
    rf_column_bag bag[RF_COLUMNS_MOST_SAMPLES];
    rf_i64 start[RF_COLUMNS_MOST_SAMPLES + 1]; /* lookups of all previous bags that are not long */
    rf_i64 of_warps[WARPS];
    rf_i64 counts[BLOCK]; /* sums of the groups of threads */
    double norms[BLOCK];
    float sums[RF_COLUMNS_MOST_VECTOR][BLOCK];
    int first; /* first listed lookup that has a row */
    /* The rows and weights of listed lookups. A row of NULL is skipped. */
    const rf_u8 *rows[RF_COLUMNS_LIST_LOOKUPS];
    float weights[RF_COLUMNS_LIST_LOOKUPS];
};

static_assert(sizeof(rf_column_bags) <= RF_COLUMNS_BAGS_BYTES, "as the host asks for");

/* The lookups of a list. If `long_bag` >= 0: `count` lookups of this bag from its lookup `from` on. If it is -1:
 * of the bags [bag, last) that are not long, from lookup `from` of their concatenation on. */
struct rf_column_lookups {
    int long_bag, bag, last;
    rf_i64 from;
    int count;
};

RF_INLINE void rf_column_list(const rf_columns_args &args, const rf_column_work &work, rf_column_bags &bags,
                              const rf_column_lookups &lookups) {
    enum { AT_ONCE = 2 };
    const rf_columns_column &column = work.column(0);
    const rf_column_table table = rf_column_table_of(args, column);
    const float *weights = rf_column_tensor_of(args, work.source(column.left).input).weights;
#pragma unroll 1
    for (int base = threadIdx.x; base < lookups.count; base += AT_ONCE * BLOCK) {
        int of[AT_ONCE];
        rf_i64 number[AT_ONCE], position[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const rf_i64 lookup = lookups.from + min(base + i * BLOCK, lookups.count - 1);
            int bag_of_lookup = lookups.long_bag;
            if (lookups.long_bag < 0) { /* the last bag that begins at or before the lookup */
                int end = lookups.last;
                for (bag_of_lookup = lookups.bag; bag_of_lookup + 1 < end;) {
                    const int middle = (bag_of_lookup + end) / 2;
                    if (bags.start[middle] <= lookup)
                        bag_of_lookup = middle;
                    else
                        end = middle;
                }
            }
            of[i] = bag_of_lookup;
            number[i] = lookups.long_bag < 0 ? lookup - bags.start[bag_of_lookup] : lookup;
        }
        rf_column_values<AT_ONCE> values = {};
        rf_column_indices(
            args, work, column,
            [&](int right, const rf_columns_source &source, rf_i64(&at)[AT_ONCE]) {
                const rf_columns_tensor input = rf_column_tensor_of(args, source.input);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    at[i] = rf_column_element(column, source, input, bags.bag[of[i]], number[i], right);
                    if (!right) position[i] = at[i];
                }
                return rf_column_array{input.values, rf_column_bytes(input.type), input.type};
            },
            values);
        int bad = -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = base + i * BLOCK;
            if (at >= lookups.count) break;
            const rf_i64 row = rf_column_row(column, values.integer[i], i, bad);
            bags.rows[at] = row < 0 ? nullptr : table.rows + row * table.pitch;
            if (column.weighted)
                bags.weights[at] = weights != nullptr ? rf_load(weights + position[i]) : 1.0f;
            if (lookups.long_bag >= 0 && column.pooling == RF_COLUMN_MAX && row >= 0)
                atomicMin(&bags.first, at);
        }
        if (RF_CHECK && bad >= 0)
            rf_column_report(args.errors, RF_ARGUMENT_column_index, column.number,
                             work.source(column.left).width > 0 ? -1
                             : bad > 0                          ? position[1]
                                                                : position[0],
                             work.first + (bad > 0 ? of[1] : of[0]), values.of(bad), column.rows, 0);
    }
}

#endif
