/* rf_embedding_columns_cpu and rf_embedding_columns_lookups_cpu against the definition, and their errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "columns.h"

static const double epsilons[] = {0x1p-22, 0x1p-10, 0x1p-7};

static bool is_close(double got, double want, double near) {
    if (isnan(want)) return isnan(got);
    return got == want || fabs(got - want) <= near;
}

static void check_element(const columns_case *call, int round, int64_t c, int64_t sample, int64_t d,
                          double want, double size) {
    const rf_embedding_columns_params *params = &call->params;
    const int64_t at = sample * params->output_stride + call->columns[c].output_column + d;
    const double got = element_get(params->output, at, params->output_dtype);
    const double near = epsilons[params->output_dtype] * fabs(want) + 0x1p-20 * size + 1e-12;
    const bool big = params->output_dtype == RF_FLOAT16 && fabs(want) > 65000;
    CHECK(big || is_close(got, want, near),
          "round %d, column %lld, sample %lld, element %lld: %.9g instead of %.9g", round, (long long)c,
          (long long)sample, (long long)d, got, want);
}

static void check_numeric(const columns_case *call, int round, int64_t c, int64_t sample) {
    const rf_column_source *source = &call->sources[call->columns[c].left];
    for (int64_t k = 0; k < source->width; k++)
        check_element(call, round, c, sample, k, (double)columns_reference_number(call, source, sample, k),
                      0);
}

static void check_table(const columns_case *call, int round, int64_t c, int64_t sample, columns_bag *bag) {
    const rf_column *column = &call->columns[c];
    const rf_buffer *buffer = &call->buffers[column->buffer];
    const double scale = (double)bits_as_float(column->scale);
    if (bag->count == 0 && column->empty >= 0) {
        bag->rows[0] = column->empty;
        bag->weights[0] = 1;
        bag->count = 1;
    }
    const double by = columns_reference_divisor(column, bag);
    for (int64_t d = 0; d < column->n_dims; d++) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < bag->count; i++) {
            const int64_t at = column->weight_offset + bag->rows[i] * column->dim + column->first_dim + d;
            const double element = element_get(buffer->data, at, buffer->dtype) * bag->weights[i];
            sum = column->pooling != RF_COLUMN_MAX ? sum + element : i == 0 || element > sum ? element : sum;
            size += fabs(element);
        }
        const double want = bag->count > 0 ? scale * (sum / by) : (double)bits_as_float(column->fill);
        check_element(call, round, c, sample, d, want,
                      bag->count > 1 ? size / fabs(by) * (1 + (double)bag->count / 16) : 0);
    }
}

static void check_gaps(const columns_case *call, int round) {
    const unsigned char *bytes = call->params.output;
    const size_t size = element_size(call->params.output_dtype);
    for (size_t at = 0; at < call->output_bytes; at++) {
        const bool gap = at / size % (size_t)call->params.output_stride >= (size_t)call->params.output_dim;
        CHECK(!gap || bytes[at] == UNWRITTEN, "round %d: byte %zu between two output rows was written", round,
              at);
    }
}

static void check_offence(const columns_offence *offence, rf_status status, int round) {
    char words[160];
    snprintf(words, sizeof words,
             "recfuse.embedding_columns: column %lld: the index is %lld, of value %lld of sample %lld",
             (long long)offence->column, (long long)offence->index, (long long)offence->position,
             (long long)offence->sample);
    CHECK(status == RF_ERR_INDEX && strncmp(rf_last_error(), words, strlen(words)) == 0,
          "round %d: %s instead of %s", round, rf_last_error(), words);
}

static void check_output(const columns_case *call, rf_status status, int round) {
    static columns_bag bag;
    columns_offence offence = {0};
    for (int64_t c = 0; c < call->written.n_columns; c++)
        for (int64_t sample = 0; sample < call->params.batch && call->columns[c].buffer >= 0; sample++)
            columns_reference_bag(call, c, sample, &bag, &offence);
    if (offence.found) {
        check_offence(&offence, status, round);
        return;
    }
    CHECK(status == RF_OK, "round %d: %s", round, rf_last_error());
    for (int64_t c = 0; c < call->written.n_columns && status == RF_OK; c++) {
        for (int64_t sample = 0; sample < call->params.batch; sample++) {
            if (call->columns[c].buffer < 0) {
                check_numeric(call, round, c, sample);
                continue;
            }
            columns_reference_bag(call, c, sample, &bag, &offence);
            check_table(call, round, c, sample, &bag);
        }
    }
    if (status == RF_OK) check_gaps(call, round);
}

void test_embedding_columns_random(void) {
    static columns_case call;
    randomness random = {21};
    columns_memory memory = columns_memory_new();
    for (int round = 0; round < check_rounds; round++)
        if (columns_draw(&random, &memory, &call))
            check_output(&call, rf_embedding_columns_cpu(&call.params, executor_any(&random)), round);
    columns_memory_free(&memory);
}

/* Results are bit-identical for all executors. */
void test_embedding_columns_repeats(void) {
    static columns_case call;
    const rf_executor *executors[] = {&executor_serial, &executor_whole, &executor_threads};
    randomness random = {22};
    columns_memory memory = columns_memory_new();
    for (int round = 0; round < check_rounds / 2; round++) {
        if (!columns_draw(&random, &memory, &call)) continue;
        const rf_status first = rf_embedding_columns_cpu(&call.params, NULL);
        char message[400];
        snprintf(message, sizeof message, "%s", first == RF_OK ? "" : rf_last_error());
        unsigned char *output = malloc(call.output_bytes + 1);
        CHECK(output != NULL, "no memory");
        if (output == NULL) continue;
        memcpy(output, call.params.output, call.output_bytes);
        for (int i = 0; i < 3; i++) {
            const rf_status status = rf_embedding_columns_cpu(&call.params, executors[i]);
            CHECK(status == first, "round %d: %s", round, rf_last_error());
            CHECK(first != RF_OK || memcmp(output, call.params.output, call.output_bytes) == 0,
                  "round %d, executor %d", round, i);
            CHECK(first == RF_OK || strncmp(message, rf_last_error(), sizeof message - 1) == 0, "%s, then %s",
                  message, rf_last_error());
        }
        free(output);
    }
    columns_memory_free(&memory);
}

