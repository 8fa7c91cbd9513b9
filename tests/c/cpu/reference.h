/* The specification of a bag in double precision, and the comparison with the output of a kernel. */
#ifndef RECFUSE_TESTS_REFERENCE_H
#define RECFUSE_TESTS_REFERENCE_H

#include "check.h"

/* A table and its pooling. */
typedef struct table {
    const void *data; /* [rows, dim] of dtype, rows `stride` elements apart, any alignment */
    int64_t rows, dim, stride;
    rf_dtype dtype;
    rf_pooling pooling;
    int64_t padding_idx; /* -1: no padding */
} table;

/* The lookups [from, to) of a list: one bag. */
typedef struct bag {
    const void *indices;
    rf_int_type index_type;
    const float *sample_weights; /* may be NULL */
    int64_t from, to;
} bag;

/* Checks `output` [dim] of `output_dtype` against the bag; `label` names the case in a failure. */
void reference_check_bag(const table *from, const bag *of, const void *output, rf_dtype output_dtype,
                         const char *label);

#endif
