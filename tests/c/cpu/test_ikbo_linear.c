/* rf_ikbo_add_cpu against double precision, on arrays that end where memory does, and its errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { MOST_ITEMS = 9, MOST_ELEMENTS = 700, REGION_BYTES = 1 << 16 };

typedef struct problem {
    rf_ikbo_add_params params;
    double *before; /* [count, m, n]: `out` before the call */
} problem;

static void fill(randomness *random, void *data, int64_t count, rf_dtype dtype) {
    for (int64_t i = 0; i < count; i++) element_set(data, i, dtype, random_normal(random));
}

static problem draw(randomness *random, const region memory[4]) {
    const rf_dtype dtype = (rf_dtype)random_between(random, RF_FLOAT32, RF_FLOAT64);
    const rf_int_type type = (rf_int_type)random_between(random, RF_INT32, RF_INT64);
    const bool rows = random_chance(random, 0.3), own = random_chance(random, 0.1);
    rf_ikbo_add_params params = {.count = random_between(random, 0, MOST_ITEMS),
                                 .m = rows ? 1 : random_between(random, 0, 12),
                                 .n = random_between(random, 0, random_chance(random, 0.1) ? 300 : 40),
                                 .dtype = dtype,
                                 .parents = random_between(random, 1, MOST_ITEMS),
                                 .parent_type = type,
                                 .bias_on_n = rows,
                                 .activation = (rf_activation)random_between(random, 0, 3),
                                 .replace = random_chance(random, 0.2),
                                 .check_bounds = random_chance(random, 0.8),
                                 .map = (int32_t)random_between(random, -1, 2)};
    while (params.m * params.n > MOST_ELEMENTS) params.m--;
    if (own) params.parents = params.count;
    const int64_t item = params.m * params.n, biases = rows ? params.n : params.m;
    const size_t bytes = element_size(dtype);
    params.out = region_at_end(&memory[0], (size_t)(params.count * item) * bytes);
    params.base = region_at_end(&memory[1], (size_t)(params.parents * item) * bytes);
    void *parent = region_at_end(&memory[2], (size_t)params.count * integer_size(type));
    void *bias = region_at_end(&memory[3], (size_t)biases * bytes);
    fill(random, params.out, params.count * item, dtype);
    fill(random, (void *)params.base, params.parents * item, dtype);
    fill(random, bias, biases, dtype);
    for (int64_t i = 0; i < params.count; i++)
        integer_set(parent, i, type, random_between(random, 0, params.parents - 1));
    params.parent = own ? NULL : parent;
    params.bias = random_chance(random, 0.5) ? bias : NULL;
    problem drawn = {params, calloc((size_t)(params.count * item) + 1, sizeof(double))};
    for (int64_t i = 0; drawn.before != NULL && i < params.count * item; i++)
        drawn.before[i] = element_get(params.out, i, dtype);
    return drawn;
}