static void check_lookups(const columns_case *call, const rf_embedding_columns_lookups *lookups, int round) {
    static columns_bag bag;
    columns_offence offence = {0};
    int64_t at = 0, table = 0;
    for (int64_t c = 0; c < call->written.n_columns; c++) {
        const rf_column *column = &call->columns[c];
        for (int64_t sample = 0; sample < call->params.batch && column->buffer >= 0; sample++) {
            columns_reference_bag(call, c, sample, &bag, &offence);
            if (bag.count == 0 && column->empty >= 0) {
                bag.rows[0] = column->empty;
                bag.weights[0] = 1;
                bag.count = 1;
            }
            const double by = columns_reference_divisor(column, &bag);
            const int64_t *offsets = lookups->offsets + table * call->params.batch + sample;
            CHECK(offsets[0] == at && offsets[1] == at + bag.count,
                  "round %d, column %lld, sample %lld: [%lld, %lld) instead of [%lld, %lld)", round,
                  (long long)c, (long long)sample, (long long)offsets[0], (long long)offsets[1],
                  (long long)at, (long long)(at + bag.count));
            for (int64_t i = 0; i < bag.count; i++, at++) {
                CHECK(lookups->indices[at] == bag.rows[i],
                      "round %d, column %lld, sample %lld, lookup %lld: %lld instead of %lld", round,
                      (long long)c, (long long)sample, (long long)i, (long long)lookups->indices[at],
                      (long long)bag.rows[i]);
                if (lookups->factors != NULL)
                    CHECK(is_close((double)lookups->factors[at], bag.weights[i] / by,
                                   1e-5 * fabs(bag.weights[i] / by)),
                          "round %d, column %lld: factor %.9g instead of %.9g", round, (long long)c,
                          (double)lookups->factors[at], bag.weights[i] / by);
            }
        }
        table += column->buffer >= 0;
    }
}

