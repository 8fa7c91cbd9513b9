/* Programs of embedding columns as the host reads them. A program may be hand-made: a call checks it before
 * it uses any number in it. */
#ifndef RECFUSE_BASE_COLUMNS_H
#define RECFUSE_BASE_COLUMNS_H

#include <string.h>

#include "core/validate.h"
#include "families/embedding_columns/device/column_program.h"

/* The arrays of a program, which they are parts of. */
typedef struct rf__columns {
    const rf_columns_header *header;
    const rf_columns_column *columns;
    const rf_columns_source *sources;
    const rf_columns_step *steps;
    const float *boundaries;
    const int64_t *vocabulary;
} rf__columns;

/* If the condition is true, fails with a text about column `at`; `operator_name` and `at` must be in scope. */
#define RF__REFUSE_COLUMN_IF(condition, code, text, ...) \
    RF__REFUSE_IF(condition, code, "column %d: " text, (int)at, __VA_ARGS__)

/* The type of a value between two steps; unknown: that of the input. */
typedef enum rf__column_kind { RF__COLUMN_UNKNOWN, RF__COLUMN_FLOAT, RF__COLUMN_INTEGER } rf__column_kind;

/* Reads a program's header, and checks that its arrays are inside its words. */
rf_status rf__columns_open(const int64_t *program, int64_t words, rf__columns *columns);
/* Checks that each number in the arrays is allowed. RF_ERR_VALUE names the column. */
rf_status rf__check_columns_program(const rf__columns *columns);
/* Also checks that steps can follow each other for all inputs. RF_ERR_TYPE names the column. */
rf_status rf__check_columns_kinds(const rf__columns *columns);
/* Checks the values of a source after its steps, for values of the type `input`: those of a table's column must
 * be integers. RF_ERR_TYPE names the column. */
rf_status rf__check_column_kind(const rf__columns *columns, int32_t at, int32_t source,
                                rf__column_kind input);
/* Opens the program of a call and checks everything except the contents of inputs; the output only if
 * `with_output`. */
rf_status rf__check_columns(const rf_embedding_columns_params *params, bool with_output,
                            rf__columns *columns);

/* Returns a digest of everything that rf__check_columns checks except pointers and the output's form; never
 * 0. The second returns true if such a call was valid before. */
uint64_t rf__columns_digest(const rf_embedding_columns_params *params, bool with_output,
                            const rf__columns *columns);
bool rf__columns_is_checked(uint64_t digest);
void rf__columns_remember(uint64_t digest);

/* Appends the tasks to a program that is otherwise complete: *words words, from malloc, which it reallocates;
 * fills in the header's fields of tasks, and `words`. On failure the caller still owns *program. */
rf_status rf__columns_tasks(int64_t **program, int64_t *words);

static inline float rf__columns_float(int64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float value;
    memcpy(&value, &low, sizeof value);
    return value;
}

#endif