static double activated(rf_activation activation, double x) {
    if (activation == RF_ACTIVATION_RELU) return x < 0 ? 0 : x;
    if (activation == RF_ACTIVATION_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
    return activation == RF_ACTIVATION_SILU ? x / (1 + exp(-x)) : x;
}

static void compare(const problem *drawn, int round) {
    static const double epsilons[] = {0x1p-22, 0x1p-10, 0x1p-7, 0x1p-50}; /* [rf_dtype] */
    const rf_ikbo_add_params *params = &drawn->params;
    const int64_t item = params->m * params->n;
    for (int64_t i = 0; i < params->count * item; i++) {
        const int64_t of = i / item, at = i % item;
        const int64_t parent = params->parent ? integer_get(params->parent, of, params->parent_type) : of;
        double sum = element_get(params->base, parent * item + at, params->dtype);
        if (!params->replace) sum += drawn->before[i];
        if (params->bias != NULL)
            sum += element_get(params->bias, params->bias_on_n ? at : at / params->n, params->dtype);
        const double want = activated(params->activation, sum);
        const double got = element_get(params->out, i, params->dtype);
        CHECK(fabs(got - want) <= epsilons[params->dtype] * (8 + fabs(want)),
              "round %d, %s, element %lld of item %lld: %.9g instead of %.9g", round,
              dtype_name(params->dtype), (long long)at, (long long)of, got, want);
    }
}

void test_ikbo_add_random(void) {
    randomness random = {20};
    region memory[4];
    for (int i = 0; i < 4; i++) memory[i] = region_new(REGION_BYTES);
    for (int round = 0; round < check_rounds; round++) {
        problem drawn = draw(&random, memory);
        const rf_status status = rf_ikbo_add_cpu(&drawn.params, executor_any(&random));
        CHECK(status == RF_OK && drawn.before != NULL, "round %d: %s", round, rf_last_error());
        if (drawn.before != NULL) compare(&drawn, round);
        free(drawn.before);
    }
    for (int i = 0; i < 4; i++) region_free(&memory[i]);
}

/* A valid call, modified by a statement, returns a status and a message with these words; `out` does not
 * change. */
#define ADD(want, words, change)                                                                             \
    do {                                                                                                     \
        float out[4] = {1, 2, 3, 4};                                                                         \
        const float base[] = {10, 20, 30, 40}, bias[] = {1};                                                 \
        int32_t parent[] = {1, 0};                                                                           \
        rf_ikbo_add_params call = {.out = out,                                                               \
                                   .count = 2,                                                               \
                                   .m = 1,                                                                   \
                                   .n = 2,                                                                   \
                                   .base = base,                                                             \
                                   .parents = 2,                                                             \
                                   .parent = parent,                                                         \
                                   .bias = bias,                                                             \
                                   .check_bounds = true,                                                     \
                                   .map = -1};                                                               \
        change;                                                                                              \
        const rf_status status = rf_ikbo_add_cpu(&call, NULL);                                               \
        CHECK(status == (want) && (status == RF_OK || strstr(rf_last_error(), words) != NULL), "%s: %s, %s", \
              #change, rf_status_text(status), rf_last_error());                                             \
        CHECK(out[0] == (status == RF_OK ? 32 : 1) && out[3] == (status == RF_OK ? 25 : 4), "%s: %g, %g",    \
              #change, (double)out[0], (double)out[3]);                                                      \
    } while (0)

void test_ikbo_add_errors(void) {
    ADD(RF_OK, "", (void)0);
    ADD(RF_ERR_INDEX, "recfuse.ikbo_linear: cand_to_user[1] is 2; expected 0 to 1", parent[1] = 2);
    ADD(RF_ERR_INDEX, "ikbo_linear_chain: maps[2][0] is -5; expected 0 to 1, since inputs[2] has 2 items",
        (parent[0] = -5, call.map = 2));
    ADD(RF_ERR_INDEX, "no index is valid, since x_user has 0 items", call.parents = 0);
    ADD(RF_ERR_TYPE, "dtype is 4", call.dtype = (rf_dtype)4);
    ADD(RF_ERR_TYPE, "parent_type is 7", call.parent_type = (rf_int_type)7);
    ADD(RF_ERR_VALUE, "activation is 9", call.activation = (rf_activation)9);
    ADD(RF_ERR_VALUE, "expected sizes of 0 or more", call.count = -1);
    ADD(RF_ERR_VALUE, "expected sizes of 0 or more", call.n = -1);
    ADD(RF_ERR_VALUE, "less than 2^31 elements", call.n = INT64_C(1) << 31);
    ADD(RF_ERR_VALUE, "less than 2^31 elements", (call.n = INT64_C(1) << 62, call.m = 4));
    ADD(RF_ERR_VALUE, "less than 2^63 bytes", (call.n = 1 << 30, call.parents = INT64_C(1) << 40));
    ADD(RF_ERR_VALUE, "out is NULL", call.out = NULL);
    ADD(RF_ERR_VALUE, "base is NULL", call.base = NULL);
    ADD(RF_ERR_VALUE, "parent is NULL with 2 items and 3 parents", (call.parent = NULL, call.parents = 3));
    ADD(RF_ERR_VALUE, "bias_on_n is given with m = 2", (call.bias_on_n = true, call.m = 2, call.n = 1));
}
