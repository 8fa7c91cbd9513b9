/* Shared by the host C and the kernels of the backward pass: numbers of kinds, features, matrices, the
 * arguments of launches. Read by C11 and by NVRTC, as "families/fused_backward/backward_args.h" on both
 * sides. In kernels RF_INDEX and RF_OFFSET are the types of indices and offsets, RF_KEY and RF_VALUE those of
 * entries. */
#ifndef RECFUSE_CUDA_BACKWARD_ARGS_H
#define RECFUSE_CUDA_BACKWARD_ARGS_H

#include "gpu/device/codes.h"
#include "gpu/device/types.h"
#include "recfuse/update_codes.h"

#ifdef __CUDACC__
#define RF_BACKWARD_ADDRESS(type) type *
#ifndef RF_KEY
#define RF_KEY rf_u32
#endif
#ifndef RF_VALUE
#define RF_VALUE rf_u32
#endif
/* A lookup that counts: the row among all of the launch, and an element of grad or the lookup's number. */
typedef struct __align__(2 * (sizeof(RF_KEY) > sizeof(RF_VALUE) ? sizeof(RF_KEY) : sizeof(RF_VALUE)))
    rf_backward_entry {
    RF_KEY key;
    RF_VALUE value;
} rf_backward_entry;
#else
#define RF_BACKWARD_ADDRESS(type) rf_u64 /* on the device */
#define RF_KEY void
#define RF_VALUE void
#endif

enum {
    RF_BACKWARD_BLOCK = 256, /* threads */
    RF_BACKWARD_SORT_BLOCK = 512, /* threads of keys.cu and sort.cu */
    /* Lookups or entries of each, RF_ITEMS in kernels: for many, and for few. */
    RF_BACKWARD_MOST_ITEMS = 8,
    RF_BACKWARD_FEW_ITEMS = 4,
    RF_BACKWARD_PLACES_DIGITS = 32, /* of a block of rf_backward_places */
    RF_BACKWARD_MOST_SEGMENTS = 32,
    RF_BACKWARD_MOST_DIGIT_BITS = 11, /* of a pass */
    RF_BACKWARD_MOST_ROWS_CHUNK = 512, /* entries a block of rows.cu, at most */
    RF_BACKWARD_ROWS_AT_ONCE = 4, /* entries that a group of it takes at once, at most */
    RF_BACKWARD_MOST_MATRICES = 16, /* of a launch */
    RF_BACKWARD_LANES = 32, /* most that share a row */
    /* The use of a row's sum: an optimizer's number plus one, or: */
    RF_EPILOGUE_GRADIENT = 0, /* it is written, to row `row` of a matrix */
    /* The factors of entries. */
    RF_ENTRIES_DIRECT = 0, /* a value is an element of grad; the factor is 1 */
    RF_ENTRIES_INDIRECT = 1, /* a value is a lookup, which has an element of grad and a factor */
    RF_ENTRIES_MIXED = 2, /* the same, and a factor of -(feature + 1) means a maximum. No sample weights */
    RF_BACKWARD_MOST_FEATURES = 1 << 24 /* a float32 distinguishes this many */
};

/* The host's description of a feature. Rows count over all matrices of the launch. */
typedef struct rf_backward_feature {
    rf_i64 first_row, rows, padding_idx; /* -1: no padding */
    rf_i32 output_column;
    rf_i32 pooling; /* rf_pooling; -1: it is not of this launch */
} rf_backward_feature;
RF_SIZE_IS(rf_backward_feature, 32);

/* Consecutive features whose rows are consecutive too form segments. The entries of each segment are sorted
 * separately, by key minus its `base`: these have fewer bits than keys of all rows. */
typedef struct rf_backward_segments {
    rf_i64 bases[RF_BACKWARD_MOST_SEGMENTS];
    rf_u32 slots[RF_BACKWARD_MOST_SEGMENTS]; /* the first bag */
    rf_i32 count, unused;
} rf_backward_segments;
RF_SIZE_IS(rf_backward_segments, 392);

/* A weight, or the destination of its gradient. For a row-sparse gradient, row n among the rows with lookups
 * of all matrices is row n from `weight` on, and its number is listed[n]: both pointers begin that far before
 * the matrix's own memory. */
typedef struct rf_backward_matrix {
    RF_BACKWARD_ADDRESS(rf_u8) weight; /* [rows, dim] */
    union {
        RF_BACKWARD_ADDRESS(float) states[2];
        RF_BACKWARD_ADDRESS(rf_i64) row_sparse; /* NULL: the gradient is not listed */
    };
    rf_i64 first_row; /* of all matrices */
    rf_i64 rows;
    rf_i32 dim, unused;
} rf_backward_matrix;
RF_SIZE_IS(rf_backward_matrix, 48);

/* The arguments of epilogue.cuh. */
typedef struct rf_epilogue_args {
    RF_BACKWARD_ADDRESS(const float) numbers; /* RF_UPDATE_...; NULL: gradients */
    rf_u64 seed;
} rf_epilogue_args;
RF_SIZE_IS(rf_epilogue_args, 16);

/* Counts of a pass of the sort. A chunk is of one segment; those of a segment follow each other. */
typedef struct rf_backward_counts {
    RF_BACKWARD_ADDRESS(rf_u32) lengths; /* [RF_BACKWARD_MOST_SEGMENTS]: lookups or entries of a segment */
    RF_BACKWARD_ADDRESS(rf_u32) totals; /* as many, of entries only */
    RF_BACKWARD_ADDRESS(rf_u32) digits; /* [segments][digits]: entries */
    RF_BACKWARD_ADDRESS(rf_u32)
    places; /* [chunks][digits]: entries, then those of the segment's chunks before */
    rf_i32 shift, bits; /* of the pass's digit in a key minus its segment's base */
} rf_backward_counts;
RF_SIZE_IS(rf_backward_counts, 40);

