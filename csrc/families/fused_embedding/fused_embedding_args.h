/* The arguments of the kernel in fused_embedding.cu: all of a call, so that nothing is uploaded. */
#ifndef RECFUSE_CUDA_FUSED_EMBEDDING_ARGS_H
#define RECFUSE_CUDA_FUSED_EMBEDDING_ARGS_H

#include "gpu/device/codes.h"
#include "gpu/device/error_word.h"
#include "recfuse/fused_embedding_codes.h"

/* Kernels have room for 16 features, for 55 (arguments of 4 KiB), or for 448 (32 KiB). */
enum {
    RF_EMBEDDING_SMALL = 16,
    RF_EMBEDDING_MEDIUM = 55,
    RF_EMBEDDING_LARGE = 448,
    RF_EMBEDDING_BLOCK = 256
};
#ifndef RF_FEATURES
#ifdef __CUDACC__
#define RF_FEATURES RF_EMBEDDING_SMALL
#else
#define RF_FEATURES RF_EMBEDDING_LARGE
#endif
#endif

typedef struct rf_embedding_feature {
    const rf_u8 *weight;
    rf_i64 rows, padding_idx;
    rf_i64 first_row; /* added to an index in `rows` */
    rf_i64 first_lookup; /* according to the host's sizes */
    rf_i64 output_offset; /* bytes; the row of slot s is output_pitch * s from here */
    rf_u32 pitch, output_pitch; /* bytes */
    rf_i32 dim, dtype;
    rf_i32 vector; /* bytes that one instruction copies; 0: elements are converted */
    rf_i32 lanes; /* that share a row, a power of two */
} rf_embedding_feature;
RF_SIZE_IS(rf_embedding_feature, 72);

typedef struct rf_fused_embedding_args {
    const RF_INDEX *indices; /* [lookups] */
    const RF_OFFSET *offsets; /* [features * bags + 1] */
    rf_u8 *output;
    const rf_u8 *fill; /* a row of the output, may be NULL */
    rf_i64 *rows; /* may be NULL */
    rf_i64 lookups, slots, length, bags; /* slots: of a feature, of RF_HISTORY_JAGGED of all */
    rf_i32 n_features, output_dtype;
    rf_i32 check, sized; /* report invalid contents; the host has the lookups of each feature */
    rf_error_word errors;
    rf_embedding_feature features[RF_FEATURES];
} rf_fused_embedding_args;
RF_SIZE_IS(rf_fused_embedding_args, 104 + 72 * RF_FEATURES);

#endif
