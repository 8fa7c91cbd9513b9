/* One column: rows pooled by the kernels of the other operators, or numeric values. */
#include "families/embedding_columns/cpu/columns_pool.h"

#include <math.h>
#include <stdlib.h>

enum {
    SCRATCH = 4096, /* floats on the stack: a row of more is on the heap */
    BLOCK = 64, /* floats that rows are added up in */
    SMALL_TABLE = 1 << 20, /* bytes: rows of larger tables are prefetched */
    PREFETCH_ROWS = 64, /* before they are pooled */
    BAGS_TOGETHER = 8, /* pooled before the next are prefetched */
};

static void write_numbers(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last) {
    const rf_dtype dtype = call->params->output_dtype;
    const int64_t width = column->left.width, end = last * width;
    rf__column_values values;
    for (int64_t at = first * width; at < end; at += RF__COLUMN_VALUES) {
        const int64_t count = end - at < RF__COLUMN_VALUES ? end - at : RF__COLUMN_VALUES;
        call->kernels->values(&column->left, at, count, &values);
        if (!values.is_float)
            for (int64_t i = 0; i < count; i++) values.floats[i] = (float)values.integers[i];
        for (int64_t i = 0; i < count;) { /* a sample after another */
            const int64_t sample = (at + i) / width, dim = at + i - sample * width;
            const int64_t n_values = width - dim < count - i ? width - dim : count - i;
            call->pool->store(rf__column_output(call, column->column, sample) +
                                  rf__elements_bytes(dtype, dim),
                              dtype, n_values, values.floats + i);
            i += n_values;
        }
    }
}

/* The divisor of the sum of rows. In float64, which holds the square of every float32. */
typedef struct divisor {
    double count, weights, squares;
} divisor;

static double divisor_of(const rf_columns_column *column, const divisor *of) {
    if (column->pooling == RF_COLUMN_MEAN) return column->weighted ? of->weights : of->count;
    if (column->pooling == RF_COLUMN_SQRTN) return sqrt(column->weighted ? of->squares : of->count);
    return 1.0;
}

static void divisor_add(divisor *of, const rf_columns_column *column, const float *weights, int64_t count) {
    of->count += (double)count;
    for (int64_t i = 0; i < count && column->weighted; i++) {
        of->weights += weights[i];
        of->squares += (double)weights[i] * weights[i];
    }
}

static void fill(const rf__columns_call *call, const rf_columns_column *column, int64_t sample, float *row) {
    for (int64_t d = 0; d < column->n_dims; d++) row[d] = column->fill;
    call->pool->store(rf__column_output(call, column, sample), call->params->output_dtype, column->n_dims,
                      row);
}

/* Writes a sum of rows [n_dims] in float32 as the column wants it. */
static void finish(const rf__columns_call *call, const rf_columns_column *column, double by, int64_t sample,
                   float *row) {
    const float divisor = (float)by;
    if (column->weighted && by != 1.0) { /* a divisor may have no float32 */
        for (int64_t d = 0; d < column->n_dims; d++) row[d] = (float)(row[d] / by);
    } else {
        for (int64_t d = 0; d < column->n_dims && divisor != 1.0f; d++) row[d] /= divisor;
    }
    for (int64_t d = 0; d < column->n_dims && column->scale != 1.0f; d++) row[d] *= column->scale;
    call->pool->store(rf__column_output(call, column, sample), call->params->output_dtype, column->n_dims,
                      row);
}

/* Pools `count` bags of the cursor's result, from `bag` on, into `output`. */
static void pool_bags(const rf__column_cursor *cursor, rf_pooling pooling, int64_t bag, int64_t count,
                      void *output, const rf__row_format *output_row) {
    const rf_columns_column *column = cursor->column->column;
    rf__row_format row;
    const char *weight = rf__column_rows(cursor->call, column, &row);
    const rf__pool_call call = {.indices = cursor->rows,
                                .offsets = cursor->offsets + bag,
                                .bags = count,
                                .n_offsets = count + 1,
                                .lookups = cursor->n_rows,
                                .index_type = RF_INT64,
                                .offset_type = RF_INT64,
                                .sample_weights = column->weighted ? cursor->weights : NULL,
                                .output_row = *output_row};
    const rf__table table = {.weight = weight,
                             .row = row,
                             .limit = UINT64_MAX,
                             .pooling = pooling,
                             .padding_idx = -1,
                             .output = output};
    const int op = pooling == RF_MAX ? RF__MAX : column->weighted ? RF__WEIGHTED : RF__SUM;
    const rf__pool_kernel pool = cursor->call->pool->pool[row.dtype][RF_INT64][op];
    if (column->rows * row.pitch <= SMALL_TABLE) {
        pool(&call, &table, 0, count, NULL);
        return;
    }
    const int64_t *offsets = cursor->offsets + bag;
    for (int64_t first = 0, prefetched = offsets[0]; first < count; first += BAGS_TOGETHER) {
        const int64_t last = count - first < BAGS_TOGETHER ? count : first + BAGS_TOGETHER;
        const int64_t end =
            offsets[count] - offsets[last] < PREFETCH_ROWS ? offsets[count] : offsets[last] + PREFETCH_ROWS;
        for (; prefetched < end; prefetched++)
            rf__ask_for(weight + cursor->rows[prefetched] * row.pitch, row.bytes);
        pool(&call, &table, first, last, NULL);
    }
}

