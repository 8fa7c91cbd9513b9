/* The arguments of the kernel in embedding_bag.cu; its constants are macros (see there). */
#ifndef RECFUSE_CUDA_EMBEDDING_BAG_ARGS_H
#define RECFUSE_CUDA_EMBEDDING_BAG_ARGS_H

#include "gpu/device/error_word.h"
#include "recfuse/embedding_bag_codes.h"

typedef struct rf_embedding_bag_args {
    const rf_u8 *weight; /* [rows, RF_DIM], RF_STRIDE elements from row to row */
    const RF_INDEX *indices; /* [lookups] */
    const RF_OFFSET *offsets; /* [n_offsets] */
    const float *sample_weights; /* [lookups], may be NULL */
    rf_u8 *output; /* [bags, RF_DIM], output_pitch bytes from bag to bag */
    rf_i64 rows, lookups, bags, n_offsets, output_pitch, padding_idx;
    rf_i64 mean_lookups; /* of a bag: lookups / bags */
    rf_i32 part_shift; /* a row is in part row >> part_shift of the table, or in the last */
    rf_error_word errors;
} rf_embedding_bag_args;
RF_SIZE_IS(rf_embedding_bag_args, 120);

#endif
