/* Checks of a program of embedding columns. */
#include "families/embedding_columns/program/columns_program.h"
#include "core/validate.h"

#include <stddef.h>

static const char operator_name[] = "embedding_columns";

/* An array of `count` elements at a word of the program. */
static bool is_inside(int64_t words, int64_t at, int64_t count, int64_t bytes) {
    return at >= 0 && at % 2 == 0 && at <= words && count >= 0 && count <= INT32_MAX &&
           count * bytes <= (words - at) * (int64_t)sizeof(int64_t);
}

rf_status rf__columns_open(const int64_t *program, int64_t words, rf__columns *columns) {
    const rf_columns_header *header = (const rf_columns_header *)program;
    RF__REFUSE_IF(program == NULL, RF_ERR_VALUE, "%s", "program is NULL; expected a pointer to its words");
    RF__REFUSE_IF(words * (int64_t)sizeof *program < (int64_t)sizeof *header ||
                      header->magic != RF_COLUMNS_MAGIC || header->words != words,
                  RF_ERR_VALUE,
                  "program [" RF__I64
                  "] is no whole program of this version. Make it with rf_embedding_columns_program.",
                  words);
    RF__REFUSE_IF(!is_inside(words, header->columns_at, header->n_columns, sizeof(rf_columns_column)) ||
                      !is_inside(words, header->sources_at, header->n_sources, sizeof(rf_columns_source)) ||
                      !is_inside(words, header->steps_at, header->n_steps, sizeof(rf_columns_step)) ||
                      !is_inside(words, header->boundaries_at, header->n_boundaries, sizeof(float)) ||
                      !is_inside(words, header->vocabulary_at, header->n_vocabulary, sizeof(int64_t)),
                  RF_ERR_VALUE, "%s",
                  "program has arrays beyond its words, so it was changed after it was made");
    *columns = (rf__columns){.header = header,
                             .columns = (const rf_columns_column *)(program + header->columns_at),
                             .sources = (const rf_columns_source *)(program + header->sources_at),
                             .steps = (const rf_columns_step *)(program + header->steps_at),
                             .boundaries = (const float *)(program + header->boundaries_at),
                             .vocabulary = program + header->vocabulary_at};
    return RF_OK;
}

static bool is_range(int64_t first, int64_t count, int64_t total) {
    return first >= 0 && count >= 0 && first <= total && count <= total - first;
}

static rf_status check_step(const rf__columns *columns, int32_t at, int32_t number) {
    const rf_columns_step *step = &columns->steps[number];
    const rf_columns_header *header = columns->header;
    switch (step->operation) {
    case RF_COLUMN_AFFINE:
    case RF_COLUMN_LOG1P:
    case RF_COLUMN_CLIP:
    case RF_COLUMN_CAST:
    case RF_COLUMN_CLIP_INTEGER:
        return RF_OK;
    case RF_COLUMN_MODULO:
        RF__REFUSE_COLUMN_IF(step->a < 1, RF_ERR_VALUE,
                             "step %d is modulo " RF__I64 "; expected a divisor of 1 or more", (int)number,
                             step->a);
        return RF_OK;
    case RF_COLUMN_BUCKETIZE:
    case RF_COLUMN_BUCKETIZE_RIGHT:
        RF__REFUSE_COLUMN_IF(
            !is_range(step->a, step->count, header->n_boundaries) || (step->b != 0 && step->count < 2),
            RF_ERR_VALUE,
            "step %d has %d boundaries from " RF__I64 " on; expected a part of the " RF__I64 " that exist",
            (int)number, (int)step->count, step->a, header->n_boundaries);
        return RF_OK;
    case RF_COLUMN_HASH:
        RF__REFUSE_COLUMN_IF(step->count < 1, RF_ERR_VALUE,
                             "step %d hashes to %d buckets; expected 1 to 2^31 - 1", (int)number,
                             (int)step->count);
        return RF_OK;
    case RF_COLUMN_VOCABULARY:
        RF__REFUSE_COLUMN_IF(!is_range(step->a, 2 * (int64_t)step->count, header->n_vocabulary), RF_ERR_VALUE,
                             "step %d has a vocabulary of %d words beyond those that there are", (int)number,
                             (int)step->count);
        return RF_OK;
    default:
        return rf__fail(
            RF_ERR_VALUE,
            "recfuse.%s: column %d: step %d has operation %d; expected 0 (affine) to %d (vocabulary)",
            operator_name, (int)at, (int)number, (int)step->operation, (int)RF_COLUMN_VOCABULARY);
    }
}

