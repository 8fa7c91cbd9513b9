/* Updates of fused calls: against gradients and plain steps in double precision, and errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"

enum { MOST_BAGS = 20, MOST_LENGTH = 12, MOST_ROWS = 30, MOST_DIM = 300, FEATURES = 3 };

/* A call with two matrices; the second has two features of one table. Weights and states end at guard
 * pages. */
typedef struct update_case {
    rf_fused_update_params params;
    rf_update_matrix matrices[2];
    rf_feature features[FEATURES];
    int64_t indices[FEATURES * MOST_BAGS * MOST_LENGTH], offsets[FEATURES * MOST_BAGS + 1];
    float numbers[RF_UPDATE_NUMBERS], grad[MOST_BAGS * FEATURES * MOST_DIM];
    float sums[MOST_ROWS * MOST_DIM];
    double before[3][MOST_ROWS * MOST_DIM]; /* weight and states */
} update_case;

static void draw(randomness *random, update_case *drawn) {
    rf_fused_update_params *params = &drawn->params;
    int64_t column = 0, at = 0;
    memset(drawn, 0, sizeof *drawn);
    for (int m = 0; m < 2; m++) {
        const int64_t dim = random_dim(random);
        drawn->matrices[m] = (rf_update_matrix){.rows = random_between(random, 1, MOST_ROWS),
                                                .dim = dim < MOST_DIM ? dim : MOST_DIM,
                                                .dtype = random_dtype(random)};
    }
    params->bags = random_between(random, 0, MOST_BAGS);
    for (int64_t f = 0; f < FEATURES; f++) {
        const rf_update_matrix *matrix = &drawn->matrices[f > 0];
        const int64_t first = f == 0 ? random_between(random, 0, matrix->rows - 1) : 0;
        drawn->features[f] = (rf_feature){.buffer = f > 0,
                                          .weight_offset = first * matrix->dim,
                                          .rows = matrix->rows - first,
                                          .dim = matrix->dim,
                                          .pooling = random_chance(random, 0.5) ? RF_MEAN : RF_SUM,
                                          .padding_idx = random_chance(random, 0.3) ? 0 : -1,
                                          .output_column = column};
        column += matrix->dim;
        for (int64_t b = 0; b < params->bags; b++) {
            const int64_t length = random_between(random, 0, MOST_LENGTH);
            for (int64_t i = 0; i < length; i++) /* some outside of the table */
                drawn->indices[at++] = random_between(random, -1, drawn->features[f].rows);
            drawn->offsets[f * params->bags + b + 1] = at;
        }
    }
    params->features = drawn->features;
    params->n_features = FEATURES;
    params->indices = drawn->indices;
    params->lookups = at;
    params->offsets = drawn->offsets;
    params->index_type = params->offset_type = RF_INT64;
    params->grad = drawn->grad;
    params->output_dim = column;
    fill_normal(random, drawn->grad, params->bags * column, RF_FLOAT32);
    params->matrices = drawn->matrices;
    params->n_matrices = 2;
    const float numbers[] = {0.1f, 0.01f, 1e-6f, 0.9f, 0.99f, (float)random_between(random, 1, 5), 0.5f, 0};
    memcpy(drawn->numbers, numbers, sizeof numbers);
    params->update = (rf_update){.optimizer = (rf_optimizer)random_between(random, RF_SGD, RF_ADAM),
                                 .numbers = drawn->numbers};
}

static int64_t state_elements(rf_optimizer optimizer, const rf_update_matrix *matrix) {
    return optimizer == RF_ROWWISE_ADAGRAD ? matrix->rows : matrix->rows * matrix->dim;
}

static int states_of(rf_optimizer optimizer) {
    return optimizer == RF_SGD ? 0 : optimizer == RF_ADAM ? 2 : 1;
}

