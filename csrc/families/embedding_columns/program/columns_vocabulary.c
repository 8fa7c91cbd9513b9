/* The vocabularies of a program: words in rising order, and steps that share them. */
#include "families/embedding_columns/program/columns_vocabulary.h"

#include <stdlib.h>

#include "core/validate.h"

static const char operator_name[] = "embedding_columns";

int64_t rf__columns_of_step(const rf_columns *from, int64_t step) {
    for (int64_t c = 0; c < from->n_columns; c++) {
        const int64_t sides[] = {from->columns[c].left, from->columns[c].right};
        for (int i = 0; i < 2; i++) {
            if (sides[i] < 0 || sides[i] >= from->n_sources) continue;
            const rf_column_source *source = &from->sources[sides[i]];
            if (step >= source->first_step && step - source->first_step < source->n_steps) return c;
        }
    }
    return -1;
}

typedef struct word {
    int64_t value, position;
} word;

static int word_compare(const void *first, const void *second) {
    const int64_t left = ((const word *)first)->value, right = ((const word *)second)->value;
    return (left > right) - (left < right);
}

rf_status rf__words_sort(const rf_columns *from, int64_t at, int64_t *sorted) {
    const rf_column_step *step = &from->steps[at];
    const int64_t count = step->b;
    rf_status status = RF_OK;
    word *words = calloc((size_t)count + 1, sizeof *words);
    RF__REFUSE_IF(words == NULL, RF_ERR_MEMORY, "no memory for " RF__I64 " words", count);
    for (int64_t i = 0; i < count; i++) words[i] = (word){from->vocabulary[step->a + i], i};
    qsort(words, (size_t)count, sizeof *words, word_compare);
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && words[i].value == words[i - 1].value)
            status = rf__fail(RF_ERR_VALUE,
                              "recfuse.%s: column " RF__I64 ": step " RF__I64 ": the word " RF__I64
                              " is in its vocabulary twice",
                              operator_name, rf__columns_of_step(from, at), at, words[i].value);
        sorted[i] = words[i].value;
        sorted[count + i] = words[i].position;
    }
    free(words);
    return status;
}

typedef struct word_range {
    int64_t first, count, step;
} word_range;

static int range_compare(const void *first, const void *second) {
    const word_range *a = first, *b = second;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->count != b->count) return a->count < b->count ? -1 : 1;
    return (a->step > b->step) - (a->step < b->step);
}

rf_status rf__words_find_owners(const rf_columns *from, int64_t **owners) {
    rf_status status = RF_OK;
    int64_t count = 0;
    word_range *ranges = calloc((size_t)from->n_steps + 1, sizeof *ranges);
    int64_t *owner_of_step = calloc((size_t)from->n_steps + 1, sizeof *owner_of_step);
    if (ranges == NULL || owner_of_step == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "recfuse.%s: no memory for " RF__I64 " steps", operator_name,
                          from->n_steps);
        goto out;
    }
    for (int64_t i = 0; i < from->n_steps; i++)
        if (rf__step_has_words(&from->steps[i]))
            ranges[count++] = (word_range){from->steps[i].a, from->steps[i].b, i};
    qsort(ranges, (size_t)count, sizeof *ranges, range_compare);
    for (int64_t i = 0; i < count; i++) {
        const bool is_equal =
            i > 0 && ranges[i].first == ranges[i - 1].first && ranges[i].count == ranges[i - 1].count;
        owner_of_step[ranges[i].step] = is_equal ? owner_of_step[ranges[i - 1].step] : ranges[i].step;
    }
    *owners = owner_of_step;
    owner_of_step = NULL;
out:
    free(owner_of_step);
    free(ranges);
    return status;
}
