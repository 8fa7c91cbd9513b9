/* Small memory on a device that outlives a call: descriptions that kernels read; and the lock of the caches.
 *
 * A description is written once, and belongs to one stream: created for it, copied on it, read by its work,
 * and released to its allocator when all that work is in the stream. So nothing waits. Data that a captured
 * call reads are `resident`: a graph may be replayed on any stream at any time, so they are complete before
 * the capture continues, in memory of the driver that is never freed. A described device (device.h) has no
 * memory: addresses are 0.
 */
#ifndef RECFUSE_CUDA_DRIVER_MEMORY_H
#define RECFUSE_CUDA_DRIVER_MEMORY_H

#include <stddef.h>

#include "gpu/driver/device.h"
#include "gpu/driver/upload.h"

/* The memory of descriptions. */
typedef struct rf__cuda_store {
    const rf__cuda_device *device;
    void *stream;
    /* Handles are reused for other streams, and one of them is a stream per thread. */
    unsigned long long stream_id;
    bool resident; /* for CUDA graphs; otherwise only for `stream` */
    rf_cuda_allocator allocator; /* allocate NULL: the driver */
} rf__cuda_store;

/* The store of calls on a stream. `allocator` may be NULL. RF_ERR_INTERNAL: the driver does not know of the
 * stream, or its capture has become invalid. */
rf_status rf__cuda_store_of(const rf__cuda_device *device, void *stream, const rf_cuda_allocator *allocator,
                            rf__cuda_store *store);

/* Sets whether work put into the stream goes into a graph. */
rf_status rf__cuda_is_capturing(const rf__cuda_device *device, void *stream, bool *capturing);

/* Returns true if copies from host memory run asynchronously, because it is page-locked. */
bool rf__cuda_is_page_locked(const rf__cuda_device *device, const void *memory);

/* Returns the device address of page-locked host memory, or 0 for other memory. */
rf__cu_pointer rf__cuda_host_pointer(const rf__cuda_device *device, const void *memory);

typedef struct rf__cuda_block {
    rf__cu_pointer memory; /* 0: no memory */
    void *handle; /* of the allocator */
} rf__cuda_block;

/* Allocates memory with these bytes; none for 0. `lasts`: it outlives the call. The bytes are there for later
 * work on the store's stream; of a resident store for any work. The caller must hold no lock. */
rf_status rf__cuda_block_new(const rf__cuda_store *store, const void *from, size_t bytes, bool lasts,
                             rf__cuda_block *block);
/* As above, for bytes that no kernel writes, for a call that may be captured repeatedly: a resident store
 * keeps equal bytes once. */
rf_status rf__cuda_block_shared(const rf__cuda_store *store, const void *from, size_t bytes,
                                rf__cuda_block *block);
/* Releases a block and clears it; a block of a resident store stays. The caller must hold no lock. */
void rf__cuda_block_free(const rf__cuda_store *store, rf__cuda_block *block);

/* Copies on the stream of a store that is not resident, from memory that the caller need not keep. No lock is
 * held. */
rf_status rf__cuda_copy(const rf__cuda_store *store, const void *from, size_t bytes, rf__cu_pointer to);

/* Allocates memory of a call with undefined contents; none for 0. Driver memory for a resident store is never
 * freed, because graphs work in it. */
rf_status rf__cuda_room_new(const rf__cuda_store *store, size_t bytes, rf__cuda_block *block);
void rf__cuda_room_free(const rf__cuda_store *store, rf__cuda_block *block);

/* The only lock of a device's caches. Neither the driver nor an allocator is called under it. */
void rf__cuda_lock(const rf__cuda_device *device);
void rf__cuda_unlock(const rf__cuda_device *device);

#endif