/* Allocates a matrix with random values; regions [3]: of its weight and states. */
static void give_memory(randomness *random, const region *regions, rf_optimizer optimizer,
                        rf_update_matrix *matrix) {
    const int64_t elements = matrix->rows * matrix->dim, of_state = state_elements(optimizer, matrix);
    matrix->weight = region_at_end(&regions[0], (size_t)elements * element_size(matrix->dtype));
    fill_normal(random, matrix->weight, elements, matrix->dtype);
    for (int s = 0; s < states_of(optimizer); s++) {
        float *state = region_at_end(&regions[1 + s], (size_t)of_state * sizeof(float));
        for (int64_t i = 0; i < of_state; i++) state[i] = 0.1f + (float)fabs(random_normal(random));
        matrix->states[s] = state;
    }
}

/* Makes the step of a row in double precision: before and after are [dim] of weight and states. */
static void step_row(const rf_update *update, int64_t dim, const float *sum, double *weight, double *first,
                     double *second) {
    const double lr = update->numbers[RF_UPDATE_LR], decay = update->numbers[RF_UPDATE_WEIGHT_DECAY];
    const double eps = update->numbers[RF_UPDATE_EPS], b1 = update->numbers[RF_UPDATE_BETA1];
    const double b2 = update->numbers[RF_UPDATE_BETA2], step = update->numbers[RF_UPDATE_STEP];
    const double correction = sqrt(1 - pow(b2, step)) / (1 - pow(b1, step));
    double g[MOST_DIM], mean = 0;
    for (int64_t c = 0; c < dim; c++) {
        g[c] = sum[c] * (double)update->numbers[RF_UPDATE_GRAD_SCALE] + decay * weight[c];
        mean += g[c] * g[c] / (double)dim;
    }
    if (update->optimizer == RF_ROWWISE_ADAGRAD) *first += mean;
    for (int64_t c = 0; c < dim; c++) {
        if (update->optimizer == RF_SGD) weight[c] -= lr * g[c];
        if (update->optimizer == RF_ROWWISE_ADAGRAD) weight[c] -= lr * g[c] / (sqrt(*first) + eps);
        if (update->optimizer == RF_ADAGRAD) {
            first[c] += g[c] * g[c];
            weight[c] -= lr * g[c] / (sqrt(first[c]) + eps);
        }
        if (update->optimizer == RF_ADAM) {
            first[c] = b1 * first[c] + (1 - b1) * g[c];
            second[c] = b2 * second[c] + (1 - b2) * g[c] * g[c];
            weight[c] -= lr * correction * first[c] / (sqrt(second[c]) + eps);
        }
    }
}

static void check_matrix(const update_case *drawn, int m, const bool *looked_up, const char *label) {
    const rf_update_matrix *matrix = &drawn->matrices[m];
    const rf_optimizer optimizer = drawn->params.update.optimizer;
    static double want[3][MOST_ROWS * MOST_DIM];
    const int64_t pitch = optimizer == RF_ROWWISE_ADAGRAD ? 1 : matrix->dim;
    memcpy(want, drawn->before, sizeof want);
    for (int64_t row = 0; row < matrix->rows; row++)
        if (looked_up[row])
            step_row(&drawn->params.update, matrix->dim, drawn->sums + row * matrix->dim,
                     want[0] + row * matrix->dim, want[1] + row * pitch, want[2] + row * pitch);
    const double rounding = matrix->dtype == RF_FLOAT32   ? 0x1p-20
                            : matrix->dtype == RF_FLOAT16 ? 0x1p-10
                                                          : 0x1p-7;
    for (int64_t i = 0; i < matrix->rows * matrix->dim; i++) {
        const double got = element_get(matrix->weight, i, matrix->dtype);
        const double allowed = looked_up[i / matrix->dim] ? rounding * (1 + fabs(want[0][i])) : 0;
        CHECK(fabs(got - want[0][i]) <= allowed, "%s: weight %d at %lld: %.9g, not %.9g", label, m,
              (long long)i, got, want[0][i]);
    }
    for (int s = 0; s < states_of(optimizer); s++)
        for (int64_t i = 0; i < state_elements(optimizer, matrix); i++)
            CHECK(fabs((double)matrix->states[s][i] - want[1 + s][i]) <= 0x1p-18 * (1 + fabs(want[1 + s][i])),
                  "%s: state %d of %d at %lld: %.9g, not %.9g", label, s, m, (long long)i,
                  (double)matrix->states[s][i], want[1 + s][i]);
}

