/* Commands for csrc/families/embedding_columns: launches, refusals, and the host's time of a call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "program.h"

enum { COLUMNS = 1000, BOUNDARIES = 100, DIM = 8 };

/* Columns that find buckets of the values of one dense input. */
typedef struct columns_case {
    rf_column columns[COLUMNS];
    rf_column_source sources[COLUMNS];
    rf_column_step steps[COLUMNS];
    float boundaries[BOUNDARIES];
    int64_t *program, words;
    void *on_device, *memory;
    rf_buffer buffer;
    rf_column_input input;
    rf_embedding_columns_params params;
} columns_case;

static columns_case *case_new(int n_columns, int64_t batch) {
    columns_case *of = calloc(1, sizeof *of);
    CHECK(of != NULL, "no memory");
    const float one = 1.0f;
    uint32_t bits;
    memcpy(&bits, &one, sizeof bits);
    for (int i = 0; i < BOUNDARIES; i++) of->boundaries[i] = (float)(i * i);
    for (int i = 0; i < n_columns; i++) {
        of->steps[i] = (rf_column_step){RF_COLUMN_BUCKETIZE, 0, BOUNDARIES};
        of->sources[i] = (rf_column_source){0, i, 1, i, 1};
        of->columns[i] = (rf_column){.left = i,
                                     .right = -1,
                                     .weight_offset = (int64_t)i * (BOUNDARIES + 1) * DIM,
                                     .rows = BOUNDARIES + 1,
                                     .dim = DIM,
                                     .invalid = RF_COLUMN_INVALID_ERROR,
                                     .empty = RF_COLUMN_EMPTY_FILL,
                                     .n_dims = DIM,
                                     .scale = (int64_t)bits,
                                     .output_column = (int64_t)i * DIM};
    }
    const rf_columns columns = {of->columns, n_columns,      of->sources, n_columns, of->steps,
                                n_columns,   of->boundaries, BOUNDARIES,  NULL,      0};
    CHECK(rf_embedding_columns_program(&columns, &of->program, &of->words) == RF_OK, "%s", rf_last_error());
    of->memory = aligned_alloc(64, 64); /* no kernel runs */
    of->on_device = aligned_alloc(64, (size_t)(of->words * 8 + 63) / 64 * 64);
    of->buffer = (rf_buffer){
        .data = of->memory, .numel = (int64_t)COLUMNS * (BOUNDARIES + 1) * DIM, .dtype = RF_FLOAT32};
    of->input = (rf_column_input){
        .values = of->memory, .width = n_columns + 1, .sample_stride = n_columns, .value_stride = 1};
    of->params = (rf_embedding_columns_params){.program = of->program,
                                               .program_words = of->words,
                                               .buffers = &of->buffer,
                                               .n_buffers = 1,
                                               .inputs = &of->input,
                                               .n_inputs = 1,
                                               .batch = batch,
                                               .check_bounds = true,
                                               .output_dtype = RF_FLOAT32,
                                               .output = of->memory,
                                               .output_dim = (int64_t)n_columns * DIM,
                                               .output_stride = (int64_t)n_columns * DIM};
    return of;
}

static void case_free(columns_case *of) {
    rf_embedding_columns_program_free(of->program);
    free(of->memory);
    free(of->on_device);
    free(of);
}

static void expect_blocks(int n_columns, int64_t batch, unsigned blocks) {
    const rf_cuda_stream stream = {0, NULL};
    columns_case *of = case_new(n_columns, batch);
    const int launches = driver_calls("cuLaunchKernelEx");
    CHECK(rf_embedding_columns_cuda(&of->params, of->on_device, &stream) == RF_OK, "%s", rf_last_error());
    CHECK(driver_calls("cuLaunchKernelEx") == launches + (blocks > 0), "%d columns: launches", n_columns);
    const fake_launch *got = driver_last_launch();
    if (blocks > 0)
        CHECK(got->config.grid[0] == blocks && got->config.grid[1] == 1 && got->config.block[0] == 128 &&
                  got->config.shared_bytes <= 48 << 10,
              "%d columns of %lld samples: %u blocks of %u, %u bytes", n_columns, (long long)batch,
              got->config.grid[0], got->config.block[0], got->config.shared_bytes);
    CHECK(blocks == 0 || memcmp(got->first_word, &of->on_device, sizeof of->on_device) == 0,
          "another program");
    CHECK(context_depth() == 0, "a context was left on the stack");
    case_free(of);
}

