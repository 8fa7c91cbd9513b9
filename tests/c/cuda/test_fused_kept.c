/* Caches of fused calls on a device, with the fake driver: where their memory comes from, for which stream,
 * its bound, and that no call waits for the device. */
#define _GNU_SOURCE /* alarm */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "families/fused_embedding_bag/fused.h"
#include "allocator.h"
#include "program.h"
#include "test_fused.h"

enum { MOST_CALLS = 128, MANY = 400, SECONDS = 60 };

/* A fixed case with that allocator. */
static rf_status pool_given(int number, const rf_cuda_stream *stream) {
    fused_case one;
    fused_case_fixed(&one, number);
    one.plan.allocator = &noting_allocator;
    if (stream->stream == capturing_stream()) one.schedules[3].split = 1; /* no memset is captured */
    return rf_fused_embedding_bag_cuda(&one.params, &one.plan, NULL, 0, stream);
}

/* fused_allocator: the caller allocates descriptions once and the workspace each time; if that fails, nothing
 * is launched. */
void fused_allocator(char **arguments) {
    (void)arguments;
    CHECK(pool_given(0, &streams[0]) == RF_OK, "%s", rf_last_error()); /* the device exists from here on */
    costs before = costs_now();
    const int contexts = driver_calls("cuCtxPushCurrent_v2");
    CHECK(given.lasting == 2 && given.brief == 1 && given.live == 2, "%d, %d, %d live", given.lasting,
          given.brief, given.live);
    CHECK(pool_given(0, &streams[0]) == RF_OK, "%s", rf_last_error());
    expect_costs("with an allocator", before, 1, false);
    CHECK(driver_calls("cuCtxPushCurrent_v2") == contexts + 2, "it began more than once");
    CHECK(given.lasting == 2 && given.brief == 2 && given.live == 2, "%d, %d, %d live", given.lasting,
          given.brief, given.live);
    given.status = RF_ERR_MEMORY;
    CHECK(pool_given(0, &streams[0]) == RF_ERR_MEMORY, "%s", rf_last_error());
    CHECK(pool_given(1, &streams[0]) == RF_ERR_MEMORY, "%s", rf_last_error());
    given.status = RF_OK;
    expect_costs("an allocator that fails", before, 1, false);
    CHECK(pool_given(1, &streams[0]) == RF_OK && given.live == 4, "%s", rf_last_error());
    CHECK(costs_now().live == before.live, "%d things more of the driver's", costs_now().live - before.live);
    fused_case one;
    rf_cuda_allocator half = noting_allocator;
    fused_case_fixed(&one, 0);
    half.release = NULL;
    one.plan.allocator = &half;
    CHECK(rf_fused_embedding_bag_cuda(&one.params, &one.plan, NULL, 0, &streams[0]) == RF_ERR_VALUE,
          "half an allocator");
}

/* fused_rows: tables are whole rows of their matrices, also if a call is cached for other matrices. */
void fused_rows(char **arguments) {
    (void)arguments;
    static const struct {
        int64_t columns, offset;
        rf_status want;
    } turns[] = {{8, 0, RF_OK},  {8, 0, RF_OK},        {16, 0, RF_ERR_VALUE}, {16, 0, RF_ERR_VALUE},
                 {8, 0, RF_OK},  {-1, 0, RF_OK},       {8, 0, RF_OK},         {8, 4, RF_ERR_VALUE},
                 {-1, 4, RF_OK}, {8, 4, RF_ERR_VALUE}, {8, 24, RF_OK},        {0, 0, RF_ERR_VALUE}};
    for (int bags = 100; bags >= 0; bags -= 100) { /* without bags nothing is kept */
        for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
            fused_case one;
            fused_case_fixed(&one, 0);
            one.plan.allocator = &noting_allocator;
            one.params.n_features = 1;
            one.params.bags = bags;
            one.params.output_dim = one.params.output_stride = 8;
            one.features[0].weight_offset = turns[i].offset;
            const rf_status status =
                rf__fused_run_call(&one.params, &turns[i].columns, &one.plan, NULL, 0, &streams[0]);
            CHECK(status == turns[i].want, "%d bags, turn %d: %s", bags, (int)i, rf_last_error());
            CHECK(status == RF_OK || strstr(rf_last_error(), "whole rows of weights[0]") != NULL, "%s",
                  rf_last_error());
        }
    }
}

