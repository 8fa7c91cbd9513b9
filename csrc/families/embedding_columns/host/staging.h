/* Pinned staging buffers: threads of the host fill a buffer while a stream waits for it, after the caller has
 * returned.
 *
 * The stream waits for a word in the buffer, which counts its uses. A caller passes the buffer to its threads
 * before it puts the wait into the stream, and they always write the word, so no stream waits forever. A
 * buffer is reused when its word says that it was filled and its event that it was read.
 */
#ifndef RECFUSE_COLUMNS_STAGING_H
#define RECFUSE_COLUMNS_STAGING_H

#include <stddef.h>

#include "gpu/driver/device.h"

typedef struct rf__staging {
    void *memory; /* [bytes], undefined */
    rf__cu_pointer memory_on_device; /* the same memory, at the address for kernels of the device */
    size_t bytes;
    struct rf__staging *next; /* staging.c's, as all that follows */
    rf__cu_pointer word_on_device;
    uint32_t *word; /* atomic */
    uint32_t number; /* the word's value when this use is filled */
    rf__cu_event read;
    uint64_t last_use; /* of this use among all uses that have ended; 0: in use */
} rf__staging;

/* Acquires a buffer of at least `bytes` for a device. A device has a bounded number of buffers, fewer of
 * larger ones: if none is idle, this waits for the oldest. RF_ERR_UNSUPPORTED: streams of the device cannot
 * wait for words. The stream must not be captured. */
rf_status rf__staging_acquire(const rf__cuda_device *device, void *stream, size_t bytes,
                              rf__staging **buffer);
/* Marks the buffer as filled. Must be called once, on any thread, which must not touch the buffer afterwards.
 * Calls no driver and cannot fail. */
void rf__staging_fill_end(rf__staging *buffer);
/* Puts the wait into the stream, and a copy of the first `bytes` to device memory unless they are 0: later
 * work may also read the buffer in place. */
rf_status rf__staging_copy(const rf__cuda_device *device, const rf__staging *buffer, size_t bytes,
                           rf__cu_pointer to, void *stream);
/* Drops the caller's reference, whether or not the buffer was copied; work in the stream may still read it,
 * and threads may still fill it. Returns `status` if it is a failure. */
rf_status rf__staging_release(const rf__cuda_device *device, rf__staging *buffer, void *stream,
                              rf_status status);

#endif
