/* Caches of updates of fused calls on a device, with the fake driver: what is created once, for which stream,
 * its bound, and that no call waits for the device. */
#define _GNU_SOURCE /* alarm */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "allocator.h"
#include "program.h"
#include "test_fused.h"

enum { MOST_CALLS = 256, MANY = 400, FEATURES = 4, ROWS = 1000, SECONDS = 60 };

/* An update of four tables of two matrices; the arrays are never read. */
typedef struct update_case {
    rf_feature features[FEATURES];
    rf_update_matrix matrices[2];
    rf_fused_update_params params;
} update_case;

static _Alignas(256) char memory[1 << 16];

/* `number` selects the features; those of `large` tables take the general path. */
static void case_make(update_case *made, int number, bool large) {
    memset(made, 0, sizeof *made);
    const int64_t rows = large ? 20000 : ROWS;
    for (int i = 0; i < 2; i++)
        made->matrices[i] = (rf_update_matrix){
            .weight = memory + 4096 * i, .rows = 2 * rows, .dim = 8 + 8 * i, .dtype = RF_FLOAT32};
    for (int f = 0; f < FEATURES; f++)
        made->features[f] = (rf_feature){.buffer = f % 2,
                                         .weight_offset = f / 2 * rows * made->matrices[f % 2].dim,
                                         .rows = rows,
                                         .dim = made->matrices[f % 2].dim,
                                         .padding_idx = f == 1 ? number : -1,
                                         .output_column = 24 * (f / 2) + 8 * (f % 2)};
    made->params = (rf_fused_update_params){.features = made->features,
                                            .n_features = FEATURES,
                                            .indices = memory,
                                            .lookups = 600,
                                            .offsets = memory,
                                            .bags = 100,
                                            .index_type = RF_INT64,
                                            .offset_type = RF_INT64,
                                            .grad = memory,
                                            .output_dim = 48,
                                            .matrices = made->matrices,
                                            .n_matrices = 2,
                                            .update = {.numbers = (const float *)(const void *)memory}};
}

static void run(const update_case *one, const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    CHECK(rf_fused_embedding_bag_update_cuda(&one->params, allocator, stream) == RF_OK, "%s",
          rf_last_error());
}

static void run_number(int number, const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    update_case one;
    case_make(&one, number, false);
    run(&one, allocator, stream);
}

/* backward_kept: a description is reused unless one of its inputs changes. */
static void backward_kept(char **arguments) {
    (void)arguments;
    update_case one;
    for (int large = 0; large < 2; large++) {
#define EXPECT(what, described, ...)                                                                      \
    do {                                                                                                  \
        case_make(&one, 0, large);                                                                        \
        __VA_ARGS__;                                                                                      \
        const int lasting = given.lasting, brief = given.brief, live = given.live;                        \
        const costs before = costs_now();                                                                 \
        run(&one, &noting_allocator, &streams[0]);                                                        \
        CHECK((given.lasting > lasting) == (described), what ": %d", given.lasting - lasting);            \
        CHECK((costs_now().uploads > before.uploads) == (described), what ": uploads");                   \
        CHECK(given.brief == brief + 1 && given.live - live == given.lasting - lasting, what ": memory"); \
        CHECK(costs_now().launches > before.launches, what ": nothing was launched");                     \
    } while (0)
        EXPECT("the first call", true, (void)0);
        EXPECT("the same call", false, (void)0);
        EXPECT("other memory", false, one.params.indices = one.params.offsets = memory + 1024);
        EXPECT("another weight", false, one.matrices[0].weight = memory + 8192);
        EXPECT("another gradient", false, one.params.grad = memory + 256);
        EXPECT("other numbers", false, one.params.update.numbers += 8);
        EXPECT("about as many lookups", false, one.params.lookups = 595);
        EXPECT("many more lookups", true, one.params.lookups = 6000);
        EXPECT("another number of bags", true, one.params.bags = 99);
        EXPECT("a weight between vectors", true, one.matrices[1].weight = memory + 4);
        EXPECT("a gradient between vectors", true, one.params.grad = memory + 4);
        EXPECT("a wider gradient", true, one.params.output_dim = 52);
        EXPECT("another padding row", true, one.features[1].padding_idx = 3);
        EXPECT("another pooling", true, one.features[2].pooling = RF_MEAN);
        EXPECT("a feature of no matrix", true, one.features[3].buffer = -1);
        EXPECT("features of one matrix", true, one.matrices[0].weight = NULL);
        EXPECT("a matrix with more rows", true, one.matrices[0].rows++);
        EXPECT("half a weight", true, one.matrices[0].dtype = one.matrices[1].dtype = RF_FLOAT16);
        EXPECT("sample weights", true, one.params.sample_weights = (const float *)(const void *)memory);
        EXPECT("another optimizer", true, one.params.update.optimizer = RF_ADAGRAD;
               one.matrices[0].states[0] = one.matrices[1].states[0] = (float *)(void *)memory);
        EXPECT("a state between vectors", true, one.params.update.optimizer = RF_ADAGRAD;
               one.matrices[0].states[0] = one.matrices[1].states[0] = (float *)(void *)(memory + 8));
        EXPECT("the first call again", false, (void)0);
#undef EXPECT
    }
    const int lasting = given.lasting;
    given.status = RF_ERR_MEMORY;
    case_make(&one, 0, false);
    const costs before = costs_now();
    CHECK(rf_fused_embedding_bag_update_cuda(&one.params, &noting_allocator, &streams[0]) == RF_ERR_MEMORY,
          "%s", rf_last_error());
    case_make(&one, 9, false);
    CHECK(rf_fused_embedding_bag_update_cuda(&one.params, &noting_allocator, &streams[0]) == RF_ERR_MEMORY,
          "%s", rf_last_error());
    given.status = RF_OK;
    expect_costs("an allocator that fails", before, 0, false);
    run(&one, &noting_allocator, &streams[0]);
    CHECK(given.lasting == lasting + 1, "%d more", given.lasting - lasting);
}

