#define _GNU_SOURCE /* sched_getaffinity, SCHED_BATCH */
/* rf__workers_take. */
#include "core/threads/workers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "core/status.h"
#include "core/threads/parker.h"

#ifndef RF_LEAST_CORES /* tests */
#define RF_LEAST_CORES 4 /* of which a thread that watches for work may occupy one */
#endif

enum {
    MOST_THREADS = 64,
    EXIT_SECONDS = 2,
    SHORT_WATCH = 50000, /* ns */
    LONG_WATCH = 400000, /* if jobs follow each other within this time */
};

/* The submitter of a job never takes the lock, and rarely makes a system call, because it may be the only
 * thread that feeds a GPU. A thread without work watches for a while before it sleeps. The duration adapts
 * itself, like KVM's halt polling: with a job per millisecond it costs a twentieth of a core. */
typedef struct crew {
    pthread_mutex_t lock; /* guards the following fields, up to `arrived` */
    pthread_cond_t work_ended;
    rf__job *first, **last; /* jobs that may have untaken tasks; last: NULL without jobs */
    bool may_watch, has_watcher;
    int64_t idle_since, watch; /* ns; 0: not idle. Duration of the watch */
    _Alignas(64) rf__job *arrived; /* atomic, as those from here on: handed over, the last one first */
    int32_t n_threads;
    int64_t n_jobs; /* handed over and not ended */
    rf__parker parker;
} crew;

/* Each is guarded by its own lock, except for atomic fields. */
static crew crews[RF__CREWS];

static void crews_reset(void) {
    for (int c = 0; c < RF__CREWS; c++) {
        crews[c] = (crew){.lock = PTHREAD_MUTEX_INITIALIZER, .work_ended = PTHREAD_COND_INITIALIZER};
        rf__parker_reset(&crews[c].parker);
    }
}

/* Appends arrived jobs in their order; under the lock. */
static void jobs_list(crew *of) {
    rf__job *arrived = __atomic_exchange_n(&of->arrived, NULL, __ATOMIC_SEQ_CST), *in_order = NULL;
    if (arrived == NULL) return;
    if (of->idle_since != 0) {
        const bool is_soon = rf__parker_now() - of->idle_since < LONG_WATCH;
        of->watch = is_soon ? LONG_WATCH : SHORT_WATCH;
    }
    of->idle_since = 0;
    if (of->first == NULL) of->last = &of->first;
    rf__job **last = &arrived->next;
    while (arrived != NULL) {
        rf__job *next = arrived->next;
        arrived->next = in_order;
        in_order = arrived;
        arrived = next;
    }
    *of->last = in_order;
    of->last = last;
}

/* Returns the number of additional threads that jobs can use, up to a few: threads that begin wake others in
 * turn; under the lock. */
static int32_t useful_threads(const crew *of) {
    enum { MOST = 2 };
    int32_t useful = 0;
    for (const rf__job *job = of->first; job != NULL && useful < MOST; job = job->next)
        useful += job->most_threads - job->threads;
    return useful < MOST ? useful : MOST;
}

/* The first job that has work for one thread more; under the lock. */
static rf__job *job_find(crew *of) {
    jobs_list(of);
    rf__job *job = of->first;
    while (job != NULL && job->threads >= job->most_threads) job = job->next;
    return job;
}

/* Takes a job without tasks from the list, unless another thread has; under the lock. */
static void job_unlist(crew *of, const rf__job *job) {
    rf__job **at = &of->first;
    while (*at != NULL && *at != job) at = &(*at)->next;
    if (*at == NULL) return;
    *at = job->next;
    if (job->next == NULL) of->last = at;
}

static bool has_arrived(const crew *of) { return __atomic_load_n(&of->arrived, __ATOMIC_SEQ_CST) != NULL; }

/* Until there may be a job; under the lock, which is left for that time. */
static void job_await(crew *of) {
    rf__parker_begin_sleep(&of->parker);
    if (has_arrived(of)) {
        rf__parker_end_sleep(&of->parker);
        return;
    }
    pthread_mutex_unlock(&of->lock);
    rf__parker_sleep(&of->parker);
    pthread_mutex_lock(&of->lock);
}

