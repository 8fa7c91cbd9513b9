/* Waits between threads in which the waker never blocks: no lock, and a system call only if the waiting
 * thread sleeps. */
#ifndef RECFUSE_BASE_WAITING_H
#define RECFUSE_BASE_WAITING_H

#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>

/* A waker first claims a thread: by its flag if it watches, otherwise from the count of sleepers, to whom it
 * then posts. So there are as many posts as claims of sleepers. */
typedef struct rf__waiting {
    sem_t posts;
    _Alignas(64) int32_t n_watching; /* atomic: 0 or 1; like the next count, threads that are not claimed */
    int32_t n_asleep; /* atomic */
} rf__waiting;

/* Resets to no threads. */
void rf__waiting_reset(rf__waiting *waiting);
/* Wakes up to this many waiting threads. The caller must have written the data for them before. */
void rf__waiting_wake(rf__waiting *waiting, int32_t threads);

/* A thread announces by rf__waiting_begin_... that it waits, checks its condition once more, and then waits,
 * or ends the wait if the condition holds. One thread at a time watches: it polls its flag until it is woken
 * or until the time `until`, of rf__waiting_now. Others sleep. */
void rf__waiting_begin_watch(rf__waiting *waiting);
void rf__waiting_watch(rf__waiting *waiting, int64_t until);
void rf__waiting_end_watch(rf__waiting *waiting);
void rf__waiting_begin_sleep(rf__waiting *waiting);
void rf__waiting_sleep(rf__waiting *waiting);
void rf__waiting_end_sleep(rf__waiting *waiting);

/* ns, from some time on. */
int64_t rf__waiting_now(void);

#endif
