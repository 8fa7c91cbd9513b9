/* rf_fused_embedding_bag_cuda and its surroundings, with the fake driver: arguments, the cache of calls,
 * mappings, threads, a driver that fails. */
#define _GNU_SOURCE
#include "test_fused.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/fused.h"
#include "fused_case.h"
#include "program.h"

enum { MOST_CALLS = 128, MANY = 200, ROUNDS = 400 };

const rf_cuda_stream streams[2] = {{0, NULL}, {1, NULL}};

/* Calls both functions, with a workspace of the size that the first returns. */
rf_status pool_on(const fused_case *one, const rf_fused_plan *plan, const rf_cuda_stream *stream) {
    int64_t bytes = -1;
    rf_status status = rf_fused_embedding_bag_workspace(&one->params, plan, stream, &bytes);
    CHECK(status == RF_OK ? bytes >= 0 : bytes == 0, "%lld bytes", (long long)bytes);
    if (status != RF_OK) return status;
    void *workspace = bytes > 0 ? malloc((size_t)bytes) : NULL;
    if (bytes > 0 && workspace == NULL) exit(1);
    status = rf_fused_embedding_bag_cuda(&one->params, plan, workspace, bytes, stream);
    free(workspace);
    return status;
}

static rf_status pool(const fused_case *one, const rf_fused_plan *plan) {
    return pool_on(one, plan, &streams[0]);
}

void pool_well(int number) {
    fused_case one;
    fused_case_fixed(&one, number);
    CHECK(pool(&one, &one.plan) == RF_OK, "%s", rf_last_error());
}

costs costs_now(void) {
    return (costs){driver_calls("cuLaunchKernelEx"), driver_calls("cuMemcpyHtoDAsync_v2"),
                   driver_calls("cuModuleLoadData"), driver_live()};
}

void expect_costs(const char *what, costs before, int launches, bool prepared) {
    const costs now = costs_now();
    CHECK(now.launches == before.launches + launches, "%s: %d launches", what,
          now.launches - before.launches);
    CHECK((now.uploads > before.uploads) == prepared, "%s: %d uploads", what, now.uploads - before.uploads);
    CHECK(now.loads == before.loads, "%s: a kernel was loaded", what);
    CHECK(prepared || now.live == before.live, "%s: %d things more on the device", what,
          now.live - before.live);
    CHECK(context_depth() == 0, "%s: a context was left on the stack", what);
}

