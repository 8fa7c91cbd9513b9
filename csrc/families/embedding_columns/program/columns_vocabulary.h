/* The vocabularies of the steps that rf_embedding_columns_program writes. */
#ifndef RECFUSE_COLUMNS_VOCABULARY_H
#define RECFUSE_COLUMNS_VOCABULARY_H

#include "core/status.h"

/* Returns the column of a step, for messages, or -1. */
int64_t rf__columns_of_step(const rf_columns *from, int64_t step);

static inline bool rf__step_has_words(const rf_column_step *step) {
    return step->operation == RF_COLUMN_VOCABULARY;
}

/* Writes the words of step `at` in rising order to `sorted` [count], then their positions [count]. RF_ERR_VALUE:
 * a word occurs twice. */
rf_status rf__words_sort(const rf_columns *from, int64_t at, int64_t *sorted);

/* Sets *owners [n_steps], which the caller frees: for each step with words the first step with equal words, which
 * are stored once. */
rf_status rf__words_find_owners(const rf_columns *from, int64_t **owners);

#endif