/* fused_streams: data that a stream's calls read belong to that stream. */
void fused_streams(char **arguments) {
    (void)arguments;
    static int places[3]; /* stand for streams: nothing is done with them; no lock */
    const int many = 3;
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < many; i++) {
            const rf_cuda_stream stream = {0, &places[i]};
            CHECK(pool_given(0, &stream) == RF_OK, "%s", rf_last_error());
        }
    }
    CHECK(given.lasting == 2 * many && given.live == 2 * many, "%d blocks, %d live", given.lasting,
          given.live);
    for (int i = 0; i < given.n_blocks; i++) {
        const block *one = &given.blocks[i];
        int same = 0;
        for (int k = 0; k < given.n_blocks; k++)
            same += given.blocks[k].lasts && given.blocks[k].stream == one->stream;
        CHECK(same == 2, "%d blocks of a stream", same);
    }
}

static void bags_set(fused_case *one, int64_t bags) {
    one->params.bags = bags;
    one->plan.allocator = &noting_allocator;
}

/* fused_bounded: the most recent calls and mappings stay; no call waits meanwhile. */
void fused_bounded(char **arguments) {
    (void)arguments;
    enum { BLOCKS_A_CALL = 2, MAPPED_BYTES = 64 << 20 };
    fused_case one;
    double result[2 * FIXED_FEATURES];
    for (int device = 0; device < 2; device++)
        CHECK(pool_given(0, &streams[device]) == RF_OK, "%s", rf_last_error());
    CHECK(measure(false, NULL, result) == RF_OK, "%s", rf_last_error()); /* it leaves nothing to free */
    const int before = waits(), blocks = driver_calls("cuMemAlloc_v2");
    for (int i = 0; i < MANY; i++) CHECK(pool_given(i, &streams[0]) == RF_OK, "%s", rf_last_error());
    CHECK(given.live == BLOCKS_A_CALL * (MOST_CALLS + 1), "%d blocks of calls", given.live);
    const int lasting = given.lasting;
    for (int i = MANY - MOST_CALLS; i < MANY; i++)
        CHECK(pool_given(i, &streams[0]) == RF_OK, "%s", rf_last_error());
    CHECK(given.lasting == lasting, "%d of the last calls were made anew", given.lasting - lasting);
    CHECK(pool_given(0, &streams[1]) == RF_OK && given.lasting == lasting,
          "another device's call was made anew");

    fused_case_fixed(&one, MANY);
    for (int f = 0; f < FIXED_FEATURES; f++) one.schedules[f].expected = 160000; /* the most tasks */
    int64_t bags = 1 << 14, peak = 0;
    for (int i = 0; i < 300; i++, bags += 1 << 12) {
        int64_t bytes = 0;
        bags_set(&one, bags);
        CHECK(rf_fused_embedding_bag_workspace(&one.params, &one.plan, &streams[0], &bytes) == RF_OK, "%s",
              rf_last_error());
        if (given.live > peak) peak = given.live;
    }
    CHECK(peak < given.lasting, "no mapping went");
    CHECK(waits() == before && driver_calls("cuMemAlloc_v2") == blocks, "%d waits, %d blocks of the driver's",
          waits() - before, driver_calls("cuMemAlloc_v2") - blocks);
}

/* fused_graphs: data that graphs read are created once, belong to no stream, and stay; also a mapping of the
 * caller. */