static void write_bags(const rf__column_cursor *cursor, float *scratch, int64_t n_scratch) {
    const rf_columns_column *column = cursor->column->column;
    const int64_t bags = cursor->last - cursor->first, *offsets = cursor->offsets;
    const bool sums = column->weighted || column->pooling == RF_COLUMN_SQRTN || column->scale != 1.0f;
    if (!sums) {
        static const rf_pooling poolings[] = {RF_SUM, RF_MEAN, RF_MAX};
        pool_bags(cursor, poolings[column->pooling], 0, bags,
                  rf__column_output(cursor->call, column, cursor->first), &cursor->call->output_row);
    }
    const int64_t together = n_scratch / column->n_dims;
    const rf__row_format scratch_row = rf__contiguous_row(RF_FLOAT32, column->n_dims);
    for (int64_t bag = 0; bag < bags && sums; bag += together) {
        const int64_t count = bags - bag < together ? bags - bag : together;
        pool_bags(cursor, column->pooling == RF_COLUMN_MAX ? RF_MAX : RF_SUM, bag, count, scratch,
                  &scratch_row);
        for (int64_t b = 0; b < count; b++) {
            const int64_t from = offsets[bag + b], n_rows = offsets[bag + b + 1] - from;
            divisor of = {0};
            divisor_add(&of, column, cursor->weights + from, n_rows);
            if (n_rows > 0)
                finish(cursor->call, column, divisor_of(column, &of), cursor->first + bag + b,
                       scratch + b * column->n_dims);
        }
    }
    for (int64_t bag = 0; bag < bags && column->empty < 0; bag++)
        if (offsets[bag] == offsets[bag + 1]) fill(cursor->call, column, cursor->first + bag, scratch);
}

/* Adds the rows of a piece to `sum` [n_dims]; `count`: rows before them. */
static void add_piece(const rf__column_cursor *cursor, float *sum, int64_t count) {
    const rf_columns_column *column = cursor->column->column;
    rf__row_format format;
    const char *weight = rf__column_rows(cursor->call, column, &format);
    float row[BLOCK];
    for (int64_t r = 0; r < cursor->n_rows; r++, count++) {
        const int64_t number = cursor->rows[r];
        const float factor = column->weighted ? cursor->weights[r] : 1.0f;
        for (int64_t d = 0; d < column->n_dims; d += BLOCK) {
            const int64_t columns = column->n_dims - d < BLOCK ? column->n_dims - d : BLOCK;
            cursor->call->pool->load(weight + rf__row_offset(&format, number, d), format.dtype, columns, row);
            for (int64_t i = 0; i < columns; i++) {
                if (column->pooling != RF_COLUMN_MAX)
                    sum[d + i] += factor * row[i];
                else if (count == 0 || row[i] > sum[d + i])
                    sum[d + i] = row[i];
            }
        }
    }
}

static void write_table(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last) {
    const int64_t n_dims = column->column->n_dims;
    float on_stack[SCRATCH], *on_heap = NULL, *scratch = on_stack;
    divisor of = {0};
    int64_t count = 0;
    rf__column_cursor cursor;
    if (n_dims > SCRATCH) {
        scratch = on_heap = malloc((size_t)n_dims * sizeof *on_heap);
        if (on_heap == NULL) {
            rf__columns_offend(call, &(rf__column_offence){.kind = RF__COLUMN_NO_MEMORY,
                                                           .column = column->number,
                                                           .sample = first,
                                                           .value = n_dims});
            return;
        }
    }
    rf__column_cursor_open(call, column, first, last, &cursor);
    while (rf__column_cursor_next(&cursor)) {
        if (n_dims == 0) continue; /* contents are checked all the same */
        if (!cursor.is_piece) {
            write_bags(&cursor, scratch, n_dims > SCRATCH ? n_dims : SCRATCH);
            continue;
        }
        if (count == 0) {
            for (int64_t d = 0; d < n_dims; d++) scratch[d] = 0;
            of = (divisor){0};
        }
        add_piece(&cursor, scratch, count);
        divisor_add(&of, column->column, cursor.weights, cursor.n_rows);
        count += cursor.n_rows;
        if (cursor.has_more) continue;
        if (count > 0) {
            finish(call, column->column, divisor_of(column->column, &of), cursor.first, scratch);
        } else {
            fill(call, column->column, cursor.first, scratch);
        }
        count = 0;
    }
    free(on_heap);
}

void rf__column_write(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last) {
    if (column->column->buffer < 0) {
        write_numbers(call, column, first, last);
    } else {
        write_table(call, column, first, last);
    }
}
