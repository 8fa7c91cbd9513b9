/* Programs of embedding columns as the host reads them. Whoever passes a program may have made it by hand: a call looks at
 * it before it follows any number in it. */
#ifndef RECFUSE_BASE_COLUMNS_H
#define RECFUSE_BASE_COLUMNS_H

#include <string.h>

#include "core/status.h"
#include "gpu/device/column_program.h"

/* The arrays of a program, which they are parts of. */
typedef struct rf__columns {
    const rf_columns_header *header;
    const rf_columns_column *columns;
    const rf_columns_source *sources;
    const rf_columns_step *steps;
    const float *boundaries;
    const int64_t *vocabulary;
} rf__columns;

/* Reads a program's header, and checks that its arrays lie within its words. */
rf_status rf__columns_open(const int64_t *program, int64_t words, rf__columns *columns);
/* Checks that each number in the arrays is allowed. RF_ERR_VALUE names the column. */
rf_status rf__check_columns_program(const rf__columns *columns);
/* And that steps can follow each other whatever the inputs are. RF_ERR_TYPE names the column. */
rf_status rf__check_columns_kinds(const rf__columns *columns);
/* Opens the program of a call and checks all but the contents of inputs; of the output only where it is `with_output`. */
rf_status rf__check_columns(const rf_embedding_columns_params *params, bool with_output,
                            rf__columns *columns);

/* Of all that rf__check_columns looks at besides pointers and the output's form; never 0. And whether such a call was found
 * right before. */
uint64_t rf__columns_digest(const rf_embedding_columns_params *params, bool with_output,
                            const rf__columns *columns);
bool rf__columns_is_known(uint64_t digest);
void rf__columns_remember(uint64_t digest);

/* Adds the tasks to a program that has all else: *words words, from malloc, which it makes longer; fills in the header's
 * fields of tasks, and `words`. On failure *program is still the caller's. */
rf_status rf__columns_tasks(int64_t **program, int64_t *words);

static inline float rf__columns_float(int64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float value;
    memcpy(&value, &low, sizeof value);
    return value;
}

#endif