/* As above, for a short time. */
static void job_watch(crew *of) {
    rf__parker_begin_watch(&of->parker);
    if (has_arrived(of)) {
        rf__parker_end_watch(&of->parker);
        return;
    }
    const int64_t since = rf__parker_now(), until = since + of->watch;
    of->idle_since = since;
    of->has_watcher = true;
    pthread_mutex_unlock(&of->lock);
    rf__parker_watch(&of->parker, until);
    pthread_mutex_lock(&of->lock);
    of->has_watcher = false;
}

/* Linux often wakes a thread on its waker's core and runs it there at once, which would stop the submitter of
 * a job. A thread of the batch class preempts no other when it wakes. A failure has no effect. */
static void thread_make_batch(void) {
    const struct sched_param priority = {0};
    (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &priority);
}

static void *work(void *context) {
    crew *of = context;
    bool has_worked = false;
    thread_make_batch();
    pthread_mutex_lock(&of->lock);
    for (;;) {
        rf__job *job = job_find(of);
        if (job == NULL) {
            const bool watches = has_worked && of->may_watch && !of->has_watcher;
            (watches ? job_watch : job_await)(of);
            has_worked = false;
            continue;
        }
        has_worked = true;
        job->threads++;
        const int32_t useful = useful_threads(of);
        pthread_mutex_unlock(&of->lock);
        rf__parker_wake(&of->parker, useful); /* slow: not under the lock */
        for (;;) {
            const int64_t task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED);
            if (task >= job->count) break;
            job->run(job->context, task);
        }
        pthread_mutex_lock(&of->lock);
        job_unlist(of, job);
        if (--job->threads > 0) continue;
        pthread_mutex_unlock(&of->lock);
        job->end(job->context);
        pthread_mutex_lock(&of->lock);
        if (__atomic_sub_fetch(&of->n_jobs, 1, __ATOMIC_SEQ_CST) == 0)
            pthread_cond_broadcast(&of->work_ended);
    }
    return NULL;
}

/* A stream may wait for a job, and libraries that jobs use are about to be taken down. */
static void at_exit(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_SECONDS;
    for (int c = 0; c < RF__CREWS; c++) { /* the first hands jobs to the second */
        crew *of = &crews[c];
        pthread_mutex_lock(&of->lock);
        while (__atomic_load_n(&of->n_jobs, __ATOMIC_SEQ_CST) > 0 &&
               pthread_cond_timedwait(&of->work_ended, &of->lock, &until) == 0) {
        }
        pthread_mutex_unlock(&of->lock);
    }
}

/* The child of a fork has no such threads, and no holders of the locks. */
static void prepare(void) {
    crews_reset();
    (void)pthread_atfork(NULL, NULL, crews_reset);
    (void)atexit(at_exit);
}

/* Under the lock. Signals are for the program's own threads. */
static bool thread_start(crew *of) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return false;
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&thread, &attributes, work, of) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

/* Returns true if a core can be spared for a thread that watches. */
static bool has_cores(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= RF_LEAST_CORES;
}

rf_status rf__workers_start(rf__crew crew, const char *operator_name, int32_t threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct crew *of = &crews[crew];
    (void)pthread_once(&once, prepare);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (__atomic_load_n(&of->n_threads, __ATOMIC_RELAXED) >= threads) return RF_OK;
    pthread_mutex_lock(&of->lock);
    of->may_watch = crew == RF__LOOKUP_CREW && has_cores();
    while (of->n_threads < threads && thread_start(of))
        __atomic_store_n(&of->n_threads, of->n_threads + 1, __ATOMIC_RELAXED);
    const bool any = of->n_threads > 0;
    pthread_mutex_unlock(&of->lock);
    if (any) return RF_OK;
    return rf__fail(RF_ERR_MEMORY, "recfuse.%s: no thread could be started", operator_name);
}

void rf__workers_take(rf__crew crew, rf__job *job) {
    struct crew *of = &crews[crew];
    job->next_task = 0;
    job->threads = 0;
    __atomic_fetch_add(&of->n_jobs, 1, __ATOMIC_RELAXED);
    job->next = __atomic_load_n(&of->arrived, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&of->arrived, &job->next, job, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_RELAXED)) {
    }
    rf__parker_wake(&of->parker, 1);
}
