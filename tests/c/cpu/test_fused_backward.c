/* The gradients of fused calls: values against plain sums in double precision, and errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"

enum {
    MOST_FEATURES = 6,
    MOST_BAGS = 20,
    MOST_ROWS = 400,
    MOST_DIM = 300,
    WIDEST = MOST_FEATURES * MOST_DIM
};

/* A gradient and its inputs; the other weight of the call does not belong to it. */
typedef struct gradient_case {
    rf_fused_backward_params params;
    rf_fused_embedding_bag_params call;
    rf_buffer weights[2];
    rf_feature features[MOST_FEATURES];
    int64_t winners[MOST_BAGS * WIDEST];
    double sums[MOST_ROWS * MOST_DIM], sizes[MOST_ROWS * MOST_DIM]; /* expected, and of magnitudes */
    int64_t lookups[MOST_ROWS];                                     /* of each row */
} gradient_case;

static void draw_features(randomness *random, gradient_case *drawn) {
    static const int64_t other_dim = 7;
    rf_fused_backward_params *params = &drawn->params;
    const bool summed = random_chance(random, 0.4), few = random_chance(random, 0.5);
    int64_t ends[2] = {0, 0}, column = 0;
    for (int64_t f = 0; f < params->n_features; f++) {
        rf_feature *feature = &drawn->features[f];
        const bool shared = f > 0 && random_chance(random, 0.3);
        if (shared) {
            *feature = drawn->features[f - 1];
        } else {
            feature->buffer = random_chance(random, 0.25);
            feature->dim = feature->buffer == params->group ? params->dim : other_dim;
            const int64_t first = ends[feature->buffer] + random_between(random, 0, 3);
            feature->rows = random_between(random, 1, few ? 4 : 60);
            feature->weight_offset = first * feature->dim;
            ends[feature->buffer] = first + feature->rows;
        }
        feature->pooling = summed ? RF_SUM : random_between(random, RF_SUM, RF_MAX);
        feature->padding_idx = random_chance(random, 0.3) ? random_between(random, 0, feature->rows - 1) : -1;
        feature->output_column = column;
        column += feature->dim;
    }
    params->rows = ends[params->group] + random_between(random, 0, 3);
    params->output_dim = column;
    params->features = drawn->features;
    for (int64_t w = 0; w < 2; w++) {
        const int64_t dim = w == params->group ? params->dim : other_dim;
        drawn->weights[w].numel = (w == params->group ? params->rows : ends[w]) * dim;
    }
}

static void draw_contents(randomness *random, arena *memory, gradient_case *drawn) {
    rf_fused_backward_params *params = &drawn->params;
    int64_t offsets[MOST_FEATURES * MOST_BAGS + 1];
    const int64_t all_bags = params->n_features * params->bags;
    params->lookups = arena_offsets(random, offsets, all_bags, false);
    void *to =
        arena_place(random, &memory->offsets, (size_t)(all_bags + 1) * integer_size(params->offset_type));
    for (int64_t i = 0; i <= all_bags; i++) integer_set(to, i, params->offset_type, offsets[i]);
    params->offsets = to;
    void *indices =
        arena_place(random, &memory->indices, (size_t)params->lookups * integer_size(params->index_type));
    bool summed = random_chance(random, 0.5);
    for (int64_t f = 0; f < params->n_features; f++) {
        summed = summed && drawn->features[f].pooling == RF_SUM;
        for (int64_t i = offsets[f * params->bags]; i < offsets[(f + 1) * params->bags]; i++)
            integer_set(indices, i, params->index_type,
                        random_between(random, 0, drawn->features[f].rows - 1));
    }
    params->indices = indices;
    if (summed) {
        float *samples = arena_place(random, &memory->samples, (size_t)params->lookups * sizeof(float));
        for (int64_t i = 0; i < params->lookups; i++) samples[i] = (float)random_normal(random);
        params->sample_weights = samples;
    }
    const int64_t elements = params->bags * params->output_dim;
    void *grad =
        arena_place(random, &memory->weights[2], (size_t)elements * element_size(params->grad_dtype));
    fill_normal(random, grad, elements, params->grad_dtype);
    params->grad = grad;
    for (int64_t w = 0; w < 2; w++) {
        rf_buffer *weight = &drawn->weights[w];
        weight->dtype = params->dtype;
        void *data =
            arena_place(random, &memory->weights[w], (size_t)weight->numel * element_size(weight->dtype));
        fill_normal(random, data, weight->numel, weight->dtype);
        weight->data = data;
    }
}

