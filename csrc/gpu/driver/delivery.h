/* Page-locked memory that threads of the host fill while a stream, which the caller has left, waits for it.
 *
 * The stream waits for a word in the memory, which counts its uses. Whoever hands the filling over does so before the wait is
 * put into the stream, and the word is written whatever becomes of it: so no stream waits for ever. Memory is used again when
 * the word says that it was filled and an event that it was read. */
#ifndef RECFUSE_CUDA_DRIVER_DELIVERY_H
#define RECFUSE_CUDA_DRIVER_DELIVERY_H

#include <stddef.h>

#include "gpu/driver/device.h"

typedef struct rf__cuda_delivery {
    void *memory; /* `bytes`, of whatever contents */
    rf__cu_pointer memory_on_device; /* the same, as kernels of the device read it */
    size_t bytes;
    struct rf__cuda_delivery *next; /* from here on delivery.c's */
    rf__cu_pointer word_on_device;
    uint32_t *word; /* atomic */
    uint32_t number; /* of this use: what the word becomes */
    rf__cu_event read;
    uint64_t turn; /* of this use among all that have ended; 0: it has not */
} rf__cuda_delivery;

/* Memory of at least so many bytes, for a device. Of a device some are under way at once, the fewer the larger they are; where none
 * of so many is idle, the oldest is waited for. RF_ERR_UNSUPPORTED: the device's streams cannot wait for words. Not in a stream that is captured. */
rf_status rf__cuda_delivery_new(const rf__cuda_device *device, void *stream, size_t bytes,
                                rf__cuda_delivery **delivery);
/* The memory is filled. On any thread, once; cannot fail and calls no driver. The thread touches it no more. */
void rf__cuda_delivery_post(rf__cuda_delivery *delivery);
/* Puts the wait into the stream, and the copy of the first bytes to the device's memory, if there are any: work that follows
 * may also read them where they are. Then, or instead where the stream is not to have it, rf__cuda_delivery_end. */
rf_status rf__cuda_delivery_copy(const rf__cuda_device *device, const rf__cuda_delivery *delivery,
                                 size_t bytes, rf__cu_pointer to, void *stream);
/* Gives it back; what is in the stream still reads it, and the threads may still fill it. Status: `status` where that is a
 * failure. */
rf_status rf__cuda_delivery_end(const rf__cuda_device *device, rf__cuda_delivery *delivery, void *stream,
                                rf_status status);

#endif
