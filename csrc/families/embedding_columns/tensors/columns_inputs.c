/* The lists of inputs with numbers: at most one per running call, so a search compares each. */
#include "families/embedding_columns/tensors/columns_inputs.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

/* Guards the list and all of a list's fields that are not written once. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by the lock. */
static rf__columns_inputs *first;
/* Guarded by the lock. */
static int64_t last_number;

/* A fork waits until the lock is free, or a child could never take it. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, after_fork);
}

rf__columns_inputs *rf__columns_inputs_new(int64_t count) {
    rf__columns_inputs *inputs = calloc(1, sizeof *inputs + (size_t)count * sizeof *inputs->rows);
    if (inputs == NULL) return NULL;
    inputs->count = count;
    inputs->references = 1;
    inputs->batch = inputs->on_gpu = inputs->device = -1;
    return inputs;
}

int64_t rf__columns_inputs_add(rf__columns_inputs *inputs) {
    pthread_mutex_lock(&lock);
    inputs->number = ++last_number;
    inputs->next = first;
    if (first != NULL) first->previous = inputs;
    first = inputs;
    pthread_mutex_unlock(&lock);
    return inputs->number;
}

rf__columns_inputs *rf__columns_inputs_take(int64_t number) {
    pthread_mutex_lock(&lock);
    rf__columns_inputs *entry = first;
    while (entry != NULL && entry->number != number) entry = entry->next;
    if (entry != NULL) entry->references++;
    pthread_mutex_unlock(&lock);
    return entry;
}

void rf__columns_inputs_drop(rf__columns_inputs *inputs) {
    if (inputs == NULL) return;
    pthread_mutex_lock(&lock);
    const bool is_last = --inputs->references == 0;
    pthread_mutex_unlock(&lock);
    if (is_last) free(inputs);
}

void rf__columns_inputs_remove(rf__columns_inputs *inputs) {
    if (inputs == NULL) return;
    pthread_mutex_lock(&lock);
    if (inputs->number > 0) {
        if (inputs->previous != NULL)
            inputs->previous->next = inputs->next;
        else
            first = inputs->next;
        if (inputs->next != NULL) inputs->next->previous = inputs->previous;
        inputs->number = 0;
    }
    pthread_mutex_unlock(&lock);
    rf__columns_inputs_drop(inputs);
}
