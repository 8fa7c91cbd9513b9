/* rf_embedding_columns_program: columns to the words that calls read. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "families/embedding_columns/program/columns_program.h"
#include "families/embedding_columns/program/columns_vocabulary.h"
#include "core/validate.h"

static const char operator_name[] = "embedding_columns";

/* Equidistant boundaries may deviate by at most this fraction of their distance. With the errors of
 * rf_column_bucket_even, below 0.02 for this many, all boundaries except the nearest are clearly on one side
 * of a value. */
#define MOST_UNEVEN 0.2
enum { MOST_EVEN = 65536 };

/* Returns the start of an array of a program; advances *words past it, to a multiple of two. */
static int64_t lay_out(int64_t *words, int64_t count, int64_t bytes) {
    const int64_t at = *words;
    *words = rf__round_up(at + (count * bytes + 7) / 8, 2);
    return at;
}

#define REFUSE_STEP_IF(condition, text, ...)                                              \
    RF__REFUSE_IF(condition, RF_ERR_VALUE, "column " RF__I64 ": step " RF__I64 ": " text, \
                  rf__columns_of_step(from, at), at, __VA_ARGS__)

static rf_status check_boundaries(const rf_columns *from, int64_t at) {
    const rf_column_step *step = &from->steps[at];
    REFUSE_STEP_IF(step->a < 0 || step->b < 0 || step->b > INT32_MAX || step->a > from->n_boundaries ||
                       step->b > from->n_boundaries - step->a,
                   "it has " RF__I64 " boundaries from " RF__I64 " on; expected a part of the " RF__I64
                   " that exist",
                   step->b, step->a, from->n_boundaries);
    const float *boundaries = from->boundaries + step->a;
    for (int64_t i = 0; i < step->b; i++)
        REFUSE_STEP_IF(isnan(boundaries[i]) || (i > 0 && boundaries[i] < boundaries[i - 1]),
                       "boundary " RF__I64 " is %g; expected boundaries that never decrease, and no NaN", i,
                       (double)boundaries[i]);
    return RF_OK;
}

/* Returns the bits of rf_column_bucket_even's argument; 0: the boundaries are not equidistant. */
static int64_t even_inverse(const float *boundaries, int64_t count) {
    if (count < 2 || count > MOST_EVEN) return 0;
    const double first = boundaries[0],
                 distance = ((double)boundaries[count - 1] - first) / (double)(count - 1);
    const float inverse = (float)(1 / distance);
    if (!isfinite(boundaries[count - 1] - boundaries[0]) || !(distance > 0) || !isnormal(inverse)) return 0;
    for (int64_t i = 0; i < count; i++)
        if (fabs(boundaries[i] - (first + distance * (double)i)) > MOST_UNEVEN * distance) return 0;
    uint32_t bits;
    memcpy(&bits, &inverse, sizeof bits);
    return bits;
}

static rf_status check_words(const rf_columns *from, int64_t at) {
    const rf_column_step *step = &from->steps[at];
    REFUSE_STEP_IF(step->a < 0 || step->b < 0 || step->b > INT32_MAX / 2 || step->a > from->n_vocabulary ||
                       step->b > from->n_vocabulary - step->a,
                   "it has " RF__I64 " words from " RF__I64 " on; expected a part of the " RF__I64
                   " that exist",
                   step->b, step->a, from->n_vocabulary);
    return RF_OK;
}