/* columns_launch: a task has 16 columns of two lanes; a block has 8 to 64 samples, fewer if there are few
 * tasks for the fake GPU's 1,016 SMs. */
static void columns_launch(char **arguments) {
    (void)arguments;
    expect_blocks(1000, 256, 63 * 32);
    expect_blocks(1000, 1024, 63 * 64);
    expect_blocks(1000, 4096, 63 * 64);
    expect_blocks(1000, 1, 63);
    expect_blocks(16, 256, 32);
    expect_blocks(1, 7, 1);
    expect_blocks(1000, 0, 0);
    expect_blocks(0, 256, 0);
}

/* A valid call, modified by a statement, is refused with a status, and a message with the reason. */
#define REFUSED(want, words, change)                                                \
    do {                                                                            \
        const rf_cuda_stream stream = {0, NULL};                                    \
        columns_case *of = case_new(20, 10);                                        \
        const int64_t *program = of->on_device;                                     \
        change;                                                                     \
        CHECK(rf_embedding_columns_cuda(&of->params, program, &stream) == (want) && \
                  strstr(rf_last_error(), words),                                   \
              "%s: %s", #change, rf_last_error());                                  \
        case_free(of);                                                              \
    } while (0)

static void columns_refusals(char **arguments) {
    (void)arguments;
    static rf_column_input inputs[2017];
    static rf_buffer buffers[4033];
    REFUSED(RF_ERR_VALUE, "aligned to 16 bytes", program = NULL);
    REFUSED(RF_ERR_VALUE, "aligned to 16 bytes", program += 1);
    REFUSED(RF_ERR_UNSUPPORTED, "Pack them into fewer",
            (of->params.buffers = buffers, of->params.n_buffers = 4033, buffers[0] = of->buffer));
    for (int i = 0; i < 2017; i++)
        inputs[i] = (rf_column_input){
            .values = buffers, .width = COLUMNS, .sample_stride = COLUMNS, .value_stride = 1};
    REFUSED(RF_ERR_UNSUPPORTED, "2017 inputs, of which 2017 are dense",
            (of->params.inputs = inputs, of->params.n_inputs = 2017));
    REFUSED(RF_ERR_UNSUPPORTED, "expected 32256 bytes of them", /* one of them has a buffer */
            (of->params.inputs = inputs, of->params.n_inputs = 2016));
    inputs[0].sample_stride = INT64_C(1) << 32; /* this makes all three units long */
    REFUSED(RF_ERR_UNSUPPORTED, "672 inputs, of which 0 are dense",
            (of->params.inputs = inputs, of->params.n_inputs = 672));
    REFUSED(RF_ERR_UNSUPPORTED, "Cut the batch",
            (of->params.batch = INT64_C(1) << 38, of->params.output_stride = 160));
    REFUSED(RF_ERR_VALUE, "output_dim is 5", of->params.output_dim = 5);
    REFUSED(RF_ERR_VALUE, "tasks beyond its words", of->program[14] = 1 << 20);
    CHECK(context_depth() == 0, "a context was left on the stack");
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* columns_time: the least time of a call of 1,000 columns over many. */
static void columns_time(char **arguments) {
    (void)arguments;
    enum { ROUNDS = 200, CALLS = 20 };
    const rf_cuda_stream stream = {0, NULL};
    columns_case *of = case_new(COLUMNS, 256);
    double least = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        const double since = now();
        for (int i = 0; i < CALLS; i++)
            CHECK(rf_embedding_columns_cuda(&of->params, of->on_device, &stream) == RF_OK, "%s",
                  rf_last_error());
        const double time = (now() - since) / CALLS;
        if (time < least) least = time;
    }
    printf("%.2f us\n", least * 1e6);
    CHECK(least < 1e-3, "a call takes %g s", least);
    case_free(of);
}

const command columns_commands[] = {{"columns_launch", 0, columns_launch},
                                    {"columns_refusals", 0, columns_refusals},
                                    {"columns_time", 0, columns_time}};
const int n_columns_commands = (int)(sizeof columns_commands / sizeof columns_commands[0]);
