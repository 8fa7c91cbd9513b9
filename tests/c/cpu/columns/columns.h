/* Random programs of embedding columns with their batches, and their expected results by definition. */
#ifndef RECFUSE_TESTS_COLUMNS_H
#define RECFUSE_TESTS_COLUMNS_H

#include "check.h"

enum {
    MOST_TABLES = 2,
    MOST_INPUTS = 4,
    MOST_SOURCES = 6,
    MOST_STEPS = 24,
    MOST_COLUMNS = 40,
    MOST_BATCH = 300,
    N_BOUNDARIES = 300,
    N_VOCABULARY = 60,
    MOST_BAG = 4000 /* lookups of a column's sample */
};

/* Each array ends at an inaccessible page. */
typedef struct columns_memory {
    region tables[MOST_TABLES], values[MOST_INPUTS], offsets[MOST_INPUTS], weights[MOST_INPUTS];
    region program, output;
} columns_memory;

columns_memory columns_memory_new(void);
void columns_memory_free(columns_memory *memory);

/* A call and all of its arrays. */
typedef struct columns_case {
    rf_embedding_columns_params params;
    rf_columns written;
    rf_column columns[MOST_COLUMNS];
    rf_column_source sources[MOST_SOURCES];
    rf_column_step steps[MOST_STEPS];
    float boundaries[N_BOUNDARIES];
    int64_t vocabulary[N_VOCABULARY];
    rf_buffer buffers[MOST_TABLES];
    rf_column_input inputs[MOST_INPUTS];
    size_t output_bytes;
} columns_case;

enum { UNWRITTEN = 0xa5 }; /* every byte of the output before a call */

/* Draws a valid call, except that indices may be invalid if that is an error. Returns false, and reports it,
 * if no program was created. */
bool columns_draw(randomness *random, const columns_memory *memory, columns_case *call);

/* The lookups of a sample in a column of a table. */
typedef struct columns_bag {
    int64_t count;
    int64_t rows[MOST_BAG];
    double weights[MOST_BAG];
} columns_bag;

typedef struct columns_offence {
    bool found;
    int64_t column, sample, position, index;
} columns_offence;

/* Writes the lookups of a sample, without those of empty bags. Sets `offence` to the first invalid index
 * unless it is set. */
void columns_reference_bag(const columns_case *call, int64_t column, int64_t sample, columns_bag *bag,
                           columns_offence *offence);
/* Returns the number of values of a sample in a source. */
int64_t columns_reference_values(const columns_case *call, const rf_column_source *source, int64_t sample);
/* Returns the divisor of the pooled row of a bag. */
double columns_reference_divisor(const rf_column *column, const columns_bag *bag);
/* Value k of a sample of a dense source, as a float. */
float columns_reference_number(const columns_case *call, const rf_column_source *source, int64_t sample,
                               int64_t k);
float bits_as_float(int64_t bits);
int64_t float_as_bits(float value);

#endif