void test_embedding_columns_lookups(void) {
    static columns_case call;
    randomness random = {23};
    columns_memory memory = columns_memory_new();
    for (int round = 0; round < check_rounds; round++) {
        if (!columns_draw(&random, &memory, &call)) continue;
        int64_t tables = 0, capacity = 0;
        for (int64_t c = 0; c < call.written.n_columns; c++) tables += call.columns[c].buffer >= 0;
        const int64_t bags = tables * call.params.batch;
        rf_embedding_columns_lookups lookups = {.offsets = malloc((size_t)(bags + 1) * sizeof(int64_t))};
        CHECK(rf_embedding_columns_capacity(&call.params, &capacity) == RF_OK && lookups.offsets != NULL,
              "%s", rf_last_error());
        rf_status status = rf_embedding_columns_lookups_cpu(&call.params, &lookups, executor_any(&random));
        CHECK(status == RF_OK || status == RF_ERR_INDEX, "%s", rf_last_error());
        if (status == RF_OK) {
            lookups.capacity = lookups.offsets[bags];
            CHECK(capacity == -1 || lookups.capacity <= capacity, "round %d: %lld of at most %lld", round,
                  (long long)lookups.capacity, (long long)capacity);
            lookups.indices = malloc((size_t)lookups.capacity * sizeof(int64_t) + 1);
            lookups.factors = round % 3 == 0 ? NULL : malloc((size_t)lookups.capacity * sizeof(float) + 1);
            status = rf_embedding_columns_lookups_cpu(&call.params, &lookups, executor_any(&random));
            CHECK(status == RF_OK, "%s", rf_last_error());
            check_lookups(&call, &lookups, round);
            if (lookups.capacity > 0) {
                lookups.capacity--;
                status = rf_embedding_columns_lookups_cpu(&call.params, &lookups, executor_any(&random));
                CHECK(status == RF_ERR_VALUE && strstr(rf_last_error(), "capacity is"), "%s",
                      rf_last_error());
            }
        }
        free(lookups.offsets);
        free(lookups.indices);
        free(lookups.factors);
    }
    columns_memory_free(&memory);
}

/* Any program of words is refused, or safe. */
void test_embedding_columns_corrupted(void) {
    static columns_case call;
    randomness random = {24};
    columns_memory memory = columns_memory_new();
    for (int round = 0; round < check_rounds; round++) {
        if (!columns_draw(&random, &memory, &call) || call.params.program_words < 1) continue;
        int64_t *program = (int64_t *)call.params.program;
        for (int i = 0; i < 20; i++) {
            const int64_t first_part = call.params.program_words < 400 ? call.params.program_words : 400;
            const int64_t at = random_between(&random, 0, random_chance(&random, 0.3) ? 19 : first_part - 1);
            const int64_t kept = program[at];
            static const int64_t numbers[] = {-1,  1, 0, 7, INT32_MAX, INT64_MAX, INT64_MIN, INT64_C(1) << 32,
                                              1000};
            program[at] = random_chance(&random, 0.5)
                              ? numbers[random_between(&random, 0, 8)]
                              : (int64_t)((uint64_t)kept + (uint64_t)random_between(&random, -2, 2));
            if (random_chance(&random, 0.1)) program[at] = (int64_t)random_bits(&random);
            rf_embedding_columns_cpu(&call.params, NULL);
            program[at] = kept;
        }
    }
    columns_memory_free(&memory);
}

/* A bag with more values than a cursor returns at once: values from `bad` on are 7, previous values are 1, of
 * 3 rows. With buckets it is crossed with a 0. */
static rf_status long_bag(int64_t bad, int64_t invalid, int64_t buckets, float output[2]) {
    enum { VALUES = 3000 };
    static int64_t values[VALUES];
    const int64_t offsets[] = {0, VALUES}, zero[] = {0}, one = float_as_bits(1);
    const float table[] = {1, 10, 2, 20, 4, 40};
    const rf_column_source sources[] = {{0, 0, 0, 0, 0}, {1, 0, 1, 0, 0}};
    const rf_column column = {.right = buckets > 0 ? 1 : -1,
                              .cross_buckets = buckets,
                              .rows = 3,
                              .dim = 2,
                              .pooling = RF_COLUMN_MAX,
                              .invalid = invalid,
                              .empty = 2,
                              .n_dims = 2,
                              .scale = one};
    const rf_columns written = {.columns = &column, .n_columns = 1, .sources = sources, .n_sources = 2};
    const rf_buffer buffer = {.data = table, .numel = 6, .dtype = RF_FLOAT32};
    const rf_column_input inputs[] = {{.values = values,
                                       .type = RF_COLUMN_INT64,
                                       .features = 1,
                                       .lookups = VALUES,
                                       .offsets = offsets,
                                       .offset_type = RF_INT64},
                                      {.values = zero, .type = RF_COLUMN_INT64, .width = 1}};
    rf_embedding_columns_params call = {.buffers = &buffer,
                                        .n_buffers = 1,
                                        .inputs = inputs,
                                        .n_inputs = 2,
                                        .batch = 1,
                                        .check_bounds = true,
                                        .output = output,
                                        .output_dim = 2,
                                        .output_stride = 2};
    int64_t *program = NULL;
    for (int64_t i = 0; i < VALUES; i++) values[i] = i < bad ? 1 : 7;
    rf_status status = rf_embedding_columns_program(&written, &program, &call.program_words);
    call.program = program;
    if (status == RF_OK) status = rf_embedding_columns_cpu(&call, NULL);
    rf_embedding_columns_program_free(program);
    return status;
}

