#include "fused_case.h"

#include <string.h>

enum { STEP = 1024, PLACES = 4096, NUMEL = 1 << 20 };

static _Alignas(256) char memory[STEP * PLACES]; /* of tables; no lock, because only its addresses are used */
static _Alignas(256) char output[256];

static void columns_set(fused_case *made) {
    int64_t column = 0;
    for (int64_t f = 0; f < made->params.n_features; f++) {
        made->features[f].output_column = column;
        column += made->features[f].dim;
    }
    made->params.output_dim = column;
    if (made->params.output_stride < column) made->params.output_stride = column;
}

static void case_begin(fused_case *made, int number) {
    memset(made, 0, sizeof *made);
    made->buffers[0] =
        (rf_buffer){.data = &memory[(size_t)number % PLACES * STEP], .numel = NUMEL, .dtype = RF_FLOAT32};
    made->buffers[1] = (rf_buffer){
        .data = &memory[(size_t)number % PLACES * STEP + 512], .numel = NUMEL, .dtype = RF_FLOAT16};
    made->params = (rf_fused_embedding_bag_params){.buffers = made->buffers,
                                                   .n_buffers = 2,
                                                   .features = made->features,
                                                   .indices = output,
                                                   .offsets = output,
                                                   .index_type = RF_INT64,
                                                   .offset_type = RF_INT64,
                                                   .check_bounds = true,
                                                   .prefetch_distance = -1,
                                                   .output_dtype = RF_FLOAT32,
                                                   .output = output};
    made->plan.schedules = made->schedules;
}

void fused_case_fixed(fused_case *made, int number) {
    static const int64_t dims[FIXED_FEATURES] = {8, 128, 16, 64},
                         poolings[] = {RF_SUM, RF_MEAN, RF_MAX, RF_SUM};
    static const int32_t expected[FIXED_FEATURES] = {16, 80 * 16, -1, 500 * 16};
    case_begin(made, number);
    made->params.n_features = FIXED_FEATURES;
    made->params.bags = 100;
    made->params.lookups = 60000;
    for (int f = 0; f < FIXED_FEATURES; f++) {
        made->features[f] = (rf_feature){.weight_offset = 128 * f,
                                         .rows = 1000 + f,
                                         .dim = dims[f],
                                         .pooling = poolings[f],
                                         .padding_idx = f == 1 ? 7 : -1};
        made->schedules[f].expected = expected[f];
    }
    made->schedules[3].split = 2;
    columns_set(made);
}

static rf_fused_schedule random_schedule(randomness *random, const rf_feature *feature) {
    static const int32_t distances[] = {0, 1, 2, 4, 8, 16};
    rf_fused_schedule one = {.expected = (int32_t)random_between(random, -1, 300 * 16)};
    if (random_chance(random, 0.3)) one.expected = 0;
    if (random_chance(random, 0.5)) return one;
    one.kind = random_chance(random, 0.3) ? RF_FUSED_KIND_COLUMNS : RF_FUSED_KIND_POOL;
    /* Tables of few bytes, with whole vectors and a source of copies. */
    if (feature->pooling != RF_MAX && feature->dim == 8 && feature->rows > 0 && feature->rows % 8 == 0 &&
        feature->weight_offset % 8 == 0 && random_chance(random, 0.9)) {
        one.kind = RF_FUSED_KIND_STAGED;
        return one;
    }
    one.distance = distances[random_between(random, 0, 5)];
    if (one.kind == RF_FUSED_KIND_POOL && feature->pooling != RF_MAX) {
        one.threads = random_chance(random, 0.5) ? 0 : random_chance(random, 0.5) ? 32 : 64;
        one.split = random_chance(random, 0.3) ? (int32_t)random_between(random, 2, 8) : 0;
    }
    return one;
}

void fused_case_random(fused_case *made, randomness *random) {
    static const int64_t dims[] = {1, 4, 7, 8, 16, 24, 32, 64, 100, 128, 256, 700};
    case_begin(made, (int)random_between(random, 0, PLACES - 1));
    made->params.n_features = random_between(random, 1, random_chance(random, 0.2) ? MOST_FEATURES : 6);
    made->params.bags =
        random_chance(random, 0.3) ? random_between(random, 1, 9) : random_between(random, 10, 3000);
    made->params.output_dtype = random_chance(random, 0.5) ? RF_FLOAT32 : RF_FLOAT16;
    made->params.index_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    made->params.offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    for (int64_t f = 0; f < made->params.n_features; f++) {
        rf_feature *feature = &made->features[f];
        feature->buffer = random_between(random, 0, 1);
        feature->dim = random_chance(random, 0.05) ? 0 : dims[random_between(random, 0, 11)];
        feature->rows =
            random_chance(random, 0.5) ? 8 * random_between(random, 0, 99) : random_between(random, 0, 900);
        feature->weight_offset =
            random_chance(random, 0.7) ? 64 * random_between(random, 0, 99) : random_between(random, 0, 99);
        feature->pooling = random_between(random, RF_SUM, RF_MAX);
        feature->padding_idx = feature->rows > 0 && random_chance(random, 0.3) ? feature->rows - 1 : -1;
        made->schedules[f] = random_schedule(random, feature);
    }
    columns_set(made);
}
