/* rf__threads_executor. */
#include "core/tools/threads.h"

#include <pthread.h>

typedef struct range {
    int64_t from, to;
    void (*body)(int64_t from, int64_t to, void *context);
    void *context;
} range;

static void *range_run(void *argument) {
    const range *part = argument;
    part->body(part->from, part->to, part->context);
    return NULL;
}

/* The first range, and those that get no thread, run on the caller's. */
static int32_t parallel_for(int64_t begin, int64_t end, int64_t grain,
                            void (*body)(int64_t from, int64_t to, void *context), void *context) {
    range ranges[RF__MOST_THREADS];
    pthread_t threads[RF__MOST_THREADS];
    int32_t count = 0, started = 0;
    int64_t chunk = (end - begin) / RF__MOST_THREADS + 1;
    if (chunk < grain) chunk = grain;
    for (int64_t from = begin; from < end; from += chunk, count++)
        ranges[count] = (range){from, end - from < chunk ? end : from + chunk, body, context};
    while (started + 1 < count &&
           pthread_create(&threads[started], NULL, range_run, &ranges[started + 1]) == 0)
        started++;
    if (count > 0) range_run(&ranges[0]);
    for (int32_t i = started + 1; i < count; i++) range_run(&ranges[i]);
    for (int32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return 0;
}

rf_executor rf__threads_executor(int64_t threads) {
    const int32_t limit = RF__MOST_THREADS;
    return (rf_executor){threads < 1 ? 1 : threads > limit ? limit : (int32_t)threads, parallel_for};
}
