/* Waits between threads in which the waker never blocks: no lock, and a system call only if the waiting
 * thread sleeps. */
#ifndef RECFUSE_BASE_PARKER_H
#define RECFUSE_BASE_PARKER_H

#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>

/* A waker first claims a thread: by its flag if it watches, otherwise from the count of sleepers, to whom it
 * then posts. So there are as many posts as claims of sleepers. */
typedef struct rf__parker {
    sem_t posts;
    _Alignas(64) int32_t n_watching; /* atomic: 0 or 1; like the next count, threads that are not claimed */
    int32_t n_asleep; /* atomic */
} rf__parker;

/* Resets the parker to no threads. */
void rf__parker_reset(rf__parker *parker);
/* Wakes up to this many waiting threads. The caller must have written the data for them before. */
void rf__parker_wake(rf__parker *parker, int32_t threads);

/* A thread announces by rf__parker_begin_... that it waits, checks its condition once more, and then waits,
 * or ends the wait if the condition holds. One thread at a time watches: it polls its flag until it is woken
 * or until the time `until`, of rf__parker_now. Others sleep. */
void rf__parker_begin_watch(rf__parker *parker);
void rf__parker_watch(rf__parker *parker, int64_t until);
void rf__parker_end_watch(rf__parker *parker);
void rf__parker_begin_sleep(rf__parker *parker);
void rf__parker_sleep(rf__parker *parker);
void rf__parker_end_sleep(rf__parker *parker);

/* ns, from some time on. */
int64_t rf__parker_now(void);

#endif
