/* csrc/core/threads/workers.h: no job is lost, even after threads were idle for long, and jobs begin in
 * order. */
#define _GNU_SOURCE /* usleep */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "../check.h"
#include "core/threads/workers.h"

enum { CALLERS = 3, JOBS = 8, TASKS = 5, WORKERS = 3, PATIENCE = 20000 /* ms */ };

/* The jobs of one caller in a round. */
typedef struct round {
    rf__job jobs[JOBS];
    struct handed {
        struct round *of;
        int32_t number, tasks; /* atomic: that were run */
    } handed[JOBS];
    int32_t n_begun, n_ended, n_early; /* atomic; early jobs began out of order */
} round;

static void run(void *context, int64_t task) {
    struct handed *one = context;
    if (task == 0 && __atomic_fetch_add(&one->of->n_begun, 1, __ATOMIC_SEQ_CST) != one->number)
        __atomic_fetch_add(&one->of->n_early, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&one->tasks, 1, __ATOMIC_SEQ_CST);
}

static void end(void *context) {
    const struct handed *one = context;
    __atomic_fetch_add(&one->of->n_ended, 1, __ATOMIC_SEQ_CST);
}

/* With a single thread jobs also begin one after another. */
static void hand_over(randomness *random, rf__crew crew, round *all) {
    memset(all, 0, sizeof *all);
    for (int i = 0; i < JOBS; i++) {
        /* Threads are at work, watch, or sleep. */
        if (random_chance(random, 0.3)) usleep((unsigned)random_between(random, 0, 700));
        all->handed[i].of = all;
        all->handed[i].number = i;
        all->jobs[i] = (rf__job){.run = run,
                                 .end = end,
                                 .context = &all->handed[i],
                                 .count = TASKS,
                                 .most_threads = crew == RF__DEFERRED_FREE_CREW
                                                     ? 1
                                                     : (int32_t)random_between(random, 1, WORKERS + 1)};
        rf__workers_take(crew, &all->jobs[i]);
    }
    for (int ms = 0; ms < PATIENCE && __atomic_load_n(&all->n_ended, __ATOMIC_SEQ_CST) < JOBS; ms++)
        usleep(1000);
    CHECK(all->n_ended == JOBS, "%d of %d jobs have ended", all->n_ended, JOBS);
    for (int i = 0; i < JOBS; i++)
        CHECK(all->handed[i].tasks == TASKS, "job %d: %d tasks", i, all->handed[i].tasks);
    CHECK(crew != RF__DEFERRED_FREE_CREW || all->n_early == 0, "jobs began in another order");
}

static void *call(void *seed) {
    randomness random = {*(const uint64_t *)seed};
    static _Thread_local round all;
    for (int i = 0; i < check_rounds && check_failures() == 0; i++)
        hand_over(&random, i % 4 == 0 ? RF__DEFERRED_FREE_CREW : RF__LOOKUP_CREW, &all);
    return NULL;
}

void test_workers(void) {
    pthread_t threads[CALLERS];
    uint64_t seeds[CALLERS];
    int started = 0;
    CHECK(rf__workers_start(RF__LOOKUP_CREW, "test", WORKERS) == RF_OK, "%s", rf_last_error());
    CHECK(rf__workers_start(RF__DEFERRED_FREE_CREW, "test", 1) == RF_OK, "%s", rf_last_error());
    for (; started < CALLERS; started++) {
        seeds[started] = 900 + (uint64_t)started;
        if (pthread_create(&threads[started], NULL, call, &seeds[started]) != 0) break;
    }
    CHECK(started == CALLERS, "only %d threads", started);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}