/* Describes the same call for the forward pass. */
static void describe_call(gradient_case *drawn) {
    const rf_fused_backward_params *params = &drawn->params;
    drawn->call = (rf_fused_embedding_bag_params){.buffers = drawn->weights,
                                                  .n_buffers = 2,
                                                  .features = params->features,
                                                  .n_features = params->n_features,
                                                  .indices = params->indices,
                                                  .lookups = params->lookups,
                                                  .offsets = params->offsets,
                                                  .bags = params->bags,
                                                  .index_type = params->index_type,
                                                  .offset_type = params->offset_type,
                                                  .output_dim = params->output_dim,
                                                  .output_stride = params->output_dim};
}

/* Returns the row of a lookup, or -1 if it does not count. */
static int64_t counted_row(const rf_fused_backward_params *params, const rf_feature *feature, int64_t i) {
    const int64_t row = integer_get(params->indices, i, params->index_type);
    return row == feature->padding_idx ? -1 : row;
}

/* Returns the row of [from, to) with the largest element in a column, the first of equals, or -1. */
static int64_t winner_of(const gradient_case *drawn, const rf_feature *feature, int64_t from, int64_t to,
                         int64_t column) {
    const rf_buffer *weight = &drawn->weights[feature->buffer];
    int64_t winner = -1;
    double best = 0;
    for (int64_t i = from; i < to; i++) {
        const int64_t row = counted_row(&drawn->params, feature, i);
        if (row < 0) continue;
        const double value =
            element_get(weight->data, feature->weight_offset + row * feature->dim + column, weight->dtype);
        if (winner < 0 || value > best) winner = row, best = value;
    }
    return winner;
}

static void add(gradient_case *drawn, int64_t row, int64_t column, double value) {
    drawn->sums[row * drawn->params.dim + column] += value;
    drawn->sizes[row * drawn->params.dim + column] += fabs(value);
}

/* Adds the gradients of a bag to its rows, and checks its winners. */
static void expect_bag(gradient_case *drawn, int64_t f, int64_t bag, const char *label) {
    const rf_fused_backward_params *params = &drawn->params;
    const rf_feature *feature = &params->features[f];
    const int64_t at = f * params->bags + bag,
                  first_row = feature->weight_offset / (feature->dim ? feature->dim : 1);
    const int64_t from = integer_get(params->offsets, at, params->offset_type);
    const int64_t to = integer_get(params->offsets, at + 1, params->offset_type);
    const bool own = feature->buffer == params->group;
    int64_t count = 0;
    for (int64_t i = from; i < to; i++) {
        const int64_t row = counted_row(params, feature, i);
        count += row >= 0;
        if (row >= 0 && own) drawn->lookups[first_row + row]++;
    }
    for (int64_t c = 0; c < feature->dim; c++) {
        const int64_t element = bag * params->output_dim + feature->output_column + c;
        const double grad = element_get(params->grad, element, params->grad_dtype);
        int64_t winner = -1;
        if (feature->pooling == RF_MAX) winner = winner_of(drawn, feature, from, to, c);
        CHECK(drawn->winners[element] == winner, "%s: winner %lld, not %lld", label,
              (long long)drawn->winners[element], (long long)winner);
        if (winner >= 0 && own) add(drawn, first_row + winner, c, grad);
        for (int64_t i = from; own && feature->pooling != RF_MAX && i < to; i++) {
            const int64_t row = counted_row(params, feature, i);
            const double factor = params->sample_weights        ? params->sample_weights[i]
                                  : feature->pooling == RF_MEAN ? 1.0 / (double)count
                                                                : 1.0;
            if (row >= 0) add(drawn, first_row + row, c, factor * grad);
        }
    }
}