void test_embedding_columns_long_bags(void) {
    float output[2] = {0};
    CHECK(long_bag(2500, RF_COLUMN_INVALID_ERROR, 0, output) == RF_ERR_INDEX &&
              strstr(rf_last_error(), "the index is 7, of value 2500 of sample 0") != NULL,
          "%s", rf_last_error());
    for (int64_t bad = 0; bad <= 3000; bad += 500) {
        const float want = bad == 0 ? 4 : 2; /* row of empty bags, else row 1 */
        CHECK(long_bag(bad, RF_COLUMN_INVALID_DROPPED, 0, output) == RF_OK, "%s", rf_last_error());
        CHECK(output[0] == want && output[1] == 10 * want, "%lld: %g, %g", (long long)bad, (double)output[0],
              (double)output[1]);
        CHECK(long_bag(bad, 0, 0, output) == RF_OK, "%s", rf_last_error());
        CHECK(output[0] == (bad == 0 ? 1 : 2), "%lld: %g", (long long)bad, (double)output[0]);
    }
    int64_t buckets = 3, indices[2] = {0};
    for (; indices[0] > 2 || indices[1] <= 2; buckets++)
        for (int i = 0; i < 2; i++)
            indices[i] =
                (int64_t)((rf_hash_integers(i == 0 ? 1 : 7, 0, 0) >> 32) * (uint64_t)(buckets + 1) >> 32);
    char words[80];
    snprintf(words, sizeof words, "the index is %lld, of value 2500 of sample 0", (long long)indices[1]);
    CHECK(long_bag(2500, RF_COLUMN_INVALID_ERROR, buckets, output) == RF_ERR_INDEX &&
              strstr(rf_last_error(), words) != NULL,
          "%s instead of %s", rf_last_error(), words);
    CHECK(long_bag(3000, RF_COLUMN_INVALID_ERROR, buckets, output) == RF_OK &&
              output[0] == (float)(1 << indices[0]),
          "%g: %s", (double)output[0], rf_last_error());
}

