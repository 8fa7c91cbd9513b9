/* Threads of the library's own, for work that its caller does not wait for. They sleep while there is none. */
#ifndef RECFUSE_BASE_WORKERS_H
#define RECFUSE_BASE_WORKERS_H

#include "recfuse.h"

/* Independent tasks, numbered from 0. The memory is the caller's until `end` is called. */
typedef struct rf__job {
    void (*run)(void *context, int64_t task);
    void (*end)(
        void
            *context); /* once, after the last task, on one of the threads; the job is not touched any more */
    void *context;
    int64_t count; /* tasks; of none, `end` is all */
    int32_t most_threads; /* that work on it at once, at least 1 */

    struct rf__job *next; /* from here on the threads' */
    int64_t next_task; /* atomic */
    int32_t threads; /* at work on it; under their lock */
} rf__job;

typedef enum rf__crew {
    /* GPUs wait for these. So they call nothing that may wait for a GPU: no driver, and no allocator of torch's. */
    RF__LOOKUP_CREW,
    RF__DISPOSAL_CREW, /* one thread, which frees what those of the first may not */
    RF__CREWS
} rf__crew;

/* Starts threads until a crew has so many, or fewer where the system gives no more. RF_ERR_MEMORY: it has none.
 * `operator_name` opens the message. */
rf_status rf__workers_start(rf__crew crew, const char *operator_name, int32_t threads);

/* Hands a job over and returns at once; only after rf__workers_start, in this process. Cannot fail. Jobs of a crew begin in
 * the order in which they come. A child of a fork has neither threads nor jobs; the end of a process waits for jobs, for two
 * seconds at most. */
void rf__workers_take(rf__crew crew, rf__job *job);

#endif
