#define _POSIX_C_SOURCE 200809L /* clock_gettime, pthread_sigmask */
/* rf__workers_take. */
#include "cpu/workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "base/status.h"

enum { MOST_THREADS = 64, EXIT_SECONDS = 2 };

/* The lock, what is told under it, and what it guards. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_came = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work_ended = PTHREAD_COND_INITIALIZER;
static rf__job *first; /* of jobs whose tasks are not all taken, as far as is known; under the lock */
static rf__job **last = &first; /* under the lock */
static int32_t n_threads; /* atomic; written under the lock */
static int32_t n_idle; /* under the lock */
static int64_t n_jobs; /* handed over and not ended; under the lock */

/* The first job that has work for one thread more; under the lock. */
static rf__job *job_find(void) {
    rf__job *job = first;
    while (job != NULL && job->threads >= job->most_threads) job = job->next;
    return job;
}

/* Takes a job without tasks from the list, unless another thread has; under the lock. */
static void job_unlist(const rf__job *job) {
    rf__job **at = &first;
    while (*at != NULL && *at != job) at = &(*at)->next;
    if (*at == NULL) return;
    *at = job->next;
    if (job->next == NULL) last = at;
}

/* How many threads one that begins wakes, so that who hands a job over wakes but one; under the lock. */
static int32_t others_of(const rf__job *job) {
    int32_t others = job->most_threads - job->threads;
    if (others > n_idle) others = n_idle;
    return others < 2 ? others : 2;
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        rf__job *job = job_find();
        if (job == NULL) {
            n_idle++;
            pthread_cond_wait(&work_came, &lock);
            n_idle--;
            continue;
        }
        job->threads++;
        const int32_t others = others_of(job);
        pthread_mutex_unlock(&lock);
        for (int32_t i = 0; i < others; i++) pthread_cond_signal(&work_came); /* slow: not under the lock */
        for (;;) {
            const int64_t task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED);
            if (task >= job->count) break;
            job->run(job->context, task);
        }
        pthread_mutex_lock(&lock);
        job_unlist(job);
        if (--job->threads > 0) continue;
        pthread_mutex_unlock(&lock);
        job->end(job->context);
        pthread_mutex_lock(&lock);
        if (--n_jobs == 0) pthread_cond_broadcast(&work_ended);
    }
    return NULL;
}

/* A stream may wait for a job, and libraries that jobs use are about to be taken down. */
static void at_exit(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_SECONDS;
    pthread_mutex_lock(&lock);
    while (n_jobs > 0 && pthread_cond_timedwait(&work_ended, &lock, &until) == 0) {
    }
    pthread_mutex_unlock(&lock);
}

/* The threads are gone, and whoever held the lock. */
static void after_fork_in_child(void) {
    static const pthread_mutex_t fresh_lock = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh = PTHREAD_COND_INITIALIZER;
    lock = fresh_lock;
    work_came = work_ended = fresh;
    first = NULL;
    last = &first;
    n_threads = n_idle = 0;
    n_jobs = 0;
}

static void prepare(void) {
    (void)pthread_atfork(NULL, NULL, after_fork_in_child);
    (void)atexit(at_exit);
}

/* Under the lock. Signals are for the program's own threads. */
static bool thread_start(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return false;
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&thread, &attributes, work, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

rf_status rf__workers_start(const char *operator_name, int32_t threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, prepare);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (__atomic_load_n(&n_threads, __ATOMIC_RELAXED) >= threads) return RF_OK;
    pthread_mutex_lock(&lock);
    while (n_threads < threads && thread_start())
        __atomic_store_n(&n_threads, n_threads + 1, __ATOMIC_RELAXED);
    const bool any = n_threads > 0;
    pthread_mutex_unlock(&lock);
    if (any) return RF_OK;
    return rf__fail(RF_ERR_MEMORY, "recfuse.%s: no thread could be started", operator_name);
}

void rf__workers_take(rf__job *job) {
    job->next = NULL;
    job->next_task = 0;
    job->threads = 0;
    pthread_mutex_lock(&lock);
    n_jobs++;
    *last = job;
    last = &job->next;
    const bool wakes = n_idle > 0;
    pthread_mutex_unlock(&lock);
    if (wakes) pthread_cond_signal(&work_came);
}
