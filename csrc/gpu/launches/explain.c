/* The record of launches. */
#define _GNU_SOURCE /* strdup */
#include "gpu/launches/explain.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* The one record. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the lock of the rest but `is_recording` */
static atomic_bool is_recording; /* atomic: a look at it costs a call nothing */
static rf__explained *record; /* [capacity], under the lock */
static int32_t count, capacity, calls; /* under the lock */

bool rf__explains(void) { return atomic_load_explicit(&is_recording, memory_order_relaxed); }

rf_status rf__explain_begin(const rf__gpu *gpu) {
    pthread_mutex_lock(&lock);
    const bool free_to_begin = !rf__explains();
    if (free_to_begin) {
        count = calls = 0;
        atomic_store_explicit(&is_recording, true, memory_order_relaxed);
    }
    pthread_mutex_unlock(&lock);
    RF_FAIL_IF(
        !free_to_begin, RF_ERR_VALUE,
        "explain: another explain() runs in this process; expected a single explain(). Wait for its end.");
    rf__cuda_device_describe(gpu);
    return RF_OK;
}

void rf__explain_end(rf__explained **launches, int32_t *n) {
    rf__cuda_device_describe(NULL);
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&is_recording, false, memory_order_relaxed);
    *launches = record;
    *n = count;
    record = NULL;
    count = capacity = 0;
    pthread_mutex_unlock(&lock);
}

void rf__explained_free(rf__explained *launches, int32_t n) {
    for (int32_t i = 0; i < n; i++) free(launches[i].defines);
    free(launches);
}

/* Under the lock. */
static rf_status record_grow(int32_t added) {
    if (count + added <= capacity) return RF_OK;
    const int32_t new_capacity = 2 * (count + added);
    rf__explained *grown = realloc(record, (size_t)new_capacity * sizeof *grown);
    RF_FAIL_IF(grown == NULL, RF_ERR_MEMORY, "explain: no memory for %d launches", (int)new_capacity);
    record = grown;
    capacity = new_capacity;
    return RF_OK;
}

static rf_status launch_explain(const rf__gpu *gpu, const rf__launches *launches, int32_t number,
                                int32_t call, rf__explained *explained) {
    const rf__kernel_launch *launch = &launches->launches[number];
    rf__kernel_options options = {0};
    if (launch->source != NULL) RF_CHECK(launch->describe(rf__launches_key(launches, number), &options));
    char *defines = strdup(options.defines);
    RF_FAIL_IF(defines == NULL, RF_ERR_MEMORY, "explain: no memory for the options of a kernel");
    *explained = (rf__explained){.name = launches->name,
                                 .gpu = *gpu,
                                 .launch = *launch,
                                 .workspace_bytes = launches->workspace_bytes,
                                 .dynamic_shared = options.dynamic_shared,
                                 .call = call,
                                 .defines = defines};
    return RF_OK;
}

rf_status rf__explained_of(const rf__gpu *gpu, const rf__launches *launches, rf__explained **explained) {
    rf_status status = RF_OK;
    rf__explained *explanations = calloc((size_t)launches->count + 1, sizeof *explanations);
    RF_FAIL_IF(explanations == NULL, RF_ERR_MEMORY, "explain: no memory for %d launches",
               (int)launches->count);
    for (int32_t i = 0; i < launches->count; i++)
        RF_TRY(launch_explain(gpu, launches, i, 0, &explanations[i]));
out:
    if (status != RF_OK) rf__explained_free(explanations, launches->count);
    *explained = status == RF_OK ? explanations : NULL;
    return status;
}

rf_status rf__explain_record(const rf__gpu *gpu, const rf__launches *launches) {
    rf_status status = RF_OK;
    pthread_mutex_lock(&lock);
    if (!rf__explains()) goto out; /* it has ended in between */
    RF_TRY(record_grow(launches->count));
    for (int32_t i = 0; i < launches->count; i++, count++)
        RF_TRY(launch_explain(gpu, launches, i, calls, &record[count]));
    calls++;
out:
    pthread_mutex_unlock(&lock);
    return status;
}
