/* rf_embedding_bag_cpu: values. */
#include <stdio.h>
#include <string.h>

#include "cases.h"
#include "reference.h"

/* Every dim, dtype and pooling; in few rounds every two of them, which is a third of the cases. */
void test_embedding_bag_dims(void) {
    randomness random = {1};
    arena memory = arena_new();
    for (int64_t dim = 0; dim <= 300; dim++)
        for (rf_dtype dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++)
            for (rf_pooling pooling = RF_SUM; pooling <= RF_MAX; pooling++)
                if (check_rounds >= 100 || (dim + dtype + pooling) % 3 == 0)
                    embedding_bag_case(&random, &memory, dtype, pooling, dim);
    embedding_bag_case(&random, &memory, RF_FLOAT32, RF_SUM, 5000); /* wider than any kernel's registers */
    embedding_bag_case(&random, &memory, RF_FLOAT16, RF_MAX, 4099);
    arena_free(&memory);
}

void test_embedding_bag_random(void) {
    randomness random = {2};
    arena memory = arena_new();
    for (int i = 0; i < check_rounds; i++) {
        const rf_pooling pooling = (rf_pooling)random_between(&random, RF_SUM, RF_MAX);
        embedding_bag_case(&random, &memory, random_dtype(&random), pooling, random_dim(&random));
    }
    arena_free(&memory);
}

enum { SIDE = 256 };

/* All 65,536 numbers of a 16-bit dtype, each looked up once and scaled by `factor`: the float32
 * product is exact, so the output must be the nearest number of the dtype, ties to even. */
static void check_every_half(rf_dtype dtype, float factor) {
    region weight_memory = region_new((size_t)SIDE * SIDE * 2),
           output_memory = region_new((size_t)SIDE * SIDE * 2);
    uint16_t *weight = region_at_end(&weight_memory, (size_t)SIDE * SIDE * 2);
    void *output = region_at_end(&output_memory, (size_t)SIDE * SIDE * 2);
    int32_t rows[SIDE];
    float factors[SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) weight[i] = (uint16_t)i;
    for (int i = 0; i < SIDE; i++) rows[i] = i, factors[i] = factor;
    rf_embedding_bag_params call = {.weight = weight,
                                    .rows = SIDE,
                                    .dim = SIDE,
                                    .weight_stride = SIDE,
                                    .dtype = dtype,
                                    .indices = rows,
                                    .lookups = SIDE,
                                    .offsets = rows,
                                    .bags = SIDE,
                                    .check_bounds = true,
                                    .padding_idx = -1,
                                    .sample_weights = factor == 1 ? NULL : factors,
                                    .prefetch_distance = -1,
                                    .output = output,
                                    .output_stride = SIDE};
    const rf_status status = rf_embedding_bag_cpu(&call, NULL);
    CHECK(status == RF_OK, "%s", rf_last_error());
    for (int64_t i = 0; status == RF_OK && i < SIDE * SIDE; i++) {
        const double number = element_get(weight, i, dtype), got = element_get(output, i, dtype);
        unsigned char rounded[4];
        element_set(rounded, 0, dtype, number * factor);
        const double want = element_get(rounded, 0, dtype);
        CHECK(got == want || (got != got && want != want), "%s bits %04x times %.9g: %.9g, not %.9g",
              dtype_name(dtype), (unsigned)i, (double)factor, got, want);
    }
    region_free(&weight_memory);
    region_free(&output_memory);
}