static void check_row(const gradient_case *drawn, int64_t row, const void *output, int64_t at,
                      const char *label) {
    const rf_fused_backward_params *params = &drawn->params;
    const double divisor =
        params->scale_grad_by_freq && drawn->lookups[row] > 0 ? (double)drawn->lookups[row] : 1;
    for (int64_t c = 0; c < params->dim; c++) {
        const double want = drawn->sums[row * params->dim + c] / divisor;
        const double size = drawn->sizes[row * params->dim + c] / divisor;
        const double got = element_get(output, at * params->dim + c, params->dtype);
        const double rounding = params->dtype == RF_FLOAT32   ? 0x1p-24
                                : params->dtype == RF_FLOAT16 ? 0x1p-11
                                                              : 0x1p-8;
        const double allowed = size * (rounding + ((double)drawn->lookups[row] + 4) * 0x1p-24) + 0x1p-24;
        const bool same = fabs(got - want) <= allowed;
        CHECK(same, "%s: row %lld column %lld of %lld: %.9g, not %.9g", label, (long long)row, (long long)c,
              (long long)params->dim, got, want);
        if (!same) return;
    }
}

typedef struct sparse_memory {
    const region *values;
    int64_t dim, count, rows[MOST_ROWS];
    rf_dtype dtype;
    rf_status status;
} sparse_memory;

static rf_status give_memory(void *context, int64_t count, int64_t **rows, void **values) {
    sparse_memory *memory = context;
    memory->count = count;
    *rows = memory->rows;
    *values = region_at_end(memory->values, (size_t)(count * memory->dim) * element_size(memory->dtype));
    return memory->status;
}

static void check_sparse(randomness *random, const arena *memory, const gradient_case *drawn,
                         const char *label) {
    const rf_fused_backward_params *params = &drawn->params;
    sparse_memory given = {.values = &memory->output, .dim = params->dim, .dtype = params->dtype};
    const rf_sparse_output output = {give_memory, &given};
    const rf_status status =
        rf_fused_embedding_bag_sparse_backward_cpu(params, &output, executor_any(random));
    CHECK(status == RF_OK, "%s: sparse: %s", label, rf_last_error());
    if (status != RF_OK) return;
    const size_t bytes = (size_t)(given.count * params->dim) * element_size(params->dtype);
    const void *values = region_at_end(&memory->output, bytes);
    int64_t at = 0;
    for (int64_t row = 0; row < params->rows; row++) {
        if (drawn->lookups[row] == 0 || params->dim == 0) continue;
        const bool there = at < given.count && given.rows[at] == row;
        CHECK(there, "%s: sparse: entry %lld of %lld is not row %lld", label, (long long)at,
              (long long)given.count, (long long)row);
        if (!there) return;
        check_row(drawn, row, values, at++, label);
    }
    CHECK(at == given.count, "%s: sparse: %lld rows, not %lld", label, (long long)given.count, (long long)at);
}