static rf_status write_step(const rf_columns *from, const int64_t *owners, int64_t at, rf_columns_step *steps,
                            int64_t *vocabulary, int64_t *n_vocabulary) {
    const rf_column_step *step = &from->steps[at];
    rf_columns_step *to = &steps[at];
    *to = (rf_columns_step){.operation = (int32_t)step->operation, .a = step->a, .b = step->b};
    REFUSE_STEP_IF(step->operation < 0 || step->operation > RF_COLUMN_VOCABULARY,
                   "operation is " RF__I64 "; expected 0 (affine) to %d (vocabulary)", step->operation,
                   (int)RF_COLUMN_VOCABULARY);
    if (step->operation == RF_COLUMN_HASH) {
        REFUSE_STEP_IF(step->a < 1 || step->a > INT32_MAX,
                       "it hashes to " RF__I64 " buckets; expected 1 to 2^31 - 1", step->a);
        to->count = (int32_t)step->a;
    } else if (step->operation == RF_COLUMN_BUCKETIZE || step->operation == RF_COLUMN_BUCKETIZE_RIGHT) {
        to->count = (int32_t)step->b;
        to->b = even_inverse(from->boundaries + step->a, step->b);
    } else if (rf__step_has_words(step)) {
        to->count = (int32_t)step->b;
        to->a = owners[at] < at ? steps[owners[at]].a : *n_vocabulary;
        if (owners[at] < at) return RF_OK;
        RF_CHECK(rf__words_sort(from, at, vocabulary + to->a));
        *n_vocabulary += 2 * step->b;
    }
    return RF_OK;
}

/* A number that programs keep in 32 bits. */
static rf_status narrow_to_int32(const char *list, int64_t number, const char *field, int64_t value,
                                 int32_t *to) {
    RF__REFUSE_IF(value < INT32_MIN || value > INT32_MAX, RF_ERR_VALUE,
                  "%s " RF__I64 ": %s is " RF__I64 ", which does not fit in 32 bits", list, number, field,
                  value);
    *to = (int32_t)value;
    return RF_OK;
}

static rf_status write_source(const rf_columns *from, int64_t at, rf_columns_source *to) {
    const rf_column_source *source = &from->sources[at];
#define NARROW(field) RF_CHECK(narrow_to_int32("source", at, #field, source->field, &to->field))
    NARROW(input);
    NARROW(slot);
    NARROW(width);
    NARROW(first_step);
    NARROW(n_steps);
#undef NARROW
    return RF_OK;
}

static rf_status write_column(const rf_columns *from, int64_t at, rf_columns_column *to, int64_t *n_tables) {
    const rf_column *column = &from->columns[at];
    *to = (rf_columns_column){.weight_offset = column->weight_offset,
                              .rows = column->rows,
                              .invalid = column->invalid,
                              .empty = column->empty,
                              .cross_seed = (uint64_t)column->cross_seed,
                              .fill = rf__columns_float(column->fill),
                              .scale = rf__columns_float(column->scale),
                              .table = column->buffer == -1 ? -1 : (int32_t)(*n_tables)++,
                              .number = (int32_t)at};
#define NARROW(field) RF_CHECK(narrow_to_int32("column", at, #field, column->field, &to->field))
    NARROW(left);
    NARROW(right);
    NARROW(cross_buckets);
    NARROW(buffer);
    NARROW(dim);
    NARROW(pooling);
    NARROW(weighted);
    NARROW(first_dim);
    NARROW(n_dims);
    NARROW(output_column);
#undef NARROW
    return RF_OK;
}

static rf_status write_program(const rf_columns *from, const int64_t *owners, const rf__columns *to,
                               rf_columns_header *header) {
    for (int64_t i = 0; i < from->n_boundaries; i++) ((float *)to->boundaries)[i] = from->boundaries[i];
    for (int64_t i = 0; i < from->n_steps; i++)
        RF_CHECK(write_step(from, owners, i, (rf_columns_step *)to->steps, (int64_t *)to->vocabulary,
                            &header->n_vocabulary));
    for (int64_t i = 0; i < from->n_sources; i++)
        RF_CHECK(write_source(from, i, (rf_columns_source *)&to->sources[i]));
    for (int64_t i = 0; i < from->n_columns; i++) {
        RF_CHECK(write_column(from, i, (rf_columns_column *)&to->columns[i], &header->n_tables));
        header->output_dim += to->columns[i].n_dims;
    }
    RF_CHECK(rf__check_columns_program(to));
    return rf__check_columns_kinds(to);
}

