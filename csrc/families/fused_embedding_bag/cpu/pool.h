/* Shared by the operators, the scheduler and the kernels of a CPU call.
 *
 * A call pools `bags` bags of each of `n_features` features. It is cut into spans: runs of bags of one
 * feature, numbered feature by feature. Each worker thread takes blocks of adjacent spans from a shared
 * counter until all are taken, so that adjacent columns of the output stay with one thread. Only one worker
 * writes an output element, in an order that depends on its bag only: results do not depend on the number of
 * threads.
 */
#ifndef RECFUSE_CPU_POOL_H
#define RECFUSE_CPU_POOL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "recfuse.h"
#include "families/fused_backward/cpu/transpose.h"
#include "families/fused_backward/device/optimizer_steps.h"
#include "families/fused_embedding_bag/feature_rows.h"
#include "core/validate.h"

/* The first invalid value in the order of the spans. */
typedef struct rf__offence {
    enum { RF__BAD_INDEX, RF__BAD_OFFSET } kind;
    int64_t feature, bag, position, value, limit;
} rf__offence;

typedef struct rf__pool_call {
    const char *operator_name;
    const rf_buffer *buffers;
    const rf_feature *features; /* [n_features] */
    int64_t n_features;
    int64_t pitch; /* bytes between rows of a table; 0: rows are contiguous */
    int64_t bags;  /* a feature */
    const void *indices;
    const void *offsets;
    int64_t n_offsets; /* n_features * bags, or one more: without it the last bag ends at `lookups` */
    int64_t even_lookups; /* of each bag, if offsets is NULL */
    int64_t lookups;
    rf_int_type index_type, offset_type;
    const float *sample_weights; /* may be NULL */
    void *output;
    rf__row_format output_row;
    bool check_bounds;
    int32_t
        prefetch_distance; /* lookups between a prefetch and its use; 0: no prefetching, -1: the default */

    /* Set by rf__pool_run. */
    const struct rf__pool_kernels *kernels;
    int64_t span_bags;         /* bags a span, except for the last of a feature */
    int64_t spans_per_feature; /* spans = n_features * spans_per_feature */
    int64_t workers;
    int64_t block_spans;       /* spans a worker takes at once, at least */
    int64_t next_span;         /* atomic: the first span that is not taken */
    int64_t
        offending_span; /* atomic, written under `lock`: the least span with an offence; INT64_MAX: no offence */
    pthread_mutex_t lock;
    rf__offence offence; /* under `lock` */
} rf__pool_call;

/* One feature with its pointers resolved. */
typedef struct rf__table {
    const char *weight; /* row r starts at weight + r * row.pitch */
    const char *parameters; /* of row 0, if the table is quantised */
    rf__row_format row;
    uint64_t limit; /* valid indices are less; unsigned, so that negative ones are not */
    rf_pooling pooling;
    int64_t padding_idx; /* -1: no padding */
    int64_t feature;
    char *output; /* bag b's row starts at output + b * call->output_row.pitch */
} rf__table;

/* Adjacent cache lines that are prefetched one after another, some with each bag. */
typedef struct rf__sweep {
    uintptr_t at;
    int64_t lines; /* that are left */
    int64_t rate; /* lines a bag */
} rf__sweep;

/* A cursor that is `distance` lookups before the pooling, across the ends of spans and features. For each
 * lookup that the kernels pool, they move it by one lookup, and prefetch that lookup's row. Of a small quantised
 * table all lines are prefetched in order instead, while the span before is pooled. */
typedef struct rf__ahead {
    const char *weight;
    int64_t pitch;
    int64_t row_bytes;
    int64_t lines; /* cache lines per row, if each row begins with a line; 0: rows cross lines */
    int64_t position, end; /* lookups; all before `end` are of this table */
    const char *parameters; /* of row 0; NULL: none, or they need no prefetch of their own */
    int64_t parameters_pitch;
    bool swept; /* the kernels only move it: all lines of the table were prefetched with the span before */
    rf__sweep sweeps[2]; /* of the next span: its rows and its parameters */
} rf__ahead;

/* Moves to the next span with lookups; false if there is none yet. */
bool rf__ahead_next(rf__ahead *ahead);

/* Moves the cursor by `lookups`, into other spans too, and prefetches their rows. */
void rf__look_far(rf__ahead *ahead, int64_t lookups);

/* Pools bags [first, last) of a table whose offsets are valid. Returns false as soon as an index is not
 * less than the table's limit, without reading its row. The comparison is free, because the loop waits for
 * loads. */
typedef bool (*rf__pool_kernel)(const rf__pool_call *call, const rf__table *table, int64_t first,
                                int64_t last, rf__ahead *ahead);

/* RF__SUM: the plain sum or mean. RF__WEIGHTED: the same with sample weights or a padding index. */
enum { RF__SUM, RF__WEIGHTED, RF__MAX, RF__POOL_OPS };

/* Gradients. Writes the sum of elements of `grad`, from `source` on for each entry, times its factor, divided
 * by `divisor` unless that is 1, to `row` [dim] of the params' dtype. `end`: the end of all entries, for
 * prefetching. */