static rf_status check_source(const rf__columns *columns, int32_t at, int32_t number) {
    const rf_columns_header *header = columns->header;
    RF__REFUSE_COLUMN_IF(number < 0 || number >= header->n_sources, RF_ERR_VALUE,
                         "its source is %d; expected one of " RF__I64 " sources", (int)number,
                         header->n_sources);
    const rf_columns_source *source = &columns->sources[number];
    RF__REFUSE_COLUMN_IF(source->input < 0 || source->slot < 0 || source->width < 0, RF_ERR_VALUE,
                         "its source has input %d, slot %d and width %d; expected 0 or more",
                         (int)source->input, (int)source->slot, (int)source->width);
    RF__REFUSE_COLUMN_IF(!is_range(source->first_step, source->n_steps, header->n_steps), RF_ERR_VALUE,
                         "its source has %d steps from %d on; expected a part of the " RF__I64 " that exist",
                         (int)source->n_steps, (int)source->first_step, header->n_steps);
    for (int32_t s = 0; s < source->n_steps; s++) RF_CHECK(check_step(columns, at, source->first_step + s));
    return RF_OK;
}

static rf_status check_numeric(const rf__columns *columns, int32_t at) {
    const rf_columns_column *column = &columns->columns[at];
    const int32_t width = columns->sources[column->left].width;
    RF__REFUSE_COLUMN_IF(width < 1, RF_ERR_VALUE, "%s",
                         "it is numeric with a jagged source; expected a dense source");
    RF__REFUSE_COLUMN_IF(
        column->first_dim != 0 || column->n_dims != width, RF_ERR_VALUE,
        "it is numeric and writes %d columns from %d on; expected the %d values of its source",
        (int)column->n_dims, (int)column->first_dim, (int)width);
    RF__REFUSE_COLUMN_IF(column->right != -1 || column->weighted != 0 || column->table != -1, RF_ERR_VALUE,
                         "%s", "it is numeric, which neither crosses nor weighs");
    return RF_OK;
}

static rf_status check_table(const rf__columns *columns, int32_t at) {
    const rf_columns_column *column = &columns->columns[at];
    const bool crosses = column->right != -1;
    int64_t size;
    if (crosses) RF_CHECK(check_source(columns, at, column->right));
    RF__REFUSE_COLUMN_IF(crosses ? column->cross_buckets < 1 : column->cross_buckets != 0, RF_ERR_VALUE,
                         "cross_buckets is %d; expected %s", (int)column->cross_buckets,
                         crosses ? "1 to 2^31 - 1 for a cross" : "0 where there is no cross");
    RF__REFUSE_COLUMN_IF(
        column->rows < 0 || column->dim < 0 || column->weight_offset < 0 ||
            __builtin_mul_overflow(column->rows, column->dim, &size) ||
            __builtin_add_overflow(column->weight_offset, size, &size) || size > INT64_MAX / 4,
        RF_ERR_VALUE,
        "its table is " RF__I64 " x %d at element " RF__I64 "; expected sizes of 0 or more that fit in int64",
        column->rows, (int)column->dim, column->weight_offset);
    RF__REFUSE_COLUMN_IF(column->first_dim < 0 || column->n_dims < 0 || column->first_dim > column->dim ||
                             column->n_dims > column->dim - column->first_dim,
                         RF_ERR_VALUE,
                         "it writes %d columns from %d on; expected a part of the %d of its table",
                         (int)column->n_dims, (int)column->first_dim, (int)column->dim);
    RF__REFUSE_COLUMN_IF(column->pooling < RF_COLUMN_SUM || column->pooling > RF_COLUMN_SQRTN, RF_ERR_VALUE,
                         "pooling is %d; expected 0 (sum), 1 (mean), 2 (max), 3 (sqrtn)",
                         (int)column->pooling);
    RF__REFUSE_COLUMN_IF(
        column->weighted != 0 && (column->weighted != 1 || crosses || column->pooling == RF_COLUMN_MAX ||
                                  columns->sources[column->left].width != 0),
        RF_ERR_VALUE, "weighted is %d; expected 0, or 1 with a jagged source, without cross and max",
        (int)column->weighted);
    RF__REFUSE_COLUMN_IF(
        column->invalid < RF_COLUMN_INVALID_ERROR || column->invalid >= column->rows ||
            column->empty < RF_COLUMN_EMPTY_FILL || column->empty >= column->rows,
        RF_ERR_VALUE,
        "invalid is " RF__I64 " and empty " RF__I64
        "; expected -2 (an error) or -1 (dropped) for invalid, -1 (filled) for empty, or a row of " RF__I64,
        column->invalid, column->empty, column->rows);
    return RF_OK;
}