static rf_status check_arrays(const rf_columns *from) {
    const struct {
        const char *name;
        const void *data;
        int64_t count;
    } arrays[] = {{"columns", from->columns, from->n_columns},
                  {"sources", from->sources, from->n_sources},
                  {"steps", from->steps, from->n_steps},
                  {"boundaries", from->boundaries, from->n_boundaries},
                  {"vocabulary", from->vocabulary, from->n_vocabulary}};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        RF__REFUSE_IF(arrays[i].count < 0 || arrays[i].count > INT32_MAX / 2, RF_ERR_VALUE,
                      "the number of %s is " RF__I64 "; expected 0 to 2^30 - 1", arrays[i].name,
                      arrays[i].count);
        RF__REFUSE_IF(arrays[i].count > 0 && arrays[i].data == NULL, RF_ERR_VALUE,
                      "%s is NULL; expected a pointer to its elements", arrays[i].name);
    }
    return RF_OK;
}

/* *words: of all vocabularies, each once, with places. */
static rf_status check_contents(const rf_columns *from, const int64_t *owners, int64_t *words) {
    *words = 0;
    for (int64_t at = 0; at < from->n_steps; at++) {
        const rf_column_step *step = &from->steps[at];
        if (step->operation == RF_COLUMN_BUCKETIZE || step->operation == RF_COLUMN_BUCKETIZE_RIGHT)
            RF_CHECK(check_boundaries(from, at));
        if (!rf__step_has_words(step)) continue;
        RF_CHECK(check_words(from, at));
        if (owners[at] == at) *words += 2 * step->b;
    }
    RF__REFUSE_IF(*words > INT32_MAX, RF_ERR_VALUE,
                  "vocabularies have " RF__I64 " words; expected up to 2^30 - 1", *words / 2);
    return RF_OK;
}

rf_status rf_embedding_columns_program(const rf_columns *columns, int64_t **program, int64_t *words) {
    rf_status status = RF_OK;
    int64_t *laid = NULL, *owners = NULL, n_vocabulary = 0, size = 0;
    rf__columns view;
    *program = NULL;
    *words = 0;
    RF_CHECK(check_arrays(columns));
    RF_CHECK(rf__words_find_owners(columns, &owners));
    RF_TRY(check_contents(columns, owners, &n_vocabulary));
    rf_columns_header header = {.magic = RF_COLUMNS_MAGIC,
                                .n_columns = columns->n_columns,
                                .n_sources = columns->n_sources,
                                .n_steps = columns->n_steps,
                                .n_boundaries = columns->n_boundaries};
    lay_out(&size, 1, sizeof header);
    header.columns_at = lay_out(&size, columns->n_columns, sizeof(rf_columns_column));
    header.sources_at = lay_out(&size, columns->n_sources, sizeof(rf_columns_source));
    header.steps_at = lay_out(&size, columns->n_steps, sizeof(rf_columns_step));
    header.boundaries_at = lay_out(&size, columns->n_boundaries, sizeof(float));
    header.vocabulary_at = lay_out(&size, n_vocabulary, sizeof(int64_t));
    header.tasks_at = header.words = size;
    laid = calloc((size_t)size, sizeof *laid);
    if (laid == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "recfuse.%s: no memory for a program of " RF__I64 " words",
                          operator_name, size);
        goto out;
    }
    memcpy(laid, &header, sizeof header);
    RF_TRY(rf__columns_open(laid, size, &view));
    RF_TRY(write_program(columns, owners, &view, (rf_columns_header *)laid));
    RF_TRY(rf__columns_tasks(&laid, &size));
    *program = laid;
    *words = size;
    laid = NULL;
out:
    free(owners);
    free(laid);
    return status;
}

void rf_embedding_columns_program_free(int64_t *program) { free(program); }
