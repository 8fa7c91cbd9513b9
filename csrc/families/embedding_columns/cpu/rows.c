/* From values to addresses of rows, for some samples of all adjacent columns, and then from rows to the
 * output. */
#include "families/embedding_columns/cpu/rows.h"
#include "families/embedding_columns/cpu/columns_pool.h"

enum {
    SAMPLES = 64, /* at once: their rows stay in L1 and L2 from the one step to the other */
    MOST_ZEROS = 512, /* bytes of a row of zeros */
    SMALL_TABLE = 1 << 16, /* bytes: rows of larger tables are prefetched */
    MOST_CACHED = 1 << 24, /* bytes of output that the next operator may still find in caches */
};

static const char zeros[MOST_ZEROS] __attribute__((aligned(64)));

bool rf__column_copies(const rf__columns_call *call, const rf_columns_column *column) {
    const rf__columns *program = &call->program;
    if (column->buffer < 0 || column->n_dims == 0 || column->scale != 1.0f ||
        call->params->buffers[column->buffer].dtype != call->params->output_dtype)
        return false;
    if (program->sources[column->left].width != 1 ||
        (column->right >= 0 && program->sources[column->right].width != 1))
        return false;
    uint32_t fill;
    memcpy(&fill, &column->fill, sizeof fill);
    const bool fills = column->invalid < 0 && column->empty < 0;
    return !fills ||
           (fill == 0 && rf__elements_bytes(call->params->output_dtype, column->n_dims) <= MOST_ZEROS);
}

/* One column of those that are written together. */
typedef struct neighbour {
    rf__column column;
    const char *base, *fallback_row; /* row 0; the row copied for an invalid index */
    rf__row_format row;
    bool is_large;
} neighbour;

static neighbour neighbour_of(const rf__columns_call *call, int64_t number) {
    neighbour of = {.column = rf__column_of(call, number)};
    const rf_columns_column *column = of.column.column;
    const int64_t fallback = column->invalid >= 0 ? column->invalid : column->empty;
    of.base = rf__column_rows(call, column, &of.row);
    of.fallback_row = fallback >= 0 ? of.base + fallback * of.row.pitch : zeros;
    of.is_large = column->rows * of.row.pitch > SMALL_TABLE;
    return of;
}

static void find_offence(rf__columns_call *call, const rf__column *column, const int64_t *indices,
                         int64_t first, int64_t count) {
    if (column->column->invalid != RF_COLUMN_INVALID_ERROR || !call->params->check_bounds) return;
    for (int64_t i = 0; i < count; i++) {
        if ((uint64_t)indices[i] < (uint64_t)column->column->rows) continue;
        rf__columns_offend(call, &(rf__column_offence){.kind = RF__COLUMN_BAD_INDEX,
                                                       .column = column->number,
                                                       .sample = first + i,
                                                       .value = indices[i],
                                                       .limit = column->column->rows});
        return;
    }
}

static void find_rows(rf__columns_call *call, const neighbour *of, int64_t first, int64_t count,
                      const char **rows) {
    const rf__column *column = &of->column;
    rf__column_values values, right_values;
    call->kernels->values(&column->left, first, count, &values);
    if (column->right.input != NULL) {
        call->kernels->values(&column->right, first, count, &right_values);
        call->kernels->cross(values.integers, right_values.integers, count, column->column->cross_seed,
                             column->column->cross_buckets, values.integers);
    }
    if (!call->kernels->rows(values.integers, count, (uint64_t)column->column->rows, of->base, of->row.pitch,
                             of->fallback_row, rows))
        find_offence(call, column, values.integers, first, count);
    for (int64_t i = 0; i < count && of->is_large; i++) rf__ask_for(rows[i], of->row.bytes);
}

void rf__columns_copy(rf__columns_call *call, int64_t number, int64_t count, int64_t first, int64_t last) {
    const rf_embedding_columns_params *params = call->params;
    const int64_t output_pitch = call->output_row.pitch;
    neighbour neighbours[RF__COLUMN_NEIGHBOURS];
    const char *rows[RF__COLUMN_NEIGHBOURS * SAMPLES];
    for (int64_t c = 0; c < count; c++) neighbours[c] = neighbour_of(call, number + c);
    for (int64_t at = first; at < last; at += SAMPLES) {
        const int64_t samples = last - at < SAMPLES ? last - at : SAMPLES;
        for (int64_t c = 0; c < count; c++) find_rows(call, &neighbours[c], at, samples, rows + c * SAMPLES);
        for (int64_t c = 0, end; c < count; c = end) { /* those of one width together */
            for (end = c + 1; end < count && neighbours[end].row.bytes == neighbours[c].row.bytes; end++) {
            }
            const rf__column_copy copy = {.rows = rows + c * SAMPLES,
                                          .pitch = SAMPLES,
                                          .columns = end - c,
                                          .samples = samples,
                                          .bytes = neighbours[c].row.bytes,
                                          .output = rf__column_output(call, neighbours[c].column.column, at),
                                          .output_pitch = output_pitch,
                                          .stream = params->batch * output_pitch > MOST_CACHED};
            call->kernels->copy(&copy);
        }
    }
}
