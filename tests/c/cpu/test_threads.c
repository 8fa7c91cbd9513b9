/* Many threads at once: the choice of the ISA, results, and the message of a failure. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cases.h"

enum { THREADS = 8 };

static void run_at_once(void *(*body)(void *), void *arguments, size_t argument_bytes) {
    pthread_t threads[THREADS];
    int started = 0;
    for (; started < THREADS; started++) {
        void *argument = (unsigned char *)arguments + (size_t)started * argument_bytes;
        if (pthread_create(&threads[started], NULL, body, argument) != 0) break;
    }
    CHECK(started == THREADS, "only %d threads of %d started", started, THREADS);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

static void *ask_isa(void *argument) {
    *(const char **)argument = rf_cpu_isa();
    return NULL;
}

void test_first_use(void) {
    const char *names[THREADS] = {0};
    run_at_once(ask_isa, names, sizeof names[0]);
    static const char *const known[] = {"avx512", "avx2", "neon", "scalar"};
    bool found = false;
    for (int i = 0; names[0] && i < 4; i++) found = found || strcmp(names[0], known[i]) == 0;
    CHECK(found, "an unknown ISA: %s", names[0] ? names[0] : "NULL");
    for (int i = 1; i < THREADS; i++)
        CHECK(names[i] && names[0] && strcmp(names[i], names[0]) == 0, "thread %d saw another ISA", i);
}

/* Makes a call fail, because its only index `index` is not below `rows`. */
static rf_status fail_with(int64_t index, int64_t rows) {
    const float weight[4] = {0};
    float output[1];
    const int64_t offset = 0;
    const rf_embedding_bag_params call = {.weight = weight,
                                          .rows = rows,
                                          .dim = 1,
                                          .weight_stride = 1,
                                          .indices = &index,
                                          .lookups = 1,
                                          .offsets = &offset,
                                          .bags = 1,
                                          .index_type = RF_INT64,
                                          .offset_type = RF_INT64,
                                          .check_bounds = true,
                                          .padding_idx = -1,
                                          .output = output,
                                          .output_stride = 1};
    return rf_embedding_bag_cpu(&call, NULL);
}

static void *run_cases(void *argument) {
    randomness random = {*(const uint64_t *)argument};
    char number[24];
    const int64_t mine = 1000 + (int64_t)random.state;
    snprintf(number, sizeof number, "%lld", (long long)mine);
    CHECK(rf_last_error()[0] == '\0', "a new thread starts with the message %s", rf_last_error());
    CHECK(fail_with(mine, 4) == RF_ERR_INDEX, "%s", rf_last_error());
    arena memory = arena_new();
    for (int i = 0; i < check_rounds / 4; i++) {
        const rf_pooling pooling = (rf_pooling)random_between(&random, RF_SUM, RF_MAX);
        embedding_bag_case(&random, &memory, random_dtype(&random), pooling, random_dim(&random));
        fused_embedding_bag_case(&random, &memory);
    }
    /* The message stays until this thread's next failure, whatever other threads do. */
    CHECK(strstr(rf_last_error(), number), "no %s in: %s", number, rf_last_error());
    arena_free(&memory);
    return NULL;
}

void test_threads(void) {
    uint64_t seeds[THREADS];
    for (int i = 0; i < THREADS; i++) seeds[i] = 100 + (uint64_t)i;
    run_at_once(run_cases, seeds, sizeof seeds[0]);
}
