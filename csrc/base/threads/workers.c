#define _POSIX_C_SOURCE 200809L /* clock_gettime, pthread_sigmask */
/* rf__workers_take. */
#include "base/threads/workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "base/status.h"

enum { MOST_THREADS = 64, EXIT_SECONDS = 2 };

/* The lock guards the fields behind the conditions. */
typedef struct crew {
    pthread_mutex_t lock;
    pthread_cond_t work_came, work_ended;
    rf__job *first,
        **last; /* jobs whose tasks are not all taken, as far as is known; last: NULL where there is none */
    int32_t n_threads; /* atomic */
    int32_t n_idle;
    int64_t n_jobs; /* handed over and not ended */
} crew;

static const crew fresh = {.lock = PTHREAD_MUTEX_INITIALIZER,
                           .work_came = PTHREAD_COND_INITIALIZER,
                           .work_ended = PTHREAD_COND_INITIALIZER};

/* Each under its own lock. */
static crew crews[RF__CREWS] = {[0 ... RF__CREWS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                                         .work_came = PTHREAD_COND_INITIALIZER,
                                                         .work_ended = PTHREAD_COND_INITIALIZER}};

/* The first job that has work for one thread more; under the lock. */
static rf__job *job_find(const crew *of) {
    rf__job *job = of->first;
    while (job != NULL && job->threads >= job->most_threads) job = job->next;
    return job;
}

static void job_list(crew *of, rf__job *job) {
    job->next = NULL;
    if (of->first == NULL) of->last = &of->first;
    *of->last = job;
    of->last = &job->next;
}

/* Takes a job without tasks from the list, unless another thread has; under the lock. */
static void job_unlist(crew *of, const rf__job *job) {
    rf__job **at = &of->first;
    while (*at != NULL && *at != job) at = &(*at)->next;
    if (*at == NULL) return;
    *at = job->next;
    if (job->next == NULL) of->last = at;
}

/* How many threads one that begins wakes, so that who hands a job over wakes but one; under the lock. */
static int32_t others_of(const crew *of, const rf__job *job) {
    int32_t others = job->most_threads - job->threads;
    if (others > of->n_idle) others = of->n_idle;
    return others < 2 ? others : 2;
}

static void *work(void *context) {
    crew *of = context;
    pthread_mutex_lock(&of->lock);
    for (;;) {
        rf__job *job = job_find(of);
        if (job == NULL) {
            of->n_idle++;
            pthread_cond_wait(&of->work_came, &of->lock);
            of->n_idle--;
            continue;
        }
        job->threads++;
        const int32_t others = others_of(of, job);
        pthread_mutex_unlock(&of->lock);
        for (int32_t i = 0; i < others; i++)
            pthread_cond_signal(&of->work_came); /* slow: not under the lock */
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
        if (--of->n_jobs == 0) pthread_cond_broadcast(&of->work_ended);
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
        while (of->n_jobs > 0 && pthread_cond_timedwait(&of->work_ended, &of->lock, &until) == 0) {
        }
        pthread_mutex_unlock(&of->lock);
    }
}

/* The threads are gone, and whoever held the locks. */
static void after_fork_in_child(void) {
    for (int c = 0; c < RF__CREWS; c++) crews[c] = fresh;
}

static void prepare(void) {
    (void)pthread_atfork(NULL, NULL, after_fork_in_child);
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

rf_status rf__workers_start(rf__crew crew, const char *operator_name, int32_t threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct crew *of = &crews[crew];
    (void)pthread_once(&once, prepare);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (__atomic_load_n(&of->n_threads, __ATOMIC_RELAXED) >= threads) return RF_OK;
    pthread_mutex_lock(&of->lock);
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
    pthread_mutex_lock(&of->lock);
    of->n_jobs++;
    job_list(of, job);
    const bool wakes = of->n_idle > 0;
    pthread_mutex_unlock(&of->lock);
    if (wakes) pthread_cond_signal(&of->work_came);
}
