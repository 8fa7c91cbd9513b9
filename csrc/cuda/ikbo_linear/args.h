/* What the kernel of broadcast_add.cu is launched with; see rf_ikbo_add_params. */
#ifndef RECFUSE_CUDA_IKBO_LINEAR_ARGS_H
#define RECFUSE_CUDA_IKBO_LINEAR_ARGS_H

#include "device/error_word.h"

/* Which bias an element has. */
enum { RF_BIAS_NONE, RF_BIAS_ROW, RF_BIAS_COLUMN };

typedef struct rf_broadcast_add_args {
    rf_u8 *out;         /* [count, item_vectors] vectors */
    const rf_u8 *base;  /* [parents, item_vectors] vectors */
    const RF_INDEX *parent; /* [count], NULL: each item its own */
    const rf_u8 *bias;  /* [rows] or [columns] elements, NULL where RF_BIAS is RF_BIAS_NONE */
    rf_i64 count, parents;
    rf_u32 item_vectors; /* of an item: rows * columns elements */
    rf_u32 columns;
    rf_i32 map;    /* as in rf_ikbo_add_params */
    rf_i32 report; /* whether a bad parent is recorded */
    rf_error_word errors;
} rf_broadcast_add_args;
RF_SIZE_IS(rf_broadcast_add_args, 80);

#endif