/* A valid call of two columns, modified by a statement, returns a status and a message with these words. */
#define COLUMNS(want, words, change)                                                                         \
    do {                                                                                                     \
        float table[12] = {0}, output[2 * 6], numbers[] = {0.5f, 2.5f}, boundaries[] = {1, 2};               \
        int64_t ids[] = {0, 1, 2}, offsets[] = {0, 1, 3}, vocabulary[] = {5, 6};                             \
        rf_column_step steps[] = {{RF_COLUMN_BUCKETIZE, 0, 2}, {RF_COLUMN_CLIP_INTEGER, 0, 5}};              \
        rf_column_source sources[] = {{0, 0, 1, 0, 1}, {1, 0, 0, 1, 1}};                                     \
        const int64_t one = float_as_bits(1);                                                                \
        rf_column columns[] = {{0, -1, 0, 0, 0, 0, 4, 3, RF_COLUMN_MEAN, 0, -2, -1, 0, 0, 3, one, 0},        \
                               {1, -1, 0, 0, 0, 0, 4, 3, RF_COLUMN_SUM, 0, -2, -1, 0, 0, 3, one, 3}};        \
        rf_columns written = {columns, 2, sources, 2, steps, 2, boundaries, 2, vocabulary, 2};               \
        rf_buffer buffers[] = {{.data = table, .numel = 12, .dtype = RF_FLOAT32}};                           \
        rf_column_input inputs[] = {{.values = numbers, .width = 1, .sample_stride = 1, .value_stride = 1},  \
                                    {.values = ids,                                                          \
                                     .type = RF_COLUMN_INT64,                                                \
                                     .features = 1,                                                          \
                                     .lookups = 3,                                                           \
                                     .offsets = offsets,                                                     \
                                     .offset_type = RF_INT64}};                                              \
        rf_embedding_columns_params call = {.buffers = buffers,                                              \
                                            .n_buffers = 1,                                                  \
                                            .inputs = inputs,                                                \
                                            .n_inputs = 2,                                                   \
                                            .batch = 2,                                                      \
                                            .check_bounds = true,                                            \
                                            .output = output,                                                \
                                            .output_dim = 6,                                                 \
                                            .output_stride = 6};                                             \
        int64_t *program = NULL, words_of_program = 0;                                                       \
        change;                                                                                              \
        rf_status status = rf_embedding_columns_program(&written, &program, &words_of_program);              \
        call.program = program;                                                                              \
        call.program_words += words_of_program;                                                              \
        if (status == RF_OK) status = rf_embedding_columns_cpu(&call, NULL);                                 \
        CHECK(status == (want) && (status == RF_OK || strstr(rf_last_error(), words) != NULL), "%s: %s, %s", \
              #change, rf_status_text(status), rf_last_error());                                             \
        rf_embedding_columns_program_free(program);                                                          \
        (void)vocabulary, (void)boundaries;                                                                  \
    } while (0)

void test_embedding_columns_errors(void) {
    COLUMNS(RF_OK, "", (void)0);
    COLUMNS(RF_OK, "", written.n_columns = call.output_dim = call.output_stride = 0);
    COLUMNS(RF_OK, "", (call.batch = 0, call.output = NULL));
    COLUMNS(RF_ERR_INDEX,
            "column 1: the index is 4, of value 1 of sample 1; expected 0 to 3, less than the 4 rows",
            ids[2] = 4);
    COLUMNS(RF_ERR_INDEX, "column 0: the index is 2, of value 0 of sample 1; expected 0 to 1",
            (columns[0].rows = 2, ids[0] = 9));
    COLUMNS(RF_ERR_INDEX, "column 1: the index is 0, of value 0 of sample 0, but its table has no rows",
            columns[1].rows = 0);
    COLUMNS(RF_OK, "", (columns[1].invalid = -1, ids[2] = 4));
    COLUMNS(RF_OK, "", (columns[1].invalid = 3, ids[2] = 4));
    COLUMNS(RF_OK, "", (call.check_bounds = false, ids[2] = 4));
    COLUMNS(RF_ERR_OFFSET, "column 1: offsets[0] of input 1 is 1; expected 0, where the first bag begins",
            offsets[0] = 1);
    COLUMNS(RF_ERR_OFFSET, "column 1: offsets[1] of input 1 is 4; expected 0", offsets[1] = 4);
    COLUMNS(RF_ERR_OFFSET, "column 1: offsets[2] of input 1 is 0; expected 1", offsets[2] = 0);
    COLUMNS(RF_ERR_VALUE, "column 0: step 0: boundary 1 is 0.5; expected boundaries that never decrease",
            boundaries[1] = 0.5f);
    COLUMNS(RF_ERR_VALUE, "boundary 0 is nan", boundaries[0] = NAN);
    COLUMNS(RF_ERR_VALUE, "step 0: it has 3 boundaries from 0 on; expected a part of the 2", steps[0].b = 3);
    COLUMNS(RF_ERR_VALUE, "column 1: step 1: the word 5 is in its vocabulary twice",
            (steps[1] = (rf_column_step){RF_COLUMN_VOCABULARY, 0, 2}, vocabulary[1] = 5));
    COLUMNS(RF_ERR_VALUE, "3 words from 0 on", (steps[1] = (rf_column_step){RF_COLUMN_VOCABULARY, 0, 3}));
    COLUMNS(RF_ERR_VALUE, "operation is 10", steps[1].operation = 10);
    COLUMNS(RF_ERR_VALUE, "step 1 is modulo 0", (steps[1] = (rf_column_step){RF_COLUMN_MODULO, 0, 0}));
    COLUMNS(RF_ERR_VALUE, "hashes to 0 buckets", (steps[1] = (rf_column_step){RF_COLUMN_HASH, 0, 0}));
    COLUMNS(RF_ERR_VALUE, "hashes to 2147483648 buckets",
            (steps[1] = (rf_column_step){RF_COLUMN_HASH, INT64_C(1) << 31, 0}));
    COLUMNS(RF_ERR_TYPE, "column 0: clip_integer takes integers, and its values are float32",
            steps[0].operation = RF_COLUMN_CLIP_INTEGER);
    COLUMNS(RF_ERR_TYPE, "column 0: its values are float32 after all steps", sources[0].n_steps = 0);
    COLUMNS(RF_ERR_VALUE, "column 0: its source is 2; expected one of 2 sources", columns[0].left = 2);
    COLUMNS(RF_ERR_VALUE, "column 0: left is 4294967296, which does not fit",
            columns[0].left = INT64_C(1) << 32);
    COLUMNS(RF_ERR_VALUE, "column 1: its source has 2 steps from 1 on", sources[1].n_steps = 2);
    COLUMNS(RF_ERR_VALUE, "column 1: its source has input -1", sources[1].input = -1);
    COLUMNS(RF_ERR_VALUE, "column 1: its source is input 2; expected one of 2", sources[1].input = 2);
    COLUMNS(RF_ERR_VALUE, "column 1: its source is feature 1 of input 1, which has 1", sources[1].slot = 1);
    COLUMNS(RF_ERR_VALUE, "column 0: its source takes values 1 to 1", sources[0].slot = 1);
    COLUMNS(RF_ERR_VALUE, "column 0: its source is jagged, and input 0 is dense", sources[0].width = 0);
    COLUMNS(RF_ERR_VALUE, "column 0: buffer is -2", columns[0].buffer = -2);
    COLUMNS(RF_ERR_VALUE, "column 0: its table is in buffer 1; expected one of 1", columns[0].buffer = 1);
    COLUMNS(RF_ERR_VALUE,
            "column 1: its table is 4 x 3 at element 1; expected a table within buffer 0, which has 12",
            columns[1].weight_offset = 1);
    COLUMNS(RF_ERR_VALUE, "column 1: its table is 9223372036854775807 x 3", columns[1].rows = INT64_MAX);
    COLUMNS(RF_ERR_VALUE, "column 1: it writes 3 columns from 1 on; expected a part of the 3",
            columns[1].first_dim = 1);
    COLUMNS(RF_ERR_VALUE, "column 1: pooling is 4", columns[1].pooling = 4);
    COLUMNS(RF_ERR_VALUE, "column 0: weighted is 1; expected 0, or 1 with a jagged source",
            columns[0].weighted = 1);
    COLUMNS(RF_ERR_VALUE, "column 1: it is weighted, and input 1 has no weights", columns[1].weighted = 1);
    COLUMNS(RF_ERR_VALUE, "column 1: invalid is -3", columns[1].invalid = -3);
    COLUMNS(RF_ERR_VALUE, "column 1: invalid is -2 and empty 4", columns[1].empty = 4);
    COLUMNS(RF_ERR_VALUE, "column 1: cross_buckets is 5; expected 0", columns[1].cross_buckets = 5);
    COLUMNS(RF_ERR_VALUE, "column 1: cross_buckets is 0; expected 1", columns[1].right = 0);
    COLUMNS(RF_ERR_VALUE, "column 1: output_column is 4; expected 3", columns[1].output_column = 4);
    COLUMNS(RF_ERR_VALUE, "column 1: it is numeric with a jagged source", columns[1].buffer = -1);
    COLUMNS(RF_ERR_VALUE, "column 0: it is numeric and writes 3 columns", columns[0].buffer = -1);
    COLUMNS(RF_ERR_VALUE, "output_dim is 7; expected the 6 columns of the program",
            call.output_dim = call.output_stride = 7);
    COLUMNS(RF_ERR_VALUE, "output_stride is 5", call.output_stride = 5);
    COLUMNS(RF_ERR_VALUE, "output is NULL", call.output = NULL);
    COLUMNS(RF_ERR_VALUE, "batch is -1", call.batch = -1);
    COLUMNS(RF_ERR_TYPE, "dtype of a buffer is 3", buffers[0].dtype = RF_FLOAT64);
    COLUMNS(RF_ERR_TYPE, "output_dtype is 9", call.output_dtype = (rf_dtype)9);
    COLUMNS(RF_ERR_VALUE, "inputs[0] has values NULL", inputs[0].values = NULL);
    COLUMNS(RF_ERR_VALUE, "inputs[1] has offsets NULL", inputs[1].offsets = NULL);
    COLUMNS(RF_ERR_TYPE, "inputs[0] has type 5", inputs[0].type = (rf_column_type)5);
    COLUMNS(RF_ERR_VALUE, "is no whole program", call.program_words = -1);
}