/* keys.cu */
typedef struct rf_backward_keys_args {
    RF_BACKWARD_ADDRESS(const RF_INDEX) indices; /* [lookups] */
    RF_BACKWARD_ADDRESS(const RF_OFFSET) offsets; /* [slots + 1] */
    RF_BACKWARD_ADDRESS(const float) sample_weights; /* [lookups], or NULL */
    RF_BACKWARD_ADDRESS(const rf_backward_feature) features;
    RF_BACKWARD_ADDRESS(rf_backward_entry) entries; /* [lookups] */
    RF_BACKWARD_ADDRESS(RF_VALUE) sources; /* [lookups]: elements of grad; NULL if entries are direct */
    RF_BACKWARD_ADDRESS(float) factors; /* [lookups]; NULL if entries are direct */
    RF_BACKWARD_ADDRESS(float) bag_factors; /* [slots], of features with RF_MEAN; NULL without any */
    rf_i64 lookups, output_dim;
    rf_i64 invalid_key; /* the key of lookups that do not count */
    rf_i64 span; /* keys that a segment may have */
    rf_u32 slots, bags; /* features * bags */
    rf_backward_segments segments;
    rf_backward_counts counts; /* of the first pass */
} rf_backward_keys_args;
RF_SIZE_IS(rf_backward_keys_args, 536);

/* One pass of sort.cu. */
typedef struct rf_backward_sort_args {
    RF_BACKWARD_ADDRESS(const rf_backward_entry) entries;
    RF_BACKWARD_ADDRESS(rf_backward_entry) sorted;
    RF_BACKWARD_ADDRESS(rf_i64) count; /* number of all entries; written by rf_backward_sort */
    rf_i64 invalid_key;
    rf_backward_segments segments;
    rf_backward_counts counts;
} rf_backward_sort_args;
RF_SIZE_IS(rf_backward_sort_args, 464);

/* Shared memory of a block of sort.cu: counts a warp and digit, or entries; two numbers a digit; a few. */
#define RF_BACKWARD_SORT_SHARED(digits, items, entry_bytes)                                         \
    ((RF_BACKWARD_SORT_BLOCK / 32 * 2 * (digits) > RF_BACKWARD_SORT_BLOCK * (items) * (entry_bytes) \
          ? RF_BACKWARD_SORT_BLOCK / 32 * 2 * (digits)                                              \
          : RF_BACKWARD_SORT_BLOCK * (items) * (entry_bytes)) +                                     \
     2 * 4 * (digits) + RF_BACKWARD_SORT_BLOCK / 32 * 8 + 16)

/* Shared memory of a block of rows.cu: keys, values and factors of a chunk, numbers of previous rows; partial
 * sums. */
#define RF_BACKWARD_ROWS_SHARED(chunk, entry_bytes, vectors)    \
    (((chunk) + 1 + RF_BACKWARD_ROWS_AT_ONCE) * (entry_bytes) + \
     ((chunk) + RF_BACKWARD_ROWS_AT_ONCE) * (4 + 4) + 2 * RF_BACKWARD_BLOCK * 16 * (vectors))

/* unique.cu, rows.cu, joins.cu */
typedef struct rf_backward_rows_args {
    RF_BACKWARD_ADDRESS(const rf_backward_entry) entries; /* [count], by rising keys */
    RF_BACKWARD_ADDRESS(const RF_VALUE) sources; /* [lookups]; NULL if entries are direct */
    RF_BACKWARD_ADDRESS(const float) factors;
    RF_BACKWARD_ADDRESS(const rf_u8) grad; /* [bags, output_dim] */
    RF_BACKWARD_ADDRESS(const rf_i64) winners; /* as grad; NULL: no feature pools by maximum */
    RF_BACKWARD_ADDRESS(const rf_backward_feature) features;
    RF_BACKWARD_ADDRESS(float)
    partials; /* [chunks][2][pitch]: sums of the first and the last run of a chunk */
    /* [chunks + 1 + n_matrices]: number of rows before a chunk, the total, those before a matrix; NULL for
     * dense gradients. */
    RF_BACKWARD_ADDRESS(rf_u32) bases;
    RF_BACKWARD_ADDRESS(const rf_i64) count;
    rf_i64 lookups; /* entries that fit into the memory */
    rf_i32 chunk, chunks; /* entries a block; blocks */
    rf_i32 pitch, n_matrices;
    rf_i32 by_frequency, unused; /* a row's sum is divided by the number of its entries */
    rf_epilogue_args epilogue;
    rf_backward_matrix matrices[RF_BACKWARD_MOST_MATRICES];
} rf_backward_rows_args;
RF_SIZE_IS(rf_backward_rows_args, 888);

/* listed.cu */
typedef struct rf_backward_row_sparse_args {
    RF_BACKWARD_ADDRESS(const rf_i64) rows; /* [count] */
    RF_BACKWARD_ADDRESS(const rf_u8) sums; /* [count, dim] */
    rf_i64 count;
    rf_epilogue_args epilogue;
    rf_backward_matrix matrix; /* first_row 0 */
} rf_backward_row_sparse_args;
RF_SIZE_IS(rf_backward_row_sparse_args, 88);

#endif
