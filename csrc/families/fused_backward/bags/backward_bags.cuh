/* Shared by kernels that work bag by bag: a bag's lookups, and four columns of a table of any dtype and
 * alignment. */
#ifndef RECFUSE_CUDA_BACKWARD_BAGS_CUH
#define RECFUSE_CUDA_BACKWARD_BAGS_CUH

#include "gpu/device/bags.cuh"
#include "gpu/device/element.cuh"
#include "families/fused_backward/bags/backward_bags_args.h"

enum { BLOCK = RF_BAGS_BLOCK, LANE_COLUMNS = 4 };

struct columns_t {
    float of[LANE_COLUMNS];
};

/* Loads up to four columns from element `first` on; `is_aligned`: all four exist and are aligned. */
template <int DTYPE>
RF_INLINE columns_t columns_of(const rf_u8 *from, rf_i64 first, int count, bool is_aligned) {
    enum { BYTES = rf_element<DTYPE>::BYTES };
    columns_t to = {};
    if (is_aligned) {
        rf_elements_get<DTYPE, LANE_COLUMNS>(
            rf_load((const rf_elements<DTYPE, LANE_COLUMNS> *)(from + first * BYTES)), to.of);
        return to;
    }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++)
        if (i < count)
            to.of[i] = rf_element<DTYPE>::get(
                rf_load((const rf_elements<DTYPE, 1> *)(from + (first + i) * BYTES)), 0);
    return to;
}
RF_INLINE columns_t columns_of(const rf_u8 *from, int dtype, rf_i64 first, int count, bool is_aligned) {
    if (dtype == RF_FLOAT32) return columns_of<RF_FLOAT32>(from, first, count, is_aligned);
    if (dtype == RF_FLOAT16) return columns_of<RF_FLOAT16>(from, first, count, is_aligned);
    return columns_of<RF_BFLOAT16>(from, first, count, is_aligned);
}

/* Returns true if all vectors of four columns are complete and aligned. */
RF_INLINE bool are_aligned(const rf_u8 *rows, int dtype, rf_i64 pitch, rf_i64 columns) {
    const int bytes = LANE_COLUMNS * rf_table_element_bytes(dtype);
    return (rf_u64)rows % bytes == 0 && pitch % LANE_COLUMNS == 0 && columns % LANE_COLUMNS == 0;
}

/* The lookups of a bag; empty if its offsets are invalid. */
struct bag_t {
    rf_i64 from, to;
};
RF_INLINE bag_t bag_of(const rf_bags_args &args, rf_i64 feature, rf_i64 bag) {
    const RF_OFFSET *offsets = args.offsets + feature * args.bags + bag;
    const rf_i64 from = rf_load(offsets), to = rf_load(offsets + 1);
    if (!rf_is_bag(feature == 0 && bag == 0, from, to, args.lookups)) return {0, 0};
    return {from, to};
}

/* Returns the row of a lookup, or -1 if it does not count. */
RF_INLINE rf_i64 row_of(const rf_bags_args &args, const rf_bags_feature &feature, rf_i64 lookup) {
    const rf_i64 index = (rf_i64)rf_load(args.indices + lookup);
    return (rf_u64)index < (rf_u64)feature.rows && index != feature.padding_idx ? index : -1;
}

/* Returns the number of lanes for a row's columns, a power of two up to `most`. */
RF_INLINE int lanes_of(rf_i64 dim, int most) {
    int lanes = 1;
    while (lanes < most && lanes * LANE_COLUMNS < dim) lanes *= 2;
    return lanes;
}

#endif
