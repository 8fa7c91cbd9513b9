/* Shared by both kernels of the embedding bag: the lanes of a row, the bounds of a bag, reports of invalid
 * values. */
#ifndef RECFUSE_EMBEDDING_BAG_BAG_CUH
#define RECFUSE_EMBEDDING_BAG_BAG_CUH

#include "gpu/device/element.cuh"
#include "families/embedding_bag/embedding_bag_args.h"

constexpr int power_of_two(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
}
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

/* LANES lanes read a row, up to two vectors each. Wider rows are cut into slices over gridDim.y. */
struct rf_row_shape {
    typedef rf_element<RF_DTYPE> element;
    typedef rf_bytes<RF_ALIGN> vector;
    static constexpr int ALIGN = RF_ALIGN, POOLING = RF_POOLING;
    static constexpr int ELEMENTS = RF_ALIGN / element::BYTES; /* per vector */
    static constexpr int ROW_BYTES = RF_DIM * element::BYTES;
    static constexpr rf_i64 ROW_PITCH = (rf_i64)RF_STRIDE * element::BYTES;
    static constexpr int COLUMNS = ROW_BYTES / RF_ALIGN; /* vectors per row */
    static constexpr int LANES = smaller(power_of_two(COLUMNS), 32);
    static constexpr int VECTORS = smaller((COLUMNS + LANES - 1) / LANES, 2); /* per lane and slice */

    struct sums {
        float of[VECTORS * ELEMENTS];
    };
};

/* The table and the columns of a thread. SHAPE is an rf_row_shape. */
template <class SHAPE> struct rf_columns {
    const rf_u8 *table;
    int column; /* first vector of this lane */

    template <class ROW> RF_INLINE const rf_u8 *address(ROW row) const {
        return table + (rf_i64)row * SHAPE::ROW_PITCH + column * SHAPE::ALIGN;
    }
    /* Returns true if the lane's vector v is inside the row. */
    RF_INLINE bool inside(int v) const {
        return SHAPE::COLUMNS % (SHAPE::LANES * SHAPE::VECTORS) == 0 ||
               column + v * SHAPE::LANES < SHAPE::COLUMNS;
    }
};

/* Returns the address of this lane's columns in the output of a bag. */
RF_INLINE rf_row_shape::vector *rf_output_of(const rf_embedding_bag_args &args, rf_i64 bag, int column) {
    return (rf_row_shape::vector *)(args.output + bag * args.output_pitch) + column;
}

RF_INLINE rf_row_shape::vector rf_pooled(const rf_row_shape::sums &sum, int v) {
    return rf_elements_of<RF_DTYPE, rf_row_shape::ELEMENTS>(sum.of + v * rf_row_shape::ELEMENTS);
}

/* The lookups of a bag, or of one warp of a bag. */
struct rf_bag {
    rf_i64 begin, end;
};

RF_INLINE void rf_report_offset(const rf_embedding_bag_args &args, rf_i64 bag, rf_bag bounds) {
    const bool first = bounds.begin < 0 || bounds.begin > args.lookups || (bag == 0 && bounds.begin != 0);
    rf_report<RF_OPERATOR_embedding_bag>(args.errors, {RF_ARGUMENT_offsets, first ? bag : bag + 1, bag,
                                                       first ? bounds.begin : bounds.end,
                                                       first ? 0 : bounds.begin, args.lookups});
}

RF_INLINE void rf_report_index(const rf_embedding_bag_args &args, rf_i64 bag, rf_i64 position, rf_i64 index) {
    rf_report<RF_OPERATOR_embedding_bag>(
        args.errors, {RF_ARGUMENT_indices, position, bag, index, args.rows, args.lookups});
}

/* Returns the bounds of a bag if all bags are equally long. Bags past the last are empty. */
RF_INLINE rf_bag rf_bag_if_even(const rf_embedding_bag_args &args, rf_i64 bag) {
    const rf_i64 begin = bag * args.mean_lookups;
    return {begin, bag < args.bags ? begin + args.mean_lookups : begin};
}

/* Returns the bounds of a bag. Reports invalid offsets and returns an empty bag. Without offsets all bags are
 * equally long. */
RF_INLINE rf_bag rf_bag_at(const rf_embedding_bag_args &args, rf_i64 bag) {
    if (args.offsets == nullptr) return rf_bag_if_even(args, bag);
    const rf_i64 begin = rf_load(args.offsets + bag);
    const rf_i64 end = bag + 1 < args.n_offsets ? (rf_i64)rf_load(args.offsets + bag + 1) : args.lookups;
    if (RF_CHECK && (begin < 0 || end < begin || end > args.lookups || (bag == 0 && begin != 0))) {
        rf_report_offset(args, bag, {begin, end});
        return {0, 0};
    }
    return {begin, end};
}

#endif