static void update_case_run(randomness *random, const region *regions, update_case *drawn) {
    rf_fused_update_params *params = &drawn->params;
    const rf_optimizer optimizer = params->update.optimizer;
    const rf_executor *executor = executor_any(random);
    char label[LABEL_BYTES];
    for (int m = 0; m < 2; m++) {
        rf_update_matrix *matrix = &drawn->matrices[m];
        bool looked_up[MOST_ROWS] = {false};
        const rf_fused_backward_params gradient = {.features = params->features,
                                                   .n_features = FEATURES,
                                                   .indices = params->indices,
                                                   .lookups = params->lookups,
                                                   .offsets = params->offsets,
                                                   .bags = params->bags,
                                                   .index_type = RF_INT64,
                                                   .offset_type = RF_INT64,
                                                   .grad = params->grad,
                                                   .output_dim = params->output_dim,
                                                   .group = m,
                                                   .rows = matrix->rows,
                                                   .dim = matrix->dim};
        snprintf(label, sizeof label, "update %d of %lld x %lld, dtype %d", (int)optimizer,
                 (long long)matrix->rows, (long long)matrix->dim, (int)matrix->dtype);
        give_memory(random, regions, optimizer, matrix);
        for (int64_t i = 0; i < matrix->rows * matrix->dim; i++)
            drawn->before[0][i] = element_get(matrix->weight, i, matrix->dtype);
        for (int s = 0; s < states_of(optimizer); s++)
            for (int64_t i = 0; i < state_elements(optimizer, matrix); i++)
                drawn->before[1 + s][i] = (double)matrix->states[s][i];
        rf_status status = rf_fused_embedding_bag_backward_cpu(&gradient, drawn->sums, NULL);
        CHECK(status == RF_OK, "%s: %s", label, rf_last_error());
        for (int64_t f = 0; f < FEATURES && matrix->dim > 0; f++) {
            const rf_feature *feature = &drawn->features[f];
            for (int64_t i = drawn->offsets[f * params->bags];
                 feature->buffer == m && i < drawn->offsets[(f + 1) * params->bags]; i++) {
                const int64_t row = drawn->indices[i];
                if (row >= 0 && row < feature->rows && row != feature->padding_idx)
                    looked_up[feature->weight_offset / matrix->dim + row] = true;
            }
        }
        drawn->matrices[1 - m].weight = NULL; /* does not change */
        status = rf_fused_embedding_bag_update_cpu(params, executor);
        CHECK(status == RF_OK, "%s: %s", label, rf_last_error());
        check_matrix(drawn, m, looked_up, label);
    }
}

void test_fused_update_random(void) {
    randomness random = {13};
    update_case *drawn = malloc(sizeof *drawn);
    region regions[3];
    for (int i = 0; i < 3; i++) regions[i] = region_new(MOST_ROWS * MOST_DIM * sizeof(float));
    CHECK(drawn != NULL, "no memory");
    for (int i = 0; drawn != NULL && i < check_rounds; i++) {
        draw(&random, drawn);
        update_case_run(&random, regions, drawn);
    }
    for (int i = 0; i < 3; i++) region_free(&regions[i]);
    free(drawn);
}