static void check_sample_weights(randomness *random, const gradient_case *drawn, const char *label) {
    const rf_fused_backward_params *params = &drawn->params;
    static float output[MOST_FEATURES * MOST_BAGS * 300];
    const rf_status status = rf_fused_embedding_bag_sample_weights_backward_cpu(
        &drawn->call, params->grad, params->grad_dtype, output, executor_any(random));
    CHECK(status == RF_OK, "%s: sample weights: %s", label, rf_last_error());
    for (int64_t at = 0; status == RF_OK && at < params->n_features * params->bags; at++) {
        const rf_feature *feature = &params->features[at / params->bags];
        const rf_buffer *weight = &drawn->weights[feature->buffer];
        const int64_t to = integer_get(params->offsets, at + 1, params->offset_type);
        for (int64_t i = integer_get(params->offsets, at, params->offset_type); i < to; i++) {
            const int64_t row = counted_row(params, feature, i);
            double want = 0, size = 0;
            for (int64_t c = 0; row >= 0 && c < feature->dim; c++) {
                const int64_t element = at % params->bags * params->output_dim + feature->output_column + c;
                const double product =
                    element_get(params->grad, element, params->grad_dtype) *
                    element_get(weight->data, feature->weight_offset + row * feature->dim + c, weight->dtype);
                want += product;
                size += fabs(product);
            }
            CHECK(fabs(output[i] - want) <= size * 0x1p-20, "%s: sample weight %lld: %.9g, not %.9g", label,
                  (long long)i, output[i], want);
        }
    }
}

static void gradient_case_run(randomness *random, arena *memory, gradient_case *drawn) {
    rf_fused_backward_params *params = &drawn->params;
    memset(drawn, 0, sizeof *drawn);
    params->n_features = random_chance(random, 0.03) ? 0 : random_between(random, 1, MOST_FEATURES);
    params->bags = random_chance(random, 0.05) ? 0 : random_between(random, 1, MOST_BAGS);
    params->group = random_chance(random, 0.5);
    params->dim = random_dim(random);
    params->index_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->dtype = random_dtype(random);
    params->grad_dtype = random_dtype(random);
    params->scale_grad_by_freq = random_chance(random, 0.3);
    draw_features(random, drawn);
    draw_contents(random, memory, drawn);
    describe_call(drawn);
    char label[LABEL_BYTES];
    snprintf(label, sizeof label, "gradient features %lld bags %lld rows %lld dim %lld%s",
             (long long)params->n_features, (long long)params->bags, (long long)params->rows,
             (long long)params->dim, params->sample_weights ? " weighted" : "");
    rf_status status = rf_fused_embedding_bag_winners_cpu(&drawn->call, drawn->winners, executor_any(random));
    CHECK(status == RF_OK, "%s: winners: %s", label, rf_last_error());
    params->winners = drawn->winners;
    for (int64_t at = 0; at < params->n_features * params->bags; at++)
        expect_bag(drawn, at / params->bags, at % params->bags, label);
    const size_t bytes = (size_t)(params->rows * params->dim) * element_size(params->dtype);
    void *output = arena_place(random, &memory->output, bytes);
    memset(output, 0xff, bytes);
    status = rf_fused_embedding_bag_backward_cpu(params, output, executor_any(random));
    CHECK(status == RF_OK, "%s: %s", label, rf_last_error());
    for (int64_t row = 0; status == RF_OK && row < params->rows; row++)
        check_row(drawn, row, output, row, label);
    check_sparse(random, memory, drawn, label);
    if (params->sample_weights != NULL) check_sample_weights(random, drawn, label);
}

void test_fused_backward_random(void) {
    randomness random = {11};
    arena memory = arena_new();
    gradient_case *drawn = malloc(sizeof *drawn);
    CHECK(drawn != NULL, "no memory");
    for (int i = 0; drawn != NULL && i < check_rounds; i++) gradient_case_run(&random, &memory, drawn);
    free(drawn);
    arena_free(&memory);
}