void fused_graphs(char **arguments) {
    (void)arguments;
    static int64_t offsets[FIXED_FEATURES * 100 + 1];
    const rf_cuda_stream capture = {0, capturing_stream()};
    fused_case one;
    int32_t *mapping = NULL;
    CHECK(pool_given(0, &streams[0]) == RF_OK, "%s", rf_last_error());
    CHECK(pool_given(MANY + 50, &capture) == RF_OK, "%s",
          rf_last_error()); /* its kernel is there from here on */
    const int lasting = given.lasting;
    costs before = costs_now();
    CHECK(pool_given(0, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a captured call", before, 1, true);
    CHECK(given.lasting == lasting, "graphs read memory of a stream");
    before = costs_now();
    const int waited = waits();
    CHECK(pool_given(0, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a call that is captured again", before, 1, false);
    CHECK(waits() == waited, "%d waits", waits() - waited);
    for (int i = 1; i <= MANY; i++) CHECK(pool_given(i, &streams[0]) == RF_OK, "%s", rf_last_error());
    before = costs_now();
    CHECK(pool_given(0, &capture) == RF_OK, "%s", rf_last_error());
    expect_costs("a call that is captured after many", before, 1, false);

    fused_case_fixed(&one, 0);
    one.schedules[3].split = 1;
    one.params.offsets = offsets;
    one.plan.allocator = &noting_allocator;
    CHECK(rf_fused_embedding_bag_map(&one.params, &one.plan, 132, false, &mapping, &one.plan.mapping_rows) ==
              RF_OK,
          "%s", rf_last_error());
    one.plan.mapping = mapping;
    before = costs_now();
    CHECK(rf_fused_embedding_bag_cuda(&one.params, &one.plan, NULL, 0, &capture) == RF_OK, "%s",
          rf_last_error());
    const int brief = given.brief, made = costs_now().uploads - before.uploads;
    CHECK(made == 1 && given.lasting > 0, "%d copies of a mapping", made);
    CHECK(rf_fused_embedding_bag_cuda(&one.params, &one.plan, NULL, 0, &capture) == RF_OK, "%s",
          rf_last_error());
    CHECK(costs_now().uploads == before.uploads + 1 && given.brief == brief, "a mapping is copied again");
    const int kernels = costs_now().loads - before.loads;
    CHECK(costs_now().live == before.live + 1 + kernels, "%d things more", costs_now().live - before.live);
    rf_fused_mapping_free(mapping);

    /* If the driver cannot tell whether a stream is captured, that is an error, not a capture. */
    before = costs_now();
    for (int i = 0; i < 20; i++) {
        fused_case_fixed(&one, MANY + 1 + i);
        one.plan.allocator = &noting_allocator;
        setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing:906", 1);
        CHECK(rf_fused_embedding_bag_cuda(&one.params, &one.plan, NULL, 0, &streams[0]) != RF_OK &&
                  strstr(rf_last_error(), "cuStreamIsCapturing") != NULL,
              "%s", rf_last_error());
        unsetenv("FAKE_CUDA_FAIL");
    }
    expect_costs("streams that nothing is known of", before, 0, false);
}

static void *pool_elsewhere(void *argument) {
    const int number = *(const int *)argument;
    fused_case one;
    fused_case_fixed(&one, number);
    for (int device = 0; device < 2; device++)
        CHECK(pool_on(&one, &one.plan, &streams[device]) == RF_OK, "%s", rf_last_error());
    return NULL;
}

/* While a call waits, other threads continue, with old and new calls. */
static void others_go_on(void) {
    static const int numbers[] = {MANY - 1, MANY + 5};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, pool_elsewhere, (void *)(uintptr_t)&numbers[i]) == 0,
              "no thread");
        pthread_join(thread, NULL);
    }
}

static void *open_other(void *argument) {
    const rf__cuda_device *device = NULL;
    CHECK(rf__cuda_device_get(1, &device) == RF_OK, "%s", rf_last_error());
    return argument;
}

/* While the first device is opened. */
static void other_is_opened(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, open_other, NULL) == 0, "no thread");
    pthread_join(thread, NULL);
}

/* fused_waiting: where the driver waits for the device, no lock is held. A deadlock ends by SIGALRM. */
void fused_waiting(char **arguments) {
    (void)arguments;
    static const char *const waiting[] = {"cuMemFree_v2",        "cuMemAlloc_v2", "cuMemHostAlloc",
                                          "cuStreamSynchronize", "cuEventQuery",  "cuModuleLoadData"};
    const rf_cuda_stream capture = {0, capturing_stream()};
    fused_case one;
    alarm(SECONDS);
    driver_hook("cuStreamSynchronize", other_is_opened);
    for (int i = 0; i < MANY; i++) pool_well(i); /* from here on each new call frees an old call */
    for (size_t i = 0; i < sizeof waiting / sizeof waiting[0]; i++) {
        const int before = driver_calls(waiting[i]);
        driver_busy(strcmp(waiting[i], "cuMemHostAlloc") ==
                    0); /* copies are pending: another copy needs memory */
        driver_hook(waiting[i], others_go_on);
        pool_well(MANY + 100 + (int)i);
        fused_case_fixed(&one, MANY + 200 + (int)i);
        one.schedules[3].split = 1;
        one.params.check_bounds = i % 2; /* a new kernel */
        CHECK(pool_on(&one, &one.plan, &capture) == RF_OK, "%s", rf_last_error());
        CHECK(driver_calls(waiting[i]) > before || strcmp(waiting[i], "cuModuleLoadData") == 0,
              "%s was not called", waiting[i]);
        driver_hook("", NULL);
        driver_busy(0);
    }
    alarm(0);
}

static void flood(void) {
    for (int i = 0; i < MANY; i++) pool_well(1000 + i);
}

/* fused_held: data that a launch reads stay until it is in the stream, whatever other threads do; also while
 * tuning. */
void fused_held(char **arguments) {
    (void)arguments;
    double result[2 * FIXED_FEATURES];
    CHECK(measure(true, NULL, result) == RF_OK, "%s", rf_last_error());
    flood();
    driver_watch();
    for (int timed = 0; timed < 2; timed++) {
        driver_hook(timed ? "cuMemsetD32Async" : "cuLaunchKernelEx", flood);
        CHECK(measure(timed, NULL, result) == RF_OK, "timed %d: %s", timed, rf_last_error());
        driver_hook("cuMemsetD32Async", flood); /* between a call's preparation and its launch */
        pool_well(5);
    }
}
