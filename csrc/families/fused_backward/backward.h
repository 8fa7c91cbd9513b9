/* The backward pass of fused calls on a GPU: the transpose of the forward pass.
 *
 * From file to file: entry.c, the functions of recfuse.h; backward.c, runs a problem; lowering.c,
 * descriptions and launches of both paths; problem.c, features in the form of kernels; segments.c, features
 * whose entries are sorted together; general/layout.c, the workspace of the general path; general/general.c,
 * its launches; backward_kernel.c, variants of its kernels; small/small.c, tables that fit in shared memory.
 * On the device, general path: keys.cu converts lookups to entries, sort.cu sorts them by row, rows.cu and
 * joins.cu pool them row by row (unique.cu counts the rows of a row-sparse gradient). listed.cu updates rows
 * from given sums. Small tables: lists.cu, small_rows.cu. All end in the epilogue, epilogue.cuh.
 */
#ifndef RECFUSE_CUDA_BACKWARD_H
#define RECFUSE_CUDA_BACKWARD_H

#include "core/row_format.h"
#include "families/fused_backward/backward_args.h"
#include "gpu/launches/launches.h"

/* Parts that a call can do without; its results are the same. */
enum { RF__BACKWARD_WITHOUT_SMALL = 1 /* takes all features the general path: small/ */ };
/* Sets the parts that later calls of this process omit; 0, as at the start: none. For
 * benchmarks/ablations.py. */
RF__SHARED void rf__backward_omit(int32_t parts);

/* Features of a call whose buffers are among the matrices, and the use of a row's sum. */
typedef struct rf__backward_problem {
    rf_fused_backward_params call; /* `rows`, `dim`, `dtype` and `group` are not read */
    rf_backward_matrix matrices[RF_BACKWARD_MOST_MATRICES];
    int64_t buffers[RF_BACKWARD_MOST_MATRICES]; /* buffers of the matrices */
    int32_t n_matrices;
    rf_dtype dtype; /* of the matrices */
    int32_t epilogue; /* RF_EPILOGUE_GRADIENT or optimizer + 1 */
    bool stochastic_rounding;
    rf_epilogue_args epilogue_args;
    int32_t omitted; /* RF__BACKWARD_WITHOUT_..., or-ed: omitted by this call, to measure their gain */
    /* [n_matrices]: rows and sums are listed there; NULL: sums are written to the matrices, gradients to
     * zeros. */
    const rf_sparse_output *const *row_sparse;
} rf__backward_problem;

/* Adds a matrix, whose first row follows the last row of the previous matrix. */
void rf__backward_matrix_add(rf__backward_problem *problem, int64_t buffer, rf_backward_matrix matrix);
/* Returns true if sums are rounded stochastically; float32 is not. */
static inline bool rf__backward_rounds(const rf__backward_problem *problem) {
    return problem->stochastic_rounding && problem->dtype != RF_FLOAT32;
}
/* Returns true if a matrix and its states can be read and written by four columns at once; optimizer -1: a
 * gradient. */
bool rf__backward_aligned(const rf_backward_matrix *matrix, rf_dtype dtype, int32_t optimizer);

/* Approximate traffic of some features, if all features of a call have equally many lookups, for
 * explanations. */
typedef struct rf__backward_traffic {
    double columns; /* of grad */
    double lookups, lookup_elements; /* elements of grad that are added */
    double rows, row_elements; /* that have a lookup */
} rf__backward_traffic;
rf__backward_traffic rf__backward_traffic_less(rf__backward_traffic total, rf__backward_traffic part);
/* Adds to a launch the gradient that it reads, rows and states that epilogue.cuh reads and writes, and
 * operations. */
void rf__backward_traffic_add(const rf__backward_problem *problem, const rf__backward_traffic *traffic,
                              rf__kernel_launch *launch);

/* Elements of the features' descriptions. */
typedef struct rf__backward_features {
    rf_backward_feature *features; /* [n_features]; NULL once they are in an upload */
    int64_t rows; /* of all matrices */
    int64_t count; /* features that are of this launch */
    int32_t entries; /* RF_ENTRIES_... */
    bool any_mean, aligned;
    int32_t dim; /* the widest */
    rf_backward_segments segments;
    int32_t passes, digit_bits; /* of the sort */
    rf__backward_traffic traffic;
} rf__backward_features;

/* Describes features; the caller frees the result, also on failure. */
rf_status rf__backward_describe(const rf__backward_problem *problem, rf__backward_features *described);
/* Counts the features whose pooling is not -1, and their common properties: all except `rows` and `dim`. */
void rf__backward_summarise(const rf__backward_problem *problem, rf__backward_features *described);
/* Computes which features are sorted together, by how many digits of how many bits. */
void rf__backward_segment(const rf__backward_problem *problem, rf__backward_features *described);

/* Kernels. */
typedef enum rf__backward_kernel {
    RF__BACKWARD_BAG_FACTORS,
    RF__BACKWARD_KEYS,
    RF__BACKWARD_COUNT,
    RF__BACKWARD_PLACES,
    RF__BACKWARD_SORT,
    RF__BACKWARD_COUNT_ROWS,
    RF__BACKWARD_SUM_ROWS,
    RF__BACKWARD_SPLIT_ROWS,
    RF__BACKWARD_ROWS,
    RF__BACKWARD_JOINS,
    RF__BACKWARD_ROW_SPARSE,
    RF__BACKWARD_KERNELS
} rf__backward_kernel;

/* The specialisation of kernels; the code of a kernel does not depend on all of it. */
typedef struct rf__backward_variant {
    int32_t kernel; /* rf__backward_kernel */
    int32_t index_type, offset_type;
    int32_t wide_keys, wide_values; /* of 64 bits */
    int32_t digit_bits, items, entries; /* RF_ITEMS; RF_ENTRIES_... */
    int32_t grad_dtype, weight_dtype, epilogue, round, aligned;
    int32_t vectors; /* 0: the kernel knows */
    int32_t dynamic_shared;
} rf__backward_variant;

/* Adds a launch of which grid, shared memory and traffic are set. Arguments NULL: those of the launch
 * before. */
rf_status rf__backward_launch_add(rf__launches *launches, const rf__backward_variant *variant,
                                  rf__backward_kernel number, const rf__kernel_launch *launch,
                                  const void *arguments, size_t argument_bytes);

/* Lowers an update of rows from given sums. */
rf_status rf__rows_update_lower(const rf_rows_update_params *params, rf__launches *launches);

#endif
