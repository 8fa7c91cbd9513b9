/* The library's own threads, for work for which its caller does not wait. Idle threads sleep. */
#ifndef RECFUSE_BASE_WORKERS_H
#define RECFUSE_BASE_WORKERS_H

#include "recfuse.h"

/* Independent tasks, numbered from 0. The memory is the caller's until `end` is called. */
typedef struct rf__job {
    void (*run)(void *context, int64_t task);
    /* Called once, after the last task, on one of the threads; the job is not accessed afterwards. */
    void (*end)(void *context);
    void *context;
    int64_t count; /* tasks; without any only `end` is called */
    int32_t most_threads; /* that work on it at once, at least 1 */

    struct rf__job *next; /* owned by the threads from here on */
    int64_t next_task; /* atomic */
    int32_t threads; /* at work on it; under their lock */
} rf__job;

typedef enum rf__crew {
    /* GPUs wait for these. So they call nothing that may wait for a GPU: no driver, and no allocator of
     * torch's. */
    RF__LOOKUP_CREW,
    RF__DEFERRED_FREE_CREW, /* one thread, which frees memory that threads of the first crew must not free */
    RF__CREWS
} rf__crew;

/* Starts threads until a crew has this many, or as many as the system allows. RF_ERR_MEMORY: it has none.
 * `operator_name` begins the message. */
rf_status rf__workers_start(rf__crew crew, const char *operator_name, int32_t threads);

/* Submits a job and returns at once; requires rf__workers_start in this process. Cannot fail. Jobs of a crew
 * begin in the order of submission. A child of a fork has neither threads nor jobs; the exit of a process
 * waits for jobs, for at most two seconds. */
void rf__workers_take(rf__crew crew, rf__job *job);

#endif