/* Finds the type of a source's values after its steps. */
static rf_status kind_of(const rf__columns *columns, int32_t at, int32_t number, rf__column_kind input,
                         rf__column_kind *kind) {
    const rf_columns_source *source = &columns->sources[number];
#define TEXT(name, text) [name] = text,
    static const char *const names[] = {RF_COLUMN_STEP_LIST(TEXT)};
#undef TEXT
    *kind = input;
    for (int32_t s = 0; s < source->n_steps; s++) {
        const rf_columns_step *step = &columns->steps[source->first_step + s];
        switch (step->operation) {
        case RF_COLUMN_AFFINE:
        case RF_COLUMN_LOG1P:
        case RF_COLUMN_CLIP:
            *kind = RF__COLUMN_FLOAT;
            break;
        case RF_COLUMN_CAST:
        case RF_COLUMN_BUCKETIZE:
        case RF_COLUMN_BUCKETIZE_RIGHT:
            *kind = RF__COLUMN_INTEGER;
            break;
        default:
            RF__REFUSE_COLUMN_IF(*kind == RF__COLUMN_FLOAT, RF_ERR_TYPE,
                                 "%s takes integers, and its values are float32 there. Cast them first.",
                                 names[step->operation]);
            *kind = RF__COLUMN_INTEGER;
        }
    }
    return RF_OK;
}

rf_status rf__check_column_kind(const rf__columns *columns, int32_t at, int32_t source,
                                rf__column_kind input) {
    rf__column_kind kind;
    RF_CHECK(kind_of(columns, at, source, input, &kind));
    RF__REFUSE_COLUMN_IF(
        kind == RF__COLUMN_FLOAT && columns->columns[at].buffer >= 0, RF_ERR_TYPE, "%s",
        "its values are float32 after all steps, and rows are looked up by integers. Cast or "
        "bucketize them.");
    return RF_OK;
}

static rf_status check_column(const rf__columns *columns, int32_t at, int64_t *output_column,
                              int32_t *table) {
    const rf_columns_column *column = &columns->columns[at];
    const bool is_numeric = column->buffer == -1;
    RF_CHECK(check_source(columns, at, column->left));
    RF__REFUSE_COLUMN_IF(column->buffer < -1, RF_ERR_VALUE,
                         "buffer is %d; expected -1 (numeric) or one of the buffers", (int)column->buffer);
    RF_CHECK(is_numeric ? check_numeric(columns, at) : check_table(columns, at));
    RF__REFUSE_COLUMN_IF(column->output_column != *output_column, RF_ERR_VALUE,
                         "output_column is %d; expected " RF__I64 ", where the column before ends",
                         (int)column->output_column, *output_column);
    RF__REFUSE_COLUMN_IF(!is_numeric && column->table != *table, RF_ERR_VALUE, "table is %d; expected %d",
                         (int)column->table, (int)*table);
    *output_column += column->n_dims;
    *table += !is_numeric;
    return RF_OK;
}

rf_status rf__check_columns_program(const rf__columns *columns) {
    const rf_columns_header *header = columns->header;
    int64_t output_column = 0;
    int32_t table = 0;
    for (int32_t at = 0; at < header->n_columns; at++)
        RF_CHECK(check_column(columns, at, &output_column, &table));
    RF__REFUSE_IF(header->output_dim != output_column || header->n_tables != table, RF_ERR_VALUE,
                  "program has " RF__I64 " columns of output and " RF__I64 " tables; expected " RF__I64
                  " and %d, as its columns have",
                  header->output_dim, header->n_tables, output_column, (int)table);
    return RF_OK;
}

rf_status rf__check_columns_kinds(const rf__columns *columns) {
    for (int32_t at = 0; at < columns->header->n_columns; at++) {
        const rf_columns_column *column = &columns->columns[at];
        RF_CHECK(rf__check_column_kind(columns, at, column->left, RF__COLUMN_UNKNOWN));
        if (column->right >= 0)
            RF_CHECK(rf__check_column_kind(columns, at, column->right, RF__COLUMN_UNKNOWN));
    }
    return RF_OK;
}
