/* The sum of a short bag: a lane's columns of a row, and the bag that a group of lanes adds rows to. Requires
 * `shape` and the macros of short_bags.cu. */
#ifndef RECFUSE_EMBEDDING_BAG_BAG_SUM_CUH
#define RECFUSE_EMBEDDING_BAG_BAG_SUM_CUH

#include "families/embedding_bag/bag.cuh"

enum { NO_ROW = -1, PADDING = -2 }; /* special values of a row; padding does not count in a mean */

/* This lane's part of a row. */
struct row_part {
    shape::vector of[shape::VECTORS];

    /* `table`: the address of this lane's columns of row 0. */
    RF_INLINE void load_valid(const rf_columns<shape> &columns, const rf_u8 *table, RF_ROW row) {
        const shape::vector *from = (const shape::vector *)(table + (rf_i64)row * shape::ROW_PITCH);
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++)
            of[v] = shape::ALL_INSIDE ? rf_load(from + v * shape::LANES)
                                      : rf_load_if(columns.inside(v) ? 0 : -1, from + v * shape::LANES);
    }
    /* Loads a row, or zeros for NO_ROW and PADDING. */
    RF_INLINE void load(const rf_columns<shape> &columns, const rf_u8 *table, RF_ROW row) {
        const shape::vector *from = (const shape::vector *)(table + (rf_i64)row * shape::ROW_PITCH);
        const int zero_mask = (int)(row >> (8 * sizeof(RF_ROW) - 32));
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++)
            of[v] = rf_load_if(columns.inside(v) ? zero_mask : -1, from + v * shape::LANES);
    }
    RF_INLINE void add_to(shape::sums &sum) const {
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) {
#pragma unroll
            for (int e = 0; e < shape::ELEMENTS; e++)
                sum.of[v * shape::ELEMENTS + e] += shape::element::get(of[v], e);
        }
    }
    /* `to`: the address of this lane's columns in the output of a bag. */
    RF_INLINE void store(const rf_columns<shape> &columns, rf_u8 *to) const {
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) {
            if (columns.inside(v)) ((shape::vector *)to)[v * shape::LANES] = of[v];
        }
    }
};

/* Returns the first bag of this warp. */
RF_INLINE rf_i64 first_of_warp() {
    return ((rf_i64)blockIdx.x * (RF_BLOCK / 32) + threadIdx.x / 32) * RF_BAGS;
}

/* The bag that a group of lanes is adding to. A group has one bag after another. */
struct summed_bag {
    int number, last; /* numbers within the warp; `last` belongs to the next group */
    int end; /* end of its lookups; the largest int after the last bag */
    int counted; /* lookups that are not padding */
    rf_u8 *to; /* its row of the output */
    shape::sums sum;

    RF_INLINE summed_bag(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int number_)
        : number(number_), last(0), end(0), counted(0),
          to((rf_u8 *)rf_output_of(args, first_of_warp() + number_, columns.column)), sum() {}
    /* `bag_ends`: the end of each lane's bag. */
    RF_INLINE summed_bag(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int number_,
                         int last_, int bag_ends)
        : summed_bag(args, columns, number_) {
        last = last_;
        read_end(bag_ends);
    }
    RF_INLINE void read_end(int bag_ends) {
        end = __shfl_sync(RF_FULL_WARP, bag_ends, number & 31);
        if (number >= last) end = 0x7fffffff;
    }
    RF_INLINE void store(const rf_columns<shape> &columns) {
        if (RF_POOLING == RF_MEAN) {
            const float divisor = counted > 0 ? (float)counted : 1.0f;
#pragma unroll
            for (int i = 0; i < shape::VECTORS * shape::ELEMENTS; i++) sum.of[i] /= divisor;
        }
        row_part pooled;
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) pooled.of[v] = rf_pooled(sum, v);
        pooled.store(columns, to);
    }
    /* Stores the bags whose lookups end before `position`. */
    RF_INLINE void finish(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int bag_ends,
                          int position) {
        while (__any_sync(RF_FULL_WARP, end <= position)) {
            if (end <= position) {
                store(columns);
                number++;
                to += args.output_pitch;
                counted = 0;
                sum = {};
            }
            read_end(bag_ends);
        }
    }
};

#endif