/* fused_cache: a repeated call is launched unchanged; the latest calls stay, and captured calls. */
static void fused_cache(char **arguments) {
    (void)arguments;
    const rf_cuda_stream capture = {0, capturing_stream()};
    fused_case one, captured;
    pool_well(0);
    costs before = costs_now();
    for (int i = 0; i < 5; i++) pool_well(0);
    expect_costs("the same call", before, 5, false);

    fused_case_fixed(&one, 0);
    one.params.bags = 99; /* a mapping for 100 bags serves 99, but not 50 */
    CHECK(pool(&one, &one.plan) == RF_OK, "%s", rf_last_error());
    expect_costs("a batch of about that size", before, 6, false);
    one.params.bags = 50;
    CHECK(pool(&one, &one.plan) == RF_OK, "%s", rf_last_error());
    expect_costs("a smaller batch", before, 7, true);

    fused_case_fixed(&captured, MANY + 1);
    captured.schedules[3].split = 1;
    CHECK(pool_on(&captured, &captured.plan, &capture) == RF_OK, "%s", rf_last_error());
    for (int i = 1; i <= MANY; i++) {
        pool_well(i);
        if (i == MOST_CALLS) before = costs_now();
    }
    const costs many = costs_now();
    CHECK(many.live <= before.live + 4, "%d things more on the device after more calls",
          many.live - before.live);
    pool_well(MANY);
    expect_costs("the latest call", many, 1, false);
    CHECK(pool_on(&captured, &captured.plan, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a captured call", many, 2, false);
    pool_well(1);
    expect_costs("a call of long ago", many, 3, true);

    for (int i = 0; i < MANY; i++) { /* graphs of many calls leave room for other calls */
        fused_case_fixed(&captured, MANY + 2 + i);
        captured.schedules[3].split = 1;
        CHECK(pool_on(&captured, &captured.plan, &capture) == RF_OK, "%s", rf_last_error());
    }
    pool_well(1);
    pool_well(2);
    before = costs_now();
    pool_well(1);
    pool_well(2);
    expect_costs("calls in turns beside many graphs", before, 2, false);
}

static void refused(const fused_case *one, const rf_fused_plan *plan, rf_status want, const char *words) {
    int64_t bytes = -1;
    rf_status status = rf_fused_embedding_bag_workspace(&one->params, plan, &streams[0], &bytes);
    CHECK(status == want && strstr(rf_last_error(), words) != NULL && bytes == 0, "%s, not \"%s\": %s",
          rf_status_text(status), words, rf_last_error());
    status = rf_fused_embedding_bag_cuda(&one->params, plan, NULL, 0, &streams[0]);
    CHECK(status == want && strstr(rf_last_error(), words) != NULL, "%s, not \"%s\": %s",
          rf_status_text(status), words, rf_last_error());
}

/* fused_bad: arguments that are refused, also by a cached call; nothing is launched or leaks. */
static void fused_bad(char **arguments) {
    (void)arguments;
    fused_case good, one;
    int64_t bytes = 0;
    fused_case_fixed(&good, 0);
    CHECK(pool(&good, &good.plan) == RF_OK, "%s", rf_last_error());
    const costs before = costs_now();
#define REFUSED(status, words, ...)              \
    do {                                         \
        one = good;                              \
        one.params.buffers = one.buffers;        \
        one.params.features = one.features;      \
        one.plan.schedules = one.schedules;      \
        __VA_ARGS__;                             \
        refused(&one, &one.plan, status, words); \
    } while (0)
    REFUSED(RF_ERR_VALUE, "output is NULL", one.params.output = NULL);
    REFUSED(RF_ERR_TYPE, "output_dtype", one.params.output_dtype = (rf_dtype)9);
    REFUSED(RF_ERR_VALUE, "indices", one.params.indices = NULL);
    REFUSED(RF_ERR_VALUE, "offsets", one.params.offsets = NULL);
    REFUSED(RF_ERR_TYPE, "index", one.params.index_type = (rf_int_type)2);
    REFUSED(RF_ERR_TYPE, "offset", one.params.offset_type = (rf_int_type)-1);
    REFUSED(RF_ERR_VALUE, "lookups", one.params.lookups = -1);
    REFUSED(RF_ERR_VALUE, "bags", one.params.bags = -1);
    REFUSED(RF_ERR_VALUE, "prefetch_distance", one.params.prefetch_distance = -2);
    REFUSED(RF_ERR_UNSUPPORTED, "at most", one.params.bags = INT64_C(1) << 31);
    REFUSED(RF_ERR_VALUE, "n_features is -1", one.params.n_features = -1);
    REFUSED(RF_ERR_VALUE, "n_buffers -1", one.params.n_buffers = -1);
    REFUSED(RF_ERR_VALUE, "output_dim is", one.params.n_features = 3);
    REFUSED(RF_ERR_VALUE, "features[0] is in weights[0]", one.params.n_buffers = 0);
    REFUSED(RF_ERR_VALUE, "weights[0] is NULL", one.buffers[0].data = NULL);
    REFUSED(RF_ERR_TYPE, "dtype", one.buffers[1].dtype = (rf_dtype)3);
    REFUSED(RF_ERR_VALUE, "expected a table within weights[0]", one.features[1].rows = 1 << 20);
    REFUSED(RF_ERR_VALUE, "expected a table within weights[0]", one.features[1].rows = INT64_MAX);
    REFUSED(RF_ERR_VALUE, "expected a table within weights[0]", one.features[1].weight_offset = -1);
    REFUSED(RF_ERR_UNSUPPORTED, "per-sample weights", one.params.sample_weights = one.params.output);
    REFUSED(RF_ERR_VALUE, "pooling", one.features[0].pooling = 3);
    REFUSED(RF_ERR_VALUE, "output_stride is 1", one.params.output_stride = 1);
    REFUSED(RF_ERR_VALUE, "kind is 9", one.schedules[0].kind = 9);
    REFUSED(RF_ERR_VALUE, "warps is 65", one.plan.warps = 65);
    REFUSED(RF_ERR_VALUE, "warps is 1", one.plan.warps = 1);
    REFUSED(RF_ERR_VALUE, "warps is -7", one.plan.warps = -7);
    const rf_cuda_stream nowhere = {77, NULL};
    CHECK(rf_fused_embedding_bag_cuda(&good.params, &good.plan, NULL, 0, &nowhere) == RF_ERR_VALUE &&
              strstr(rf_last_error(), "no GPU has the number 77") != NULL,
          "%s", rf_last_error());
    CHECK(rf_fused_embedding_bag_workspace(&good.params, &good.plan, &streams[0], &bytes) == RF_OK &&
              bytes > 0,
          "%lld bytes", (long long)bytes);
    static _Alignas(16) char workspace[1 << 20]; /* no lock: it is not looked at */
    const struct {
        void *memory;
        int64_t bytes;
    } works[] = {{NULL, 0},       {NULL, bytes},          {workspace, bytes - 1}, {workspace, 0},
                 {workspace, -1}, {workspace + 1, bytes}, {workspace + 8, bytes}};
    CHECK(bytes < (int64_t)sizeof workspace, "%lld bytes", (long long)bytes);
    for (size_t i = 0; i < sizeof works / sizeof works[0]; i++) {
        CHECK(rf_fused_embedding_bag_cuda(&good.params, &good.plan, works[i].memory, works[i].bytes,
                                          &streams[0]) == RF_ERR_VALUE &&
                  strstr(rf_last_error(), "workspace") != NULL,
              "workspace %d: %s", (int)i, rf_last_error());
    }
    expect_costs("bad arguments", before, 0, false);

    good.params.bags = 0; /* no bags: nothing to do, but the rest is checked */
    good.params.lookups = 0;
    CHECK(pool(&good, &good.plan) == RF_OK, "%s", rf_last_error());
    good.params.output_dtype = (rf_dtype)9;
    CHECK(pool(&good, &good.plan) == RF_ERR_TYPE, "a bad dtype without bags");
    expect_costs("no bags", before, 0, false);
}

/* A plan with a mapping, followed by a row of zeros; the caller frees its mapping. */
static rf_fused_plan mapped(const fused_case *one, const void *offsets) {
    static _Alignas(16) char nothing[16]; /* stands for device memory; no lock: it is not looked at */
    rf_fused_embedding_bag_params params = one->params;
    rf_fused_plan plan = one->plan;
    int32_t *mapping = NULL;
    params.offsets = offsets;
    CHECK(rf_fused_embedding_bag_map(&params, &one->plan, 132, false, &mapping, &plan.mapping_rows) == RF_OK,
          "%s", rf_last_error());
    int32_t *longer = calloc((size_t)plan.mapping_rows + 1, 8 * sizeof *longer);
    if (longer == NULL || mapping == NULL) exit(1);
    memcpy(longer, mapping, (size_t)plan.mapping_rows * 8 * sizeof *longer);
    rf_fused_mapping_free(mapping);
    plan.mapping = longer;
    plan.mapping_on_device = nothing;
    return plan;
}

/* Returns true if a word of a mapping may change: the checksum, room for sums, words of a task that its bags
 * do not need, and the column of an unused lane. */
static bool is_free(const rf_fused_plan *plan, int64_t word) {
    const rf__fused_mapping *head = (const rf__fused_mapping *)plan->mapping;
    if (word < 8) return word == 0 || word == 4;
    if (word / 8 <= head->n_tasks) return word % 8 >= 4;
    return word % 2 == 1 && plan->mapping[word - 1] == -1;
}

/* fused_mapping: a mapping serves only the call for which it was created. */
static void fused_mapping(char **arguments) {
    (void)arguments;
    static int64_t offsets[FIXED_FEATURES * 100 + 1];
    fused_case good, one;
    for (int i = 0; i <= FIXED_FEATURES * 100; i++) offsets[i] = i * i;
    fused_case_fixed(&good, 0);
    rf_fused_plan plan = mapped(&good, offsets);
    CHECK(pool(&good, &plan) == RF_OK, "%s", rf_last_error());
    costs before = costs_now();
    CHECK(pool(&good, &plan) == RF_OK, "%s", rf_last_error());
    expect_costs("a mapping", before, 1, false);
#define OTHER(...)                                                 \
    do {                                                           \
        fused_case_fixed(&one, 0);                                 \
        rf_fused_plan other = plan;                                \
        other.schedules = one.schedules;                           \
        __VA_ARGS__;                                               \
        refused(&one, &other, RF_ERR_VALUE, "mapping is not for"); \
    } while (0)
    OTHER(one.params.bags = 99);
    OTHER(one.features[1].pooling = RF_SUM);
    OTHER(one.features[1].padding_idx = -1);
    OTHER(one.features[2].dim = 8, one.features[3].output_column -= 8, one.params.output_dim -= 8,
          one.params.output_stride -= 8);
    OTHER(one.features[0].dim = 128, one.features[1].dim = 8, one.features[1].output_column = 128);
    OTHER(one.params.n_features = 3, one.params.output_dim -= 64, one.params.output_stride -= 64);
    OTHER(one.schedules[1].threads = 64);
    OTHER(other.schedules = NULL);
    OTHER(other.mapping_rows = 0);
    OTHER(other.mapping_rows = -1);
    OTHER(other.mapping_rows--);
    OTHER(other.mapping_rows++);
    rf__fused_mapping *head = (rf__fused_mapping *)plan.mapping;
    const rf__fused_mapping right = *head;
    const struct {
        int32_t *field, value;
    } wrong[] = {{&head->n_tasks, 0},         {&head->n_tasks, -1},        {&head->n_tasks, INT32_MAX},
                 {&head->n_tasks, INT32_MIN}, {&head->n_tiles, INT32_MAX}, {&head->n_tiles, -1},
                 {&head->n_groups, -1},       {&head->partials, -1},       {&head->bags, 101},
                 {&head->n_features, 3},      {&head->signature, -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        *wrong[i].field = wrong[i].value;
        OTHER((void)0);
        *head = right;
    }
    /* Every change is detected. */
    int32_t *words = (int32_t *)plan.mapping;
    for (int64_t at = 0; at < plan.mapping_rows * 8; at += at < 64 ? 1 : 7) {
        const int32_t right_one = words[at], values[] = {right_one + 1, -1, right_one ^ 1 << 20, 0};
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
            words[at] = values[i];
            const rf_status status = pool(&good, &plan);
            const rf_status want = at == 0 || values[i] == right_one ? RF_OK : RF_ERR_VALUE;
            CHECK(status == want || is_free(&plan, at), "word %lld, %d: %s", (long long)at, (int)values[i],
                  rf_status_text(status));
        }
        words[at] = right_one;
    }
    CHECK(pool(&good, &plan) == RF_OK, "%s", rf_last_error());
    before = costs_now();
    rf_fused_plan copied = plan;
    copied.mapping_on_device = NULL; /* the call copies it */
    CHECK(pool(&good, &copied) == RF_OK, "%s", rf_last_error());
    const costs now = costs_now();
    CHECK(now.uploads == before.uploads + 2 && now.live == before.live, "%d copies, %d things more",
          now.uploads - before.uploads, now.live - before.live);
    CHECK(context_depth() == 0, "a context was left on the stack");
    free((int32_t *)plan.mapping);
}

/* fused_unexpected: without expectations a kernel maps, also while a stream is captured. */
static void fused_unexpected(char **arguments) {
    (void)arguments;
    static const char *const failures[] = {
        "cuMemAlloc_v2:2", "cuMemcpyHtoDAsync_v2:700", "cuEventRecord:1",
        "cuLaunchKernelEx:701"}; /* a kernel that overlaps with the previous kernel */
    const rf_cuda_stream capture = {0, capturing_stream()};
    fused_case one, other;
    fused_case_fixed(&one, 0);
    fused_case_fixed(&other, 1);
    CHECK(pool(&one, NULL) == RF_OK, "%s", rf_last_error());
    costs before = costs_now();
    CHECK(pool(&one, NULL) == RF_OK, "%s", rf_last_error());
    const int launches = costs_now().launches - before.launches;
    expect_costs("without a plan", before, launches, false);
    CHECK(launches >= 2, "%d launches", launches);
    one.params.bags = 77; /* no size of a batch is new to it */
    CHECK(pool(&one, NULL) == RF_OK, "%s", rf_last_error());
    expect_costs("another batch", before, 2 * launches, false);
    CHECK(pool_on(&one, NULL, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a captured batch", before, 3 * launches, true);
    before = costs_now();
    CHECK(pool_on(&one, NULL, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a batch captured again", before, launches, false);
    one.schedules[3].split = 1; /* the number of bags that share blocks would have to be known */
    one.schedules[2].expected = 0; /* one such feature suffices to leave all to the kernel */
    CHECK(pool(&one, &one.plan) == RF_OK, "%s", rf_last_error());
    before = costs_now();
    CHECK(pool(&one, &one.plan) == RF_OK, "%s", rf_last_error());
    expect_costs("a plan that does not know all", before, launches, false);
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        setenv("FAKE_CUDA_FAIL", failures[i], 1);
        CHECK(pool(&other, NULL) != RF_OK, "%s", failures[i]);
        unsetenv("FAKE_CUDA_FAIL");
        CHECK(context_depth() == 0, "a context was left on the stack");
    }
    CHECK(pool(&other, NULL) == RF_OK, "%s", rf_last_error());
    before = costs_now();
    CHECK(pool(&other, NULL) == RF_OK, "%s", rf_last_error());
    expect_costs("after failures", before, launches, false);
}

/* Returns the result of a case while a function of the driver fails. */
static rf_status pool_failing(const char *failure, int number) {
    fused_case one;
    fused_case_fixed(&one, number);
    setenv("FAKE_CUDA_FAIL", failure, 1);
    const rf_status status = pool(&one, &one.plan);
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(context_depth() == 0, "%s: a context was left on the stack", failure);
    return status;
}

/* fused_failures: each function of the driver fails once, and nothing of it stays. */
static void fused_failures(char **arguments) {
    (void)arguments;
    static const char *const loading[] = {"cuModuleLoadData:209", "cuModuleGetFunction:500",
                                          "cuFuncGetAttribute:1"};
    static const char *const preparing[] = {"cuMemAlloc_v2:2", "cuMemcpyHtoDAsync_v2:700", "cuEventRecord:1",
                                            "cuStreamIsCapturing:906", "cuCtxPushCurrent_v2:201"};
    static const char *const launching[] = {"cuLaunchKernelEx:701", "cuMemsetD32Async:1",
                                            "cuCtxPushCurrent_v2:201"};
    const rf__cuda_device *device = NULL;
    CHECK(rf__cuda_device_get(0, &device) == RF_OK, "%s", rf_last_error());
    CHECK(pool_failing(loading[0], 0) != RF_OK, "%s",
          loading[0]); /* everything else that the call needs is cached now */
    int live = driver_live();
    for (size_t i = 0; i < sizeof loading / sizeof loading[0]; i++) {
        CHECK(pool_failing(loading[i], 0) != RF_OK, "%s", loading[i]);
        CHECK(driver_live() == live, "%s: %d things more on the device", loading[i], driver_live() - live);
    }
    pool_well(0);
    live = driver_live();
    for (size_t i = 0; i < sizeof preparing / sizeof preparing[0]; i++) {
        /* Until all allocations but the last succeed. */
        CHECK(pool_failing(preparing[i], 1) != RF_OK, "%s", preparing[i]);
        CHECK(driver_live() == live, "%s: %d things more on the device", preparing[i], driver_live() - live);
    }
    static int place; /* stands for a stream: nothing is done with it; no lock */
    const rf_cuda_stream another = {0, &place};
    fused_case one;
    fused_case_fixed(&one, 1);
    setenv("FAKE_CUDA_FAIL", "cuStreamGetId:1", 1);
    CHECK(pool_on(&one, &one.plan, &another) != RF_OK, "cuStreamGetId");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(driver_live() == live && context_depth() == 0, "cuStreamGetId: something stays");
    CHECK(pool_failing(preparing[0], 1) == RF_ERR_OUT_OF_MEMORY, "%s", rf_last_error());
    pool_well(1);
    live = driver_live();
    for (size_t i = 0; i < sizeof launching / sizeof launching[0]; i++) {
        CHECK(pool_failing(launching[i], 1) != RF_OK, "%s", launching[i]);
        CHECK(driver_live() == live, "%s: %d things more on the device", launching[i], driver_live() - live);
    }
    pool_well(0);
    pool_well(1);
    CHECK(driver_live() == live, "%d things more on the device", driver_live() - live);
}

static void *use_calls(void *argument) {
    static atomic_int next; /* atomic */
    randomness random = {(uint64_t)atomic_fetch_add(&next, 1)};
    const fused_case *shared = argument;
    for (int i = 0; i < ROUNDS; i++) {
        fused_case one;
        fused_case_fixed(&one, (int)random_between(&random, 0, random_chance(&random, 0.5) ? 3 : MANY));
        if (random_chance(&random, 0.2)) one.params.bags = random_between(&random, 1, 100);
        if (random_chance(&random, 0.1)) one = *shared, one.params.buffers = one.buffers;
        const rf_fused_plan *plan = random_chance(&random, 0.2) ? NULL : &one.plan;
        const rf_status status = pool_on(&one, plan, &streams[random_chance(&random, 0.2)]);
        CHECK(status == RF_OK, "%s", rf_last_error());
    }
    CHECK(context_depth() == 0, "a context was left on the stack");
    return NULL;
}

/* fused_threads: calls of many kinds on two devices at once, more than are kept. */
static void fused_threads(char **arguments) {
    (void)arguments;
    fused_case shared;
    fused_case_fixed(&shared, 1000);
    run_threads(use_calls, &shared);
    const int live = driver_live();
    CHECK(live < (MOST_CALLS + THREADS) * 40, "%d things on the device", live);
    for (int i = 0; i < 2 * MANY; i++) pool_well(i);
    const int settled = driver_live();
    for (int i = 0; i < 2 * MANY; i++) pool_well(i);
    CHECK(driver_live() == settled, "%d things more on the device", driver_live() - settled);
}

rf_status measure(bool timed, const char *failure, double *result) {
    static const int64_t offsets[FIXED_FEATURES * 100 + 1];
    fused_case one;
    rf_fused_schedule schedules[2][FIXED_FEATURES];
    fused_case_fixed(&one, 5);
    const rf_fused_embedding_bag_params batches[2] = {one.params, one.params};
    const void *host_offsets[2] = {offsets, NULL};
    memcpy(schedules[0], one.schedules, sizeof schedules[0]);
    memcpy(schedules[1], one.schedules, sizeof schedules[1]);
    schedules[1][1].threads = 64;
    const rf__fused_measurement work = {.batches = batches,
                                        .host_offsets = host_offsets,
                                        .n_batches = 2,
                                        .schedules = schedules[0],
                                        .n_sets = 2,
                                        .rounds = 3};
    if (failure != NULL) setenv("FAKE_CUDA_FAIL", failure, 1);
    const rf_status status = rf__fused_measure(&work, timed, result, &streams[0]);
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(context_depth() == 0, "a context was left on the stack");
    return status;
}

/* fused_measure: both ways to time sets of schedules, and each failing function of the driver. */
static void fused_measure(char **arguments) {
    (void)arguments;
    static const char *const failures[] = {
        "cuEventCreate:1",          "cuEventRecord:1",        "cuEventSynchronize:700",
        "cuEventElapsedTime:1",     "cuLaunchKernelEx:701",   "cuMemAlloc_v2:2",
        "cuMemcpyDtoHAsync_v2:700", "cuMemcpyHtoDAsync_v2:1", "cuMemsetD32Async:1",
        "cuStreamSynchronize:700",  "cuCtxPushCurrent_v2:201"};
    double result[2 * FIXED_FEATURES];
    for (int timed = 0; timed < 2; timed++) {
        memset(result, 0xff, sizeof result);
        CHECK(measure(timed, NULL, result) == RF_OK, "%s", rf_last_error());
        for (int i = 0; i < 2 * (timed ? FIXED_FEATURES : 3); i++) CHECK(result[i] == 0, "%g", result[i]);
        const int live = driver_live();
        int failed = 0;
        for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
            failed += measure(timed, failures[i], result) != RF_OK;
            CHECK(driver_live() == live, "%s: %d things more on the device", failures[i],
                  driver_live() - live);
        }
        CHECK(failed >= 5, "%d failures", failed);
        CHECK(measure(timed, NULL, result) == RF_OK, "%s", rf_last_error());
        CHECK(driver_live() == live, "%d things more on the device", driver_live() - live);
    }
}

const command fused_commands[] = {
    {"fused_map", 1, fused_map},
    {"fused_map_bad", 0, fused_map_bad},
    {"fused_bad", 0, fused_bad},
    {"fused_cache", 0, fused_cache},
    {"fused_lower", 0, fused_lower},
    {"fused_allocator", 0, fused_allocator},
    {"fused_rows", 0, fused_rows},
    {"fused_streams", 0, fused_streams},
    {"fused_bounded", 0, fused_bounded},
    {"fused_graphs", 0, fused_graphs},
    {"fused_waiting", 0, fused_waiting},
    {"fused_held", 0, fused_held},
    {"fused_mapping", 0, fused_mapping},
    {"fused_failures", 0, fused_failures},
    {"fused_unexpected", 0, fused_unexpected},
    {"fused_threads", 0, fused_threads},
    {"fused_measure", 0, fused_measure},
};
const int n_fused_commands = (int)(sizeof fused_commands / sizeof fused_commands[0]);
