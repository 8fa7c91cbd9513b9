/* Independent tasks, numbered from 0, that worker threads take from a shared counter. The result of a task
 * must not depend on its worker. */
#ifndef RECFUSE_CPU_TASKS_H
#define RECFUSE_CPU_TASKS_H

#include "recfuse.h"

/* Bytes read and written that are worth another thread. */
enum { RF__WORKER_BYTES = 65536 };

/* Runs tasks 0 to count - 1; returns when all are done. `workers` <= 1, or no executor: on the caller's
 * thread. `operator_name` opens the message of a failure. */
rf_status rf__tasks_run(const char *operator_name, int64_t count, int64_t workers,
                        void (*run)(void *context, int64_t task), void *context, const rf_executor *executor);

/* Threads of the executor that `bytes` of work keep busy, at least 1. */
int64_t rf__tasks_workers(const rf_executor *executor, int64_t bytes);
/* As above, for any number of threads, each of which needs `worker_bytes` of work. */
int64_t rf__tasks_threads(int64_t threads, int64_t bytes, int64_t worker_bytes);

#endif