/* Many lookups: several chunks and buckets, sorted by radix. The same bits for every executor. */
void test_fused_backward_repeats(void) {
    enum { ROWS = 20000, DIM = 4, BAGS = 3000, LENGTH = 4, LOOKUPS = 2 * BAGS * LENGTH, WIDE = 2 * DIM };
    static float grad[BAGS * WIDE], expected[ROWS * DIM], output[ROWS * DIM];
    static int32_t indices[LOOKUPS], offsets[2 * BAGS + 1];
    randomness random = {12};
    fill_normal(&random, grad, BAGS * WIDE, RF_FLOAT32);
    for (int i = 0; i < LOOKUPS; i++)
        indices[i] = (int32_t)random_between(&random, 0, random_chance(&random, 0.3) ? 2 : ROWS - 1);
    for (int b = 0; b <= 2 * BAGS; b++) offsets[b] = b * LENGTH;
    const rf_feature features[] = {{0, 0, ROWS, DIM, RF_SUM, -1, 0}, {0, 0, ROWS, DIM, RF_MEAN, 1, DIM}};
    const rf_fused_backward_params params = {.features = features,
                                             .n_features = 2,
                                             .indices = indices,
                                             .lookups = LOOKUPS,
                                             .offsets = offsets,
                                             .bags = BAGS,
                                             .grad = grad,
                                             .output_dim = WIDE,
                                             .rows = ROWS,
                                             .dim = DIM};
    CHECK(rf_fused_embedding_bag_backward_cpu(&params, expected, NULL) == RF_OK, "%s", rf_last_error());
    for (int64_t row = 0; row < ROWS; row++) {
        double sum = 0, size = 0;
        for (int i = 0; row % 97 == 0 && i < LOOKUPS; i++) {
            if (indices[i] != row) continue;
            int counted = 0;
            const int at = i / LENGTH, bag = at % BAGS, first = at < BAGS ? 0 : DIM;
            for (int k = at * LENGTH; k < (at + 1) * LENGTH; k++) counted += first == 0 || indices[k] != 1;
            const double value = grad[bag * WIDE + first] / (first == 0 ? 1.0 : counted);
            sum += value;
            size += fabs(value);
        }
        const double error = row % 97 == 0 ? fabs(expected[row * DIM] - sum) : 0;
        CHECK(error <= size * 0x1p-10, "row %lld: %.9g, not %.9g", (long long)row, expected[row * DIM], sum);
    }
    const rf_executor *executors[] = {&executor_serial, &executor_whole, &executor_threads};
    for (size_t e = 0; e < sizeof executors / sizeof executors[0]; e++) {
        memset(output, 0xff, sizeof output);
        CHECK(rf_fused_embedding_bag_backward_cpu(&params, output, executors[e]) == RF_OK, "%s",
              rf_last_error());
        CHECK(memcmp(output, expected, sizeof output) == 0, "executor %zu gives other bits", e);
    }
    CHECK(rf_fused_embedding_bag_backward_cpu(&params, output, &executor_failing) == RF_ERR_INTERNAL, "%s",
          rf_last_error());
}

#define BACKWARD(want, words, change)                                                                   \
    do {                                                                                                \
        int64_t indices[] = {0, 1}, offsets[] = {0, 1, 2};                                              \
        float grad[] = {1, 2, 3, 4}, output[6];                                                         \
        rf_feature features[] = {{0, 2, 2, 2, RF_SUM, -1, 0}};                                          \
        sparse_memory given = {.status = RF_OK, .values = &memory.output, .dim = 2};                    \
        rf_sparse_output sparse = {give_memory, &given};                                                \
        rf_fused_backward_params params = {.features = features,                                        \
                                           .n_features = 1,                                             \
                                           .indices = indices,                                          \
                                           .lookups = 2,                                                \
                                           .offsets = offsets,                                          \
                                           .bags = 2,                                                   \
                                           .index_type = RF_INT64,                                      \
                                           .offset_type = RF_INT64,                                     \
                                           .grad = grad,                                                \
                                           .output_dim = 2,                                             \
                                           .rows = 3,                                                   \
                                           .dim = 2};                                                   \
        void *to = output;                                                                              \
        change;                                                                                         \
        rf_status dense_status = rf_fused_embedding_bag_backward_cpu(&params, to, NULL);                \
        CHECK(dense_status == want || to == output, "dense: %s: %s", rf_status_text(dense_status),      \
              rf_last_error());                                                                         \
        rf_status status = rf_fused_embedding_bag_sparse_backward_cpu(&params, &sparse, NULL);          \
        if (to == NULL) status = dense_status;                                                          \
        CHECK(status == want, "%s: %s", rf_status_text(status), rf_last_error());                       \
        CHECK(want == RF_OK || strstr(rf_last_error(), words), "no %s in: %s", words, rf_last_error()); \
    } while (0)