/* Several chunks, buckets and tasks: the same bits for every executor, and as from summed rows. */
void test_fused_update_repeats(void) {
    enum { ROWS = 3000, DIM = 4, BAGS = 2000, LOOKUPS = BAGS * 5 };
    static float grad[BAGS * DIM], expected[ROWS * DIM], weight[ROWS * DIM], sum[ROWS], sums[ROWS * DIM];
    static int64_t indices[LOOKUPS], offsets[BAGS + 1], rows[ROWS];
    const float numbers[RF_UPDATE_NUMBERS] = {0.1f, 0, 1e-6f, 0.9f, 0.99f, 1, 1, 0};
    const rf_feature feature = {0, 0, ROWS, DIM, RF_SUM, -1, 0};
    randomness random = {14};
    fill_normal(&random, grad, BAGS * DIM, RF_FLOAT32);
    for (int i = 0; i < LOOKUPS; i++)
        indices[i] = random_between(&random, 0, random_chance(&random, 0.3) ? 2 : ROWS - 1);
    for (int b = 0; b <= BAGS; b++) offsets[b] = b * 5;
    for (int r = 0; r < ROWS; r++) rows[r] = r;
    const rf_update_matrix matrix = {weight, {sum, NULL}, ROWS, DIM, RF_FLOAT32};
    const rf_update update = {.optimizer = RF_ROWWISE_ADAGRAD, .numbers = numbers};
    const rf_fused_update_params params = {.features = &feature,
                                           .n_features = 1,
                                           .indices = indices,
                                           .lookups = LOOKUPS,
                                           .offsets = offsets,
                                           .bags = BAGS,
                                           .index_type = RF_INT64,
                                           .offset_type = RF_INT64,
                                           .grad = grad,
                                           .output_dim = DIM,
                                           .matrices = &matrix,
                                           .n_matrices = 1,
                                           .update = update};
    const rf_fused_backward_params gradient = {.features = &feature,
                                               .n_features = 1,
                                               .indices = indices,
                                               .lookups = LOOKUPS,
                                               .offsets = offsets,
                                               .bags = BAGS,
                                               .index_type = RF_INT64,
                                               .offset_type = RF_INT64,
                                               .grad = grad,
                                               .output_dim = DIM,
                                               .rows = ROWS,
                                               .dim = DIM};
    const rf_rows_update_params summed = {
        .rows = rows, .sums = sums, .count = ROWS, .matrix = matrix, .update = update};
    CHECK(rf_fused_embedding_bag_backward_cpu(&gradient, sums, NULL) == RF_OK, "%s", rf_last_error());
    const rf_executor *executors[] = {NULL, &executor_serial, &executor_whole, &executor_threads};
    for (int way = 0; way < 2; way++) {
        for (size_t e = 0; e < sizeof executors / sizeof executors[0]; e++) {
            memset(weight, 0, sizeof weight);
            memset(sum, 0, sizeof sum);
            const rf_status status = way == 0 ? rf_fused_embedding_bag_update_cpu(&params, executors[e])
                                              : rf_rows_update_cpu(&summed, executors[e]);
            CHECK(status == RF_OK, "%s", rf_last_error());
            if (way == 0 && e == 0) memcpy(expected, weight, sizeof weight);
            CHECK(memcmp(weight, expected, sizeof weight) == 0, "way %d, executor %zu: other bits", way, e);
        }
    }
    CHECK(rf_fused_embedding_bag_update_cpu(&params, &executor_failing) == RF_ERR_INTERNAL, "%s",
          rf_last_error());
    CHECK(rf_rows_update_cpu(&summed, &executor_failing) == RF_ERR_INTERNAL, "%s", rf_last_error());
}

