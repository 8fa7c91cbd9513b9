/* Small memory on a device that outlives a call: descriptions that kernels read; and the lock of what is kept.
 *
 * A description is written once, and belongs to one stream: made for it, copied on it, read by its work, and released
 * to its allocator when all that work is in the stream. So nothing is ever waited for. What a captured call reads is
 * `resident`: graphs are replayed on any stream and at any time, so it is there before the capture goes on, in memory of
 * the driver that is never freed. A described device (device.h) has no memory: addresses are 0. */
#ifndef RECFUSE_CUDA_DRIVER_MEMORY_H
#define RECFUSE_CUDA_DRIVER_MEMORY_H

#include <stddef.h>

#include "gpu/driver/device.h"
#include "gpu/driver/upload.h"

/* Where descriptions are kept. */
typedef struct rf__cuda_store {
    const rf__cuda_device *device;
    void *stream;
    /* Handles are used again for other streams, and one of them is a stream for each thread. */
    unsigned long long stream_id;
    bool resident; /* for CUDA graphs; else for `stream` alone */
    rf_cuda_allocator allocator; /* allocate NULL: the driver */
} rf__cuda_store;

/* The store of calls on a stream. `allocator` may be NULL. RF_ERR_INTERNAL: the driver does not know of the stream, or
 * its capture has become invalid. */
rf_status rf__cuda_store_of(const rf__cuda_device *device, void *stream, const rf_cuda_allocator *allocator,
                            rf__cuda_store *store);

/* Whether work put into the stream goes into a graph. */
rf_status rf__cuda_is_capturing(const rf__cuda_device *device, void *stream, bool *capturing);

/* Whether copies from host memory run asynchronously: it is page-locked. */
bool rf__cuda_is_page_locked(const rf__cuda_device *device, const void *memory);

/* Where the device's kernels find page-locked memory of the host; 0: it is none. */
rf__cu_pointer rf__cuda_host_pointer(const rf__cuda_device *device, const void *memory);

typedef struct rf__cuda_block {
    rf__cu_pointer memory; /* 0: none */
    void *handle; /* of the allocator */
} rf__cuda_block;

/* New memory with these bytes; none for 0. `lasts`: beyond the call. They are there for work that follows on the
 * store's stream; of a resident store for any work. No lock is held. */
rf_status rf__cuda_block_new(const rf__cuda_store *store, const void *from, size_t bytes, bool lasts,
                             rf__cuda_block *block);
/* The same of bytes that no kernel writes, for a call that may be captured again and again: of a resident store equal bytes
 * are there once. */
rf_status rf__cuda_block_shared(const rf__cuda_store *store, const void *from, size_t bytes,
                                rf__cuda_block *block);
/* Gives it back, and leaves none; of a resident store it stays. No lock is held. */
void rf__cuda_block_free(const rf__cuda_store *store, rf__cuda_block *block);

/* Copies on the stream of a store that is not resident, from memory that the caller need not keep. No lock is held. */
rf_status rf__cuda_copy(const rf__cuda_store *store, const void *from, size_t bytes, rf__cu_pointer to);

/* New memory of a call, of whatever contents; none for 0. What comes from the driver for a resident store is never freed,
 * since graphs work in it. */
rf_status rf__cuda_room_new(const rf__cuda_store *store, size_t bytes, rf__cuda_block *block);
void rf__cuda_room_free(const rf__cuda_store *store, rf__cuda_block *block);

/* The one lock of what is kept for a device. Neither the driver nor an allocator is called under it. */
void rf__cuda_lock(const rf__cuda_device *device);
void rf__cuda_unlock(const rf__cuda_device *device);

#endif
