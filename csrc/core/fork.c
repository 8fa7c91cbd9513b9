#include "core/fork.h"

#include <pthread.h>
#include <stdatomic.h>

/* The lock guards the following three; a fork holds it, so that they are consistent in a child. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* used under the lock */
static int inside;        /* guards held by all threads; under the lock */
static int forks;         /* forks that wait or run; under the lock */
static bool cuda_started; /* under the lock */

static atomic_bool cuda_lost; /* atomic; set only in children */

static _Thread_local int guards_held; /* guards held by this thread */

void rf__fork_guard_begin(void) {
    pthread_mutex_lock(&lock);
    while (forks > 0 && guards_held == 0) pthread_cond_wait(&changed, &lock);
    inside++;
    guards_held++;
    pthread_mutex_unlock(&lock);
}

void rf__fork_guard_end(void) {
    pthread_mutex_lock(&lock);
    inside--;
    guards_held--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void rf__fork_cuda_started(void) {
    pthread_mutex_lock(&lock);
    cuda_started = true;
    pthread_mutex_unlock(&lock);
}

bool rf__fork_cuda_lost(void) { return atomic_load_explicit(&cuda_lost, memory_order_relaxed); }

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    forks++;
    /* Skipped if the driver forks to start a helper: threads may wait for the lock that this thread holds. */
    while (guards_held == 0 && inside > 0) pthread_cond_wait(&changed, &lock);
}

static void after_fork_in_parent(void) {
    forks--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* The threads that may have waited for `changed` do not exist in the child, so it is initialised again. */
static void after_fork_in_child(void) {
    static const pthread_cond_t fresh = PTHREAD_COND_INITIALIZER;
    changed = fresh;
    inside = guards_held;
    forks = 0;
    if (cuda_started) atomic_store_explicit(&cuda_lost, true, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void watch_forks(void) {
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