/* Sums are in float32: sums of 5,000 ones do not stall at the precision of the dtype. */
static void check_long_sum(rf_dtype dtype, int64_t ones, double want) {
    unsigned char one[4], sum[4];
    static int64_t zeros[5000];
    const int64_t from = 0;
    element_set(one, 0, dtype, 1);
    rf_embedding_bag_params call = {.weight = one,
                                    .rows = 1,
                                    .dim = 1,
                                    .weight_stride = 1,
                                    .dtype = dtype,
                                    .indices = zeros,
                                    .lookups = ones,
                                    .offsets = &from,
                                    .bags = 1,
                                    .index_type = RF_INT64,
                                    .offset_type = RF_INT64,
                                    .check_bounds = true,
                                    .padding_idx = -1,
                                    .prefetch_distance = -1,
                                    .output = sum,
                                    .output_stride = 1};
    const rf_status status = rf_embedding_bag_cpu(&call, NULL);
    CHECK(status == RF_OK && element_get(sum, 0, dtype) == want, "%s: %lld ones give %.9g (%s)",
          dtype_name(dtype), (long long)ones, element_get(sum, 0, dtype), rf_last_error());
}

void test_embedding_bag_exact(void) {
    const float factors[] = {1, 1 + 0x1p-7f, 0x1p-3f, 0x1p7f};
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        check_every_half(RF_FLOAT16, factors[i]);
        check_every_half(RF_BFLOAT16, factors[i]);
    }
    check_long_sum(RF_FLOAT32, 5000, 5000);
    check_long_sum(RF_FLOAT16, 4096, 4096);
    check_long_sum(RF_BFLOAT16, 4096, 4096);
}

/* Equal calls give bit-identical results, on one thread and on several. */
void test_embedding_bag_repeats(void) {
    enum { ROWS = 50, DIM = 100, BAGS = 64, LOOKUPS = BAGS * 37 };
    static float weight[ROWS * DIM], output[2][BAGS * DIM];
    static int32_t indices[LOOKUPS], offsets[BAGS];
    randomness random = {3};
    fill_normal(&random, weight, ROWS * DIM, RF_FLOAT32);
    for (int i = 0; i < LOOKUPS; i++) indices[i] = (int32_t)random_between(&random, 0, ROWS - 1);
    for (int i = 0; i < BAGS; i++) offsets[i] = i * 37;
    rf_embedding_bag_params call = {.weight = weight,
                                    .rows = ROWS,
                                    .dim = DIM,
                                    .weight_stride = DIM,
                                    .indices = indices,
                                    .lookups = LOOKUPS,
                                    .offsets = offsets,
                                    .bags = BAGS,
                                    .check_bounds = true,
                                    .pooling = RF_MEAN,
                                    .padding_idx = -1,
                                    .prefetch_distance = -1,
                                    .output_stride = DIM};
    const rf_executor *executors[] = {NULL, &executor_serial, &executor_whole, &executor_threads};
    for (size_t e = 0; e < sizeof executors / sizeof executors[0]; e++)
        for (int repeat = 0; repeat < 2; repeat++) {
            call.output = output[repeat > 0 || e > 0];
            memset(call.output, 0xff, sizeof output[0]);
            CHECK(rf_embedding_bag_cpu(&call, executors[e]) == RF_OK, "%s", rf_last_error());
            CHECK(call.output == output[0] || memcmp(output[0], output[1], sizeof output[0]) == 0,
                  "executor %zu, repeat %d: other bits than the first call's", e, repeat);
        }
}

/* A hint: any range is accepted, and the contents do not change. */
void test_huge_pages(void) {
    region memory = region_new(1 << 22);
    memset(memory.data, 7, memory.bytes);
    CHECK(rf_advise_huge_pages(memory.data, (int64_t)memory.bytes) == RF_OK, "%s", rf_last_error());
    CHECK(rf_advise_huge_pages(memory.data + 13, 100) == RF_OK, "a small odd range: %s", rf_last_error());
    CHECK(rf_advise_huge_pages(NULL, 0) == RF_OK, "nothing: %s", rf_last_error());
    size_t kept = 0;
    for (size_t i = 0; i < memory.bytes; i++) kept += memory.data[i] == 7;
    CHECK(kept == memory.bytes, "%zu of %zu bytes kept", kept, memory.bytes);
    region_free(&memory);
}
