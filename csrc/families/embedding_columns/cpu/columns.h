/* Shared by the files of embedding columns on the CPU.
 *
 * A source is an array of values, whose bags are the samples': value p of a dense source belongs to sample p
 * / width; those of a jagged source are between two offsets. Kernels prepare several values at a time. A
 * cursor converts them to rows of a table, for several samples at a time; the operators pool the rows
 * (columns.c) or return them (lookups.c).
 */
#ifndef RECFUSE_CPU_COLUMNS_H
#define RECFUSE_CPU_COLUMNS_H

#include <pthread.h>

#include "families/embedding_columns/program/columns_program.h"
#include "core/validate.h"
#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"

enum {
    RF__COLUMN_VALUES = 256, /* prepared at once, at most */
    RF__COLUMN_ROWS = 1024, /* that a cursor gives at once, at most */
    RF__COLUMN_BAGS = 256, /* of them, at most */
};

/* Prepared values: floats if `is_float`. */
typedef struct rf__column_values {
    bool is_float;
    float floats[RF__COLUMN_VALUES];
    int64_t integers[RF__COLUMN_VALUES];
} rf__column_values;

typedef struct rf__column_source {
    const rf_column_input *input;
    const rf_columns_step *steps; /* [n_steps] */
    int64_t n_steps, slot, width;
    int64_t batch;
    const float *boundaries;
    const int64_t *vocabulary;
} rf__column_source;

/* Rows of adjacent columns of one width: row rows[c * pitch + s] of column c follows that of the previous
 * column, from output + s * output_pitch on. */
typedef struct rf__column_copy {
    const char *const *rows;
    int64_t pitch, columns, samples;
    int64_t bytes; /* a row */
    char *output;
    int64_t output_pitch;
    bool stream; /* the output is more than caches hold */
} rf__column_copy;

/* The kernels of one instruction set. */
typedef struct rf__column_kernels {
    /* Values [from, from + count) of a source, count <= RF__COLUMN_VALUES. */
    void (*values)(const rf__column_source *source, int64_t from, int64_t count, rf__column_values *values);
    /* The buckets that pairs of integers hash to; may be written over either. */
    void (*cross)(const int64_t *left, const int64_t *right, int64_t count, uint64_t seed, int64_t buckets,
                  int64_t *indices);
    /* Converts indices to addresses of rows: base + pitch * index, or `otherwise` for an index that is not
     * less than the limit. Returns false if there was such an index. */
    bool (*rows)(const int64_t *indices, int64_t count, uint64_t limit, const char *base, int64_t pitch,
                 const char *otherwise, const char **rows);
    void (*copy)(const rf__column_copy *copy);
} rf__column_kernels;

extern const rf__column_kernels rf__column_avx512, rf__column_avx2, rf__column_plain;

/* The first offence: of the least column, sample and position. */
typedef struct rf__column_offence {
    enum { RF__COLUMN_BAD_INDEX, RF__COLUMN_BAD_OFFSET, RF__COLUMN_NO_MEMORY } kind;
    int64_t column, sample, position, value, limit;
    int64_t input; /* of an offset */
} rf__column_offence;

typedef struct rf__columns_call {
    const rf_embedding_columns_params *params;
    rf__columns program;
    const rf__column_kernels *kernels;
    const rf__pool_kernels *pool;
    rf__row_format output_row; /* a sample */
    pthread_mutex_t lock;
    bool has_offence; /* under `lock`, as the offence */
    rf__column_offence offence;
} rf__columns_call;

/* Checks and begins a call; the second ends it with the status of its first offence. */
rf_status rf__columns_begin(const rf_embedding_columns_params *params, bool with_output,
                            rf__columns_call *call);
rf_status rf__columns_end(rf__columns_call *call, rf_status status);
void rf__columns_offend(rf__columns_call *call, const rf__column_offence *offence);

/* Bytes that a sample of a column reads and writes, about. */
int64_t rf__columns_cost(const rf__columns_call *call, int64_t column);

/* A column with its pointers resolved. `right.input` is NULL without a cross. */
typedef struct rf__column {
    const rf_columns_column *column;
    int64_t number;
    rf__column_source left, right;
} rf__column;

rf__column rf__column_of(const rf__columns_call *call, int64_t number);

/* Returns the start of a sample's bag in a source; `sample` may be the batch. */
static inline int64_t rf__column_start(const rf__column_source *source, int64_t sample) {
    if (source->width > 0) return sample * source->width;
    return rf__load_int(source->input->offsets, source->input->offset_type,
                        source->slot * source->batch + sample);
}

/* Iterates over the rows of the lookups of a table's column. */
typedef struct rf__column_cursor {
    rf__columns_call *call;
    const rf__column *column;
    int64_t end;
    int64_t left_at, right_at; /* in a bag that is returned in pieces, its next pair of values */
    int64_t position, n_returned; /* previous pairs in that bag, and the rows returned for them */

    /* The last result: bags [first, last); rows [offsets[b - first], offsets[b - first + 1]) are bag b's. For
     * a bag that is too long: a piece, and whether more follow. */
    int64_t first, last;
    bool is_piece, has_more;
    int64_t n_rows;
    int64_t offsets[RF__COLUMN_BAGS + 1];
    int64_t rows[RF__COLUMN_ROWS];
    float weights[RF__COLUMN_ROWS]; /* if the column is weighted */
    int64_t left[RF__COLUMN_ROWS], right[RF__COLUMN_ROWS]; /* integers of the sources */
} rf__column_cursor;

/* Opens a cursor at samples [first, last). With invalid offsets, which become the call's offence, the cursor
 * is empty. */
void rf__column_cursor_open(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last,
                            rf__column_cursor *cursor);
/* False: all rows have been returned. */
bool rf__column_cursor_next(rf__column_cursor *cursor);
/* Checks the offsets of bags [first, last) of a column's sources; false: an invalid one is the call's
 * offence. */
bool rf__column_offsets_are_good(rf__columns_call *call, const rf__column *column, int64_t first,
                                 int64_t last);

#endif