/* backward_bounded: the most recent calls stay, per device and stream; no call waits meanwhile. */
static void backward_bounded(char **arguments) {
    (void)arguments;
    static int places[2]; /* stand for streams: nothing is done with them; no lock */
    for (int device = 0; device < 2; device++) run_number(0, &noting_allocator, &streams[device]);
    const int before = waits(), blocks = driver_calls("cuMemAlloc_v2");
    for (int i = 0; i < MANY; i++) run_number(i, &noting_allocator, &streams[0]);
    CHECK(given.live == MOST_CALLS + 1, "%d blocks", given.live);
    const int lasting = given.lasting;
    for (int i = MANY - MOST_CALLS; i < MANY; i++) run_number(i, &noting_allocator, &streams[0]);
    run_number(0, &noting_allocator, &streams[1]);
    CHECK(given.lasting == lasting, "%d calls were described anew", given.lasting - lasting);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 2; i++) {
            const rf_cuda_stream stream = {0, &places[i]};
            run_number(0, &noting_allocator, &stream);
        }
    }
    CHECK(given.lasting == lasting + 2, "%d descriptions for two streams", given.lasting - lasting);
    CHECK(waits() == before && driver_calls("cuMemAlloc_v2") == blocks, "%d waits", waits() - before);
}

/* backward_graphs: data that graphs read are created once, belong to no stream, and stay. */
static void backward_graphs(char **arguments) {
    (void)arguments;
    const rf_cuda_stream capture = {0, capturing_stream()};
    run_number(0, &noting_allocator, &streams[0]);
    const int lasting = given.lasting, live = driver_live();
    run_number(0, &noting_allocator, &capture);
    CHECK(given.lasting == lasting && driver_live() == live + 1, "%d more of a stream, %d of the driver",
          given.lasting - lasting, driver_live() - live);
    for (int i = 1; i < MANY; i++) run_number(i, &noting_allocator, &streams[0]);
    const int waited = waits();
    run_number(0, &noting_allocator, &capture);
    CHECK(driver_live() == live + 1 && waits() == waited, "it was described anew");
    update_case one;
    case_make(&one, 0, false);
    one.params.lookups = 1200;
    run(&one, &noting_allocator, &capture);
    CHECK(driver_live() == live + 2, "%d more", driver_live() - live);
}

static void flood(void) {
    for (int i = 0; i < MANY; i++) run_number(500 + i, NULL, &streams[0]);
}

