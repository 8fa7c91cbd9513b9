/* rf__tasks_run. */
#include "core/tasks.h"

#include <stddef.h>

#include "core/status.h"

typedef struct task_queue {
    int64_t next; /* atomic */
    int64_t count;
    void (*run)(void *context, int64_t task);
    void *context;
} task_queue;

/* A range may hold several workers, but the first takes all remaining tasks. */
static void run_tasks(int64_t from, int64_t to, void *context) {
    task_queue *queue = context;
    (void)from, (void)to;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        if (task >= queue->count) return;
        queue->run(queue->context, task);
    }
}

rf_status rf__tasks_run(const char *operator_name, int64_t count, int64_t workers,
                        void (*run)(void *context, int64_t task), void *context,
                        const rf_executor *executor) {
    task_queue queue = {0, count, run, context};
    if (workers > count) workers = count;
    if (workers <= 1 || executor == NULL) {
        run_tasks(0, 1, &queue);
    } else if (executor->parallel_for(0, workers, 1, run_tasks, &queue) != 0) {
        return rf__fail(RF_ERR_INTERNAL, "recfuse.%s: the thread pool failed", operator_name);
    }
    return RF_OK;
}

int64_t rf__tasks_threads(int64_t threads, int64_t bytes, int64_t worker_bytes) {
    const int64_t useful = bytes / worker_bytes, workers = threads < useful ? threads : useful;
    return workers > 1 ? workers : 1;
}

int64_t rf__tasks_workers(const rf_executor *executor, int64_t bytes) {
    return rf__tasks_threads(executor == NULL ? 1 : executor->threads, bytes, RF__WORKER_BYTES);
}
