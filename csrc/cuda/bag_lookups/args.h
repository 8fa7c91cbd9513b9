/* What the kernel of bag_lookups.cu is launched with; arrays and numbers as in base/bag_lookups.h. */
#ifndef RECFUSE_CUDA_BAG_LOOKUPS_ARGS_H
#define RECFUSE_CUDA_BAG_LOOKUPS_ARGS_H

#include "device/types.h"

typedef struct rf_bag_lookups_args {
    const RF_INDEX *indices; /* [lookups] */
    const RF_OFFSET *offsets; /* [n_offsets] */
    rf_i64 lookups, bags, n_offsets, rows, padding_idx;
    rf_i64 *row, *bag_of; /* [lookups] */
    rf_i64 *sizes; /* [bags] */
    rf_i64 position_blocks; /* that write row and bag_of */
} rf_bag_lookups_args;
RF_SIZE_IS(rf_bag_lookups_args, 88);

#endif