#define UPDATE(want, words, change)                                                                         \
    do {                                                                                                    \
        int64_t indices[] = {0, 1}, offsets[] = {0, 1, 2}, rows[] = {0, 2};                                 \
        float grad[] = {1, 2, 3, 4}, weight[6] = {0}, state[6] = {0}, numbers[RF_UPDATE_NUMBERS] = {0};     \
        rf_feature features[] = {{0, 2, 2, 2, RF_SUM, -1, 0}};                                              \
        rf_update_matrix matrix = {weight, {state, state}, 3, 2, RF_FLOAT32};                               \
        rf_update update = {.optimizer = RF_ADAGRAD, .numbers = numbers};                                   \
        rf_fused_update_params params = {.features = features,                                              \
                                         .n_features = 1,                                                   \
                                         .indices = indices,                                                \
                                         .lookups = 2,                                                      \
                                         .offsets = offsets,                                                \
                                         .bags = 2,                                                         \
                                         .index_type = RF_INT64,                                            \
                                         .offset_type = RF_INT64,                                           \
                                         .grad = grad,                                                      \
                                         .output_dim = 2,                                                   \
                                         .n_matrices = 1};                                                  \
        rf_rows_update_params summed = {.rows = rows, .sums = grad, .count = 2};                            \
        bool of_rows = false;                                                                               \
        change;                                                                                             \
        params.matrices = &matrix;                                                                          \
        params.update = summed.update = update;                                                             \
        summed.matrix = matrix;                                                                             \
        const rf_status status =                                                                            \
            of_rows ? rf_rows_update_cpu(&summed, NULL) : rf_fused_embedding_bag_update_cpu(&params, NULL); \
        CHECK(status == want, "%s: %s", rf_status_text(status), rf_last_error());                           \
        CHECK(want == RF_OK || strstr(rf_last_error(), words), "no %s in: %s", words, rf_last_error());     \
    } while (0)

void test_fused_update_errors(void) {
    UPDATE(RF_OK, "", (void)0);
    UPDATE(RF_OK, "", of_rows = true);
    UPDATE(RF_OK, "", features[0].buffer = -1);
    UPDATE(RF_OK, "", matrix.weight = NULL);
    UPDATE(RF_OK, "", (of_rows = true, rows[1] = INT64_MIN));
    UPDATE(RF_OK, "", (of_rows = true, rows[1] = 3));
    UPDATE(RF_ERR_VALUE, "weight 1; expected one of 1", features[0].buffer = 1);
    UPDATE(RF_ERR_VALUE, "weight -2", features[0].buffer = -2);
    UPDATE(RF_ERR_VALUE, "n_matrices is -1", params.n_matrices = -1);
    UPDATE(RF_ERR_VALUE, "optimizer", update.optimizer = (rf_optimizer)4);
    UPDATE(RF_ERR_VALUE, "numbers", update.numbers = NULL);
    UPDATE(RF_ERR_VALUE, "state 0", matrix.states[0] = NULL);
    UPDATE(RF_ERR_VALUE, "state 1", (update.optimizer = RF_ADAM, matrix.states[1] = NULL));
    UPDATE(RF_ERR_VALUE, "sizes", matrix.rows = -1);
    UPDATE(RF_ERR_VALUE, "sizes", matrix.dim = INT64_MAX);
    UPDATE(RF_ERR_TYPE, "dtype", matrix.dtype = RF_FLOAT64);
    UPDATE(RF_ERR_TYPE, "grad_dtype", params.grad_dtype = RF_FLOAT64);
    UPDATE(RF_ERR_VALUE, "whole rows", features[0].weight_offset = 1);
    UPDATE(RF_ERR_VALUE, "winners", features[0].pooling = RF_MAX);
    UPDATE(RF_ERR_VALUE, "grad", params.grad = NULL);
    UPDATE(RF_ERR_VALUE, "rows", (of_rows = true, summed.rows = NULL));
    UPDATE(RF_ERR_VALUE, "sums", (of_rows = true, summed.sums = NULL));
    UPDATE(RF_ERR_VALUE, "sizes", (of_rows = true, summed.count = -1));
    UPDATE(RF_ERR_TYPE, "sums_dtype", (of_rows = true, summed.sums_dtype = RF_FLOAT64));
}