typedef void (*rf__row_kernel)(const rf_fused_backward_params *params, const rf__entry *first,
                               const rf__entry *last, const rf__entry *end, float divisor, char *row);
/* As above, for all rows of sorted entries without maxima and without a divisor: sums [distinct rows, dim] to
 * `values`, the rows' numbers from `first_row` on to `rows`. */
typedef void (*rf__rows_kernel)(const rf_fused_backward_params *params, const rf__entry *first,
                                const rf__entry *end, int64_t first_row, int64_t *rows, char *values);
/* As above, for entries with maxima among them: `number` is the row's in the weight. */
typedef void (*rf__mixed_row_kernel)(const rf_fused_backward_params *params, const rf__entry *first,
                                     const rf__entry *last, int64_t number, float divisor, char *row);

/* The numbers of an update, as its rows need them. */
typedef struct rf__step {
    float lr, weight_decay, eps, grad_scale;
    float one_minus_beta1, one_minus_beta2;
    float corrected_lr; /* Adam's, with both corrections */
    float number; /* RF_UPDATE_STEP */
    bool stochastic_rounding;
    uint64_t seed;
} rf__step;

/* Updates one row of a matrix, and its states, by `sum` [dim] of its gradients. */
typedef void (*rf__update_kernel)(const rf__step *step, const rf_update_matrix *matrix, int64_t row,
                                  const float *sum);

/* Writes the winners of a bag of pooling max: winners [dim], -1 if no lookup counts. */
typedef void (*rf__winners_kernel)(const rf_fused_embedding_bag_params *params, int64_t feature, int64_t bag,
                                   int64_t *winners);

/* Sum of the products of a gradient and a row of a table. `parameters`: of the row; NULL: it has floats. */
typedef float (*rf__dot_kernel)(const char *grad, rf_dtype grad_dtype, const char *row,
                                const char *parameters, const rf__row_format *format);

/* `count` elements, few at a time, as floats and back. */
typedef void (*rf__load_kernel)(const char *from, rf_dtype dtype, int64_t count, float *to);
typedef void (*rf__load_codes_kernel)(const char *from, rf_dtype dtype, const char *parameters,
                                      rf_dtype parameters_dtype, int64_t count, float *to);
typedef void (*rf__store_kernel)(char *to, rf_dtype dtype, int64_t count, const float *from);

typedef struct rf__pool_kernels {
    rf__pool_kernel pool[RF_INT4_ROWS + 1][2][RF__POOL_OPS]; /* [rf_dtype][rf_int_type][op] */
    rf__row_kernel sum_row[3]; /* [rf_dtype of grad] */
    rf__rows_kernel sum_rows[3];
    rf__mixed_row_kernel mixed_row;
    rf__update_kernel update_row[3][RF_OPTIMIZERS]; /* [rf_dtype of the matrix][rf_optimizer] */
    rf__winners_kernel winners;
    rf__dot_kernel dot_row;
    rf__load_kernel load;
    rf__load_codes_kernel load_codes;
    rf__store_kernel store;
} rf__pool_kernels;

extern const rf__pool_kernels rf__pool_avx512, rf__pool_avx2, rf__pool_neon, rf__pool_scalar;

/* Runs the call; the caller has checked everything but the contents of indices and offsets. */
rf_status rf__pool_run(rf__pool_call *call, const rf_executor *executor);

static inline int64_t rf__load_int(const void *array, rf_int_type type, int64_t at) {
    return type == RF_INT32 ? ((const int32_t *)array)[at] : ((const int64_t *)array)[at];
}

/* Returns true if lookups [from, to) are bag `number` of all bags of a call: the first begins with lookup 0.
 * As gpu/device/bags.cuh. */
static inline bool rf__is_bag(int64_t number, int64_t from, int64_t to, int64_t lookups) {
    return from >= 0 && from <= to && to <= lookups && (number != 0 || from == 0);
}

/* Returns the start of bag `bag` of feature `feature`; `bag` may be call->bags: the end of the last bag. */
static inline int64_t rf__bag_start(const rf__pool_call *call, int64_t feature, int64_t bag) {
    int64_t at = feature * call->bags + bag;
    if (call->offsets == NULL) return at * call->even_lookups;
    return at < call->n_offsets ? rf__load_int(call->offsets, call->offset_type, at) : call->lookups;
}

/* Prefetches a cache line into L2. Never waits; an invalid address is harmless. L2 and not L1, because a core
 * has far fewer slots for misses of L1 (24 on a Zen 4) than for those of L2, and drops prefetches when they
 * are taken; loads of the row from L2 overlap by themselves (MICRO'24, IV). */
static inline void rf__ask_for_line(uintptr_t address) { __builtin_prefetch((const void *)address, 0, 2); }

/* Counts lines, and compares no addresses: those of an invalid index may wrap round the address space. */
static inline void rf__ask_for(const char *row, int64_t bytes) {
    const uintptr_t offset = (uintptr_t)row & 63, line = (uintptr_t)row - offset;
    const uintptr_t lines = (offset + (uintptr_t)bytes + 63) / 64;
    for (uintptr_t i = 0; i < lines; i++) rf__ask_for_line(line + 64 * i);
}

#endif
