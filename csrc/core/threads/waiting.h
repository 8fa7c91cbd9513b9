/* How threads wait for each other where whoever wakes one must not wait itself: no lock, and a system call only where the
 * other one sleeps. */
#ifndef RECFUSE_BASE_WAITING_H
#define RECFUSE_BASE_WAITING_H

#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>

/* Who wakes a thread claims it first: by its flag where it watches, else as one of those asleep, to whom it then posts. So
 * there are as many posts as claims of sleepers. */
typedef struct rf__waiting {
    sem_t posts;
    _Alignas(64) int32_t n_watching; /* atomic: 0 or 1; as the next one, threads that nobody has claimed */
    int32_t n_asleep; /* atomic */
} rf__waiting;

/* Of no threads. */
void rf__waiting_reset(rf__waiting *of);
/* Wakes so many threads, as far as they wait. What these are to see has been written before. */
void rf__waiting_wake(rf__waiting *of, int32_t threads);

/* A thread says that it waits by rf__waiting_begin_..., looks once more whether there is what it waits for, and then goes on
 * waiting, or ends it where there is. One thread at a time watches: it looks at its flag until it is woken or the time is
 * `until`, of rf__waiting_now. Others sleep. */
void rf__waiting_begin_watch(rf__waiting *of);
void rf__waiting_watch(rf__waiting *of, int64_t until);
void rf__waiting_end_watch(rf__waiting *of);
void rf__waiting_begin_sleep(rf__waiting *of);
void rf__waiting_sleep(rf__waiting *of);
void rf__waiting_end_sleep(rf__waiting *of);

/* ns, from some time on. */
int64_t rf__waiting_now(void);

#endif
