#define _GNU_SOURCE /* sched_getaffinity, SCHED_BATCH */
/* rf__workers_take. */
#include "base/threads/workers.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "base/status.h"

enum {
    MOST_THREADS = 64,
    EXIT_SECONDS = 2,
    LEAST_CORES = 4, /* of which one may be kept busy by a thread that watches for work */
    SHORT_WATCH = 50000, /* ns */
    LONG_WATCH = 400000, /* where jobs have come so soon after each other */
    LOOKS = 32, /* between looks at the clock */
};

/* Whoever hands a job over never takes the lock, and mostly makes no system call either: it may be the only thread that keeps
 * a GPU busy. A thread that has run out of work watches for more for a while before it sleeps, so that a store wakes it. The
 * time adapts itself, as in haltpoll of Linux: a job a millisecond costs a twentieth of a core.
 *
 * Who wakes a thread claims it first, its flag where it watches, else one of those asleep, and then posts once. So there are
 * as many posts as threads claimed, and a thread that finds itself claimed when it would rather go on takes its post. */
typedef struct crew {
    pthread_mutex_t lock; /* guards what follows, up to `arrived` */
    pthread_cond_t work_ended;
    rf__job *first,
        **last; /* jobs whose tasks are not all taken, as far as is known; last: NULL where there is none */
    int64_t idle_since, watch; /* ns; 0: there is work. How long to watch */
    sem_t posts; /* to those asleep */
    bool may_watch, has_watcher;
    _Alignas(64) rf__job *arrived; /* atomic, as all from here on: handed over, the last one first */
    int32_t is_watched; /* by a thread that nobody has claimed */
    int32_t n_asleep; /* of them, those that nobody has claimed */
    int32_t n_threads;
    int64_t n_jobs; /* handed over and not ended */
} crew;

static crew crews[RF__CREWS];

static void crews_reset(void) {
    for (int c = 0; c < RF__CREWS; c++) {
        crews[c] = (crew){.lock = PTHREAD_MUTEX_INITIALIZER, .work_ended = PTHREAD_COND_INITIALIZER};
        (void)sem_init(&crews[c].posts, 0, 0);
    }
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Takes one away, unless there is none. */
static bool claim(int32_t *count) {
    int32_t found = __atomic_load_n(count, __ATOMIC_SEQ_CST);
    while (found > 0)
        if (__atomic_compare_exchange_n(count, &found, found - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

static void wake(crew *of, int32_t threads) {
    if (threads > 0 && claim(&of->is_watched)) threads--;
    for (; threads > 0 && claim(&of->n_asleep); threads--) (void)sem_post(&of->posts);
}

/* Puts jobs that have arrived behind the others, in their order; under the lock. */
static void jobs_list(crew *of) {
    rf__job *arrived = __atomic_exchange_n(&of->arrived, NULL, __ATOMIC_SEQ_CST), *in_order = NULL;
    if (arrived == NULL) return;
    if (of->idle_since != 0) of->watch = now() - of->idle_since < LONG_WATCH ? LONG_WATCH : SHORT_WATCH;
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

/* How many threads more jobs take, up to a few: those that begin wake others in turn; under the lock. */
static int32_t room_of(const crew *of) {
    enum { FEW = 2 };
    int32_t room = 0;
    for (const rf__job *job = of->first; job != NULL && room < FEW; job = job->next)
        room += job->most_threads - job->threads;
    return room < FEW ? room : FEW;
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

static void pause_shortly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until the thread is claimed, or has claimed itself as it has watched for so long. */
static void watch(crew *of, int64_t until) {
    do {
        for (int i = 0; i < LOOKS; i++, pause_shortly())
            if (__atomic_load_n(&of->is_watched, __ATOMIC_ACQUIRE) == 0) return;
    } while (now() < until);
    (void)claim(&of->is_watched);
}

/* Sleeps unless a job has come meanwhile; under the lock, which is left for that time. */
static void rest(crew *of) {
    __atomic_fetch_add(&of->n_asleep, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&of->arrived, __ATOMIC_SEQ_CST) != NULL && claim(&of->n_asleep)) return;
    pthread_mutex_unlock(&of->lock);
    while (sem_wait(&of->posts) != 0) {
    }
    pthread_mutex_lock(&of->lock);
}

/* Watches for a job, if no other thread does; under the lock, which is left for that time. */
static void keep_watch(crew *of) {
    if (!of->may_watch || of->has_watcher) return;
    const int64_t since = of->idle_since = now(), until = since + of->watch;
    of->has_watcher = true;
    __atomic_store_n(&of->is_watched, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&of->lock);
    watch(of, until);
    pthread_mutex_lock(&of->lock);
    of->has_watcher = false;
}

/* Linux likes to wake a thread on its waker's core and to let it run there at once: whoever hands a job over would be stopped
 * for the whole of it. One that is meant for batches takes no core from another when it wakes. Where this fails it is as any. */
static void be_modest(void) {
    const struct sched_param none = {0};
    (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
}

static void *work(void *context) {
    crew *of = context;
    bool has_worked = false;
    be_modest();
    pthread_mutex_lock(&of->lock);
    for (;;) {
        rf__job *job = job_find(of);
        if (job == NULL) {
            (has_worked ? keep_watch : rest)(of);
            has_worked = false;
            continue;
        }
        has_worked = true;
        job->threads++;
        const int32_t room = room_of(of);
        pthread_mutex_unlock(&of->lock);
        wake(of, room); /* slow: not under the lock */
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

/* In the child of a fork the threads are gone, and whoever held the locks. */
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

/* Whether a core can be spared for a thread that watches. */
static bool has_cores(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= LEAST_CORES;
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
    wake(of, 1);
}
