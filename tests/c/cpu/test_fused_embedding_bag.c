/* rf_fused_embedding_bag_cpu: values. */
#include <string.h>

#include "cases.h"
#include "reference.h"

void test_fused_embedding_bag_random(void) {
    randomness random = {4};
    arena memory = arena_new();
    for (int i = 0; i < check_rounds; i++) fused_embedding_bag_case(&random, &memory);
    arena_free(&memory);
}

/* Few rows and many lookups, for which a kernel may read the whole table first; also one-hot bags. */
void test_fused_embedding_bag_reuse(void) {
    enum { ROWS = 64, WIDE = 32, NARROW = 4, BAGS = 96, LENGTH = 40, LOOKUPS = BAGS * (LENGTH + 1) };
    static float weight[ROWS * (WIDE + NARROW)], output[BAGS * (WIDE + NARROW)];
    static int32_t indices[LOOKUPS], offsets[2 * BAGS + 1];
    randomness random = {5};
    fill_normal(&random, weight, ROWS * (WIDE + NARROW), RF_FLOAT32);
    for (int i = 0; i < LOOKUPS; i++) indices[i] = (int32_t)random_between(&random, 0, ROWS - 1);
    for (int b = 0; b < BAGS; b++) offsets[b] = b * LENGTH, offsets[BAGS + b] = BAGS * LENGTH + b;
    offsets[2 * BAGS] = LOOKUPS;
    const rf_buffer buffer = {.data = weight, .numel = ROWS * (WIDE + NARROW), .dtype = RF_FLOAT32};
    const rf_feature features[] = {{0, 0, ROWS, WIDE, RF_SUM, -1, 0},
                                   {0, ROWS * WIDE, ROWS, NARROW, RF_MEAN, 3, WIDE}};
    const rf_fused_embedding_bag_params call = {.buffers = &buffer,
                                                .n_buffers = 1,
                                                .features = features,
                                                .n_features = 2,
                                                .indices = indices,
                                                .lookups = LOOKUPS,
                                                .offsets = offsets,
                                                .bags = BAGS,
                                                .check_bounds = true,
                                                .prefetch_distance = -1,
                                                .output = output,
                                                .output_dim = WIDE + NARROW,
                                                .output_stride = WIDE + NARROW};
    const rf_executor *executors[] = {NULL, &executor_serial, &executor_whole, &executor_threads};
    for (size_t e = 0; e < sizeof executors / sizeof executors[0]; e++) {
        memset(output, 0xff, sizeof output);
        const rf_status status = rf_fused_embedding_bag_cpu(&call, executors[e]);
        CHECK(status == RF_OK, "%s", rf_last_error());
        for (int64_t at = 0; status == RF_OK && at < 2 * BAGS; at++) {
            const rf_feature *feature = &features[at / BAGS];
            const table from = {weight + feature->weight_offset,
                                ROWS,
                                feature->dim,
                                feature->dim,
                                RF_FLOAT32,
                                (rf_pooling)feature->pooling,
                                feature->padding_idx};
            const bag of = {indices, RF_INT32, NULL, offsets[at], offsets[at + 1]};
            const float *row = output + at % BAGS * (WIDE + NARROW) + feature->output_column;
            reference_check_bag(&from, &of, row, RF_FLOAT32, "reuse");
        }
    }
}