/* backward_held: data that launches read stay until all launches are in the stream, whatever other threads
 * do. */
static void backward_held(char **arguments) {
    (void)arguments;
    alarm(SECONDS);
    run_number(0, NULL, &streams[0]);
    flood(); /* from here on each new call frees an old call */
    driver_watch();
    driver_hook("cuLaunchKernelEx", flood);
    run_number(1, NULL, &streams[0]);
    driver_hook("cuMemFree_v2",
                flood); /* no lock is held where the driver waits: a deadlock ends by SIGALRM */
    run_number(2, NULL, &streams[0]);
    driver_hook("cuMemAlloc_v2", flood);
    run_number(3, NULL, &streams[0]);
    alarm(0);
}

static void *run_many(void *argument) {
    const rf_cuda_allocator *allocator = argument;
    for (int i = 0; i < MANY; i++) run_number(i % 320, allocator, &streams[i % 3 == 0]);
    return NULL;
}

/* backward_threads: many at once, with the same calls and others. */
static void backward_threads(char **arguments) {
    (void)arguments;
    run_threads(run_many, NULL);
}

static rf_status list_rows(void *context, int64_t count, int64_t **rows, void **values) {
    (void)context, (void)count;
    *rows = (int64_t *)(void *)memory;
    *values = memory;
    return RF_OK;
}

/* Gradients of all weights at once and of each, dense and sparse. */
static void gradients_run(const update_case *one) {
    const rf_sparse_output output = {list_rows, NULL};
    rf_fused_backward_params params[2];
    for (int i = 0; i < 2; i++) {
        params[i] = (rf_fused_backward_params){.features = one->features,
                                               .n_features = FEATURES,
                                               .indices = memory,
                                               .lookups = one->params.lookups,
                                               .offsets = memory,
                                               .bags = one->params.bags,
                                               .index_type = RF_INT64,
                                               .offset_type = RF_INT64,
                                               .grad = memory,
                                               .output_dim = one->params.output_dim,
                                               .group = i,
                                               .rows = one->matrices[i].rows,
                                               .dim = one->matrices[i].dim};
        void *dense = malloc((size_t)(params[i].rows * params[i].dim) * sizeof(float));
        if (dense == NULL) exit(1);
        CHECK(rf_fused_embedding_bag_backward_cuda(&params[i], dense, NULL, &streams[0]) == RF_OK, "%s",
              rf_last_error());
        CHECK(rf_fused_embedding_bag_sparse_backward_cuda(&params[i], &output, NULL, &streams[0]) == RF_OK,
              "%s", rf_last_error());
        free(dense);
    }
    const rf_sparse_output outputs[2] = {output, output};
    CHECK(rf_fused_embedding_bag_sparse_gradients_cuda(params, outputs, 2, NULL, &streams[0]) == RF_OK, "%s",
          rf_last_error());
}

/* backward_training ROWS OPTIMIZER: gradients and updates of tables of that many rows, by cached kernels. */
static void backward_training(char **arguments) {
    float *const states = (float *)(void *)memory;
    update_case one;
    case_make(&one, 0, atoi(arguments[0]) > ROWS);
    gradients_run(&one);
    one.params.update.optimizer = (rf_optimizer)atoi(arguments[1]);
    for (int i = 0; i < 2; i++) one.matrices[i].states[0] = one.matrices[i].states[1] = states;
    run(&one, NULL, &streams[0]);
    const rf_rows_update_params rows = {.rows = (const int64_t *)(const void *)memory,
                                        .sums = memory,
                                        .count = 5,
                                        .matrix = one.matrices[0],
                                        .update = one.params.update};
    CHECK(rf_rows_update_cuda(&rows, &streams[0]) == RF_OK, "%s", rf_last_error());
}

const command backward_commands[] = {
    {"backward_kept", 0, backward_kept},       {"backward_bounded", 0, backward_bounded},
    {"backward_graphs", 0, backward_graphs},   {"backward_held", 0, backward_held},
    {"backward_threads", 0, backward_threads}, {"backward_training", 2, backward_training},
};
const int n_backward_commands = (int)(sizeof backward_commands / sizeof backward_commands[0]);