void test_fused_backward_errors(void) {
    arena memory = arena_new();
    BACKWARD(RF_OK, "", (void)0);
    BACKWARD(RF_OK, "", indices[1] = -5);
    BACKWARD(RF_OK, "", indices[1] = INT64_MAX);
    BACKWARD(RF_OK, "", offsets[1] = INT64_MIN);
    BACKWARD(RF_OK, "", offsets[2] = INT64_MAX);
    BACKWARD(RF_OK, "", params.group = 1);
    BACKWARD(RF_ERR_VALUE, "sizes", params.rows = -1);
    BACKWARD(RF_ERR_VALUE, "sizes", params.dim = INT64_MAX);
    BACKWARD(RF_ERR_VALUE, "sizes", params.bags = INT64_MAX);
    BACKWARD(RF_ERR_VALUE, "lookups", params.lookups = -1);
    BACKWARD(RF_ERR_TYPE, "index_type", params.index_type = 9);
    BACKWARD(RF_ERR_TYPE, "grad_dtype", params.grad_dtype = 9);
    BACKWARD(RF_ERR_TYPE, "dtype", params.dtype = 9);
    BACKWARD(RF_ERR_VALUE, "offsets", params.offsets = NULL);
    BACKWARD(RF_ERR_VALUE, "indices", params.indices = NULL);
    BACKWARD(RF_ERR_VALUE, "grad", params.grad = NULL);
    BACKWARD(RF_ERR_VALUE, "output", to = NULL);
    BACKWARD(RF_ERR_VALUE, "whole rows", features[0].weight_offset = 3);
    BACKWARD(RF_ERR_VALUE, "whole rows", features[0].weight_offset = -2);
    BACKWARD(RF_ERR_VALUE, "whole rows", features[0].rows = 3);
    BACKWARD(RF_ERR_VALUE, "whole rows", features[0].rows = INT64_MAX);
    BACKWARD(RF_ERR_VALUE, "whole rows", features[0].dim = 1);
    BACKWARD(RF_ERR_VALUE, "columns", features[0].output_column = 1);
    BACKWARD(RF_ERR_VALUE, "columns", features[0].output_column = -1);
    BACKWARD(RF_ERR_VALUE, "pooling", features[0].pooling = 7);
    BACKWARD(RF_ERR_VALUE, "winners", features[0].pooling = RF_MAX);
    BACKWARD(RF_ERR_VALUE, "padding_idx", features[0].padding_idx = 2);
    /* The call returns the error of the allocator. */
    int64_t index = 0, offsets[] = {0, 1};
    const float grad[] = {1};
    const rf_feature feature = {0, 0, 1, 1, RF_SUM, -1, 0};
    const rf_fused_backward_params params = {.features = &feature,
                                             .n_features = 1,
                                             .indices = &index,
                                             .lookups = 1,
                                             .offsets = offsets,
                                             .bags = 1,
                                             .index_type = RF_INT64,
                                             .offset_type = RF_INT64,
                                             .grad = grad,
                                             .output_dim = 1,
                                             .rows = 1,
                                             .dim = 1};
    sparse_memory given = {.values = &memory.output, .dim = 1, .status = RF_ERR_MEMORY};
    const rf_sparse_output sparse = {give_memory, &given};
    const rf_status status = rf_fused_embedding_bag_sparse_backward_cpu(&params, &sparse, NULL);
    CHECK(status == RF_ERR_MEMORY && given.count == 1, "%s", rf_status_text(status));
    arena_free(&memory);
}
