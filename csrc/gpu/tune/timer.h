/* The one timer of work on a GPU: variants in turns, between events of the device. */
#ifndef RECFUSE_CUDA_TUNE_TIMER_H
#define RECFUSE_CUDA_TUNE_TIMER_H

#include "gpu/driver/device.h"

typedef struct rf__timing {
    /* Puts a variant's work on a batch into the stream. Its failure is the timing's. */
    rf_status (*run)(void *context, int64_t variant, int64_t batch);
    void *context; /* [1], may be NULL: handed to run */
    int64_t n_variants, n_batches, rounds;
    double *seconds; /* [n_variants, rounds]: of one batch */
} rf__timing;

/* After an untimed run of each variant over all batches, each round times each once, in an order that
 * rotates. In the device's context; waits for the stream. */
rf_status rf__time(const rf__cuda_device *device, void *stream, const rf__timing *timing);

#endif
