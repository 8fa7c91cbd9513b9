/* An allocator of device memory of streams that records its blocks. */
#ifndef RECFUSE_TESTS_ALLOCATOR_H
#define RECFUSE_TESTS_ALLOCATOR_H

#include <pthread.h>

#include "recfuse.h"

enum { MOST_BLOCKS = 4096 };

typedef struct block {
    void *memory;
    void *stream;
    bool lasts, free;
} block;

typedef struct allocations {
    pthread_mutex_t lock;
    block blocks[MOST_BLOCKS];
    int n_blocks, lasting, brief; /* allocated blocks */
    int live; /* that were not released yet */
    rf_status status; /* status of the next allocation */
} allocations;

extern allocations given; /* guarded by its lock if there are threads */
extern const rf_cuda_allocator noting_allocator;

/* Calls of the driver, up to now, that may wait for the device. */
int waits(void);

#endif
