/* GPUs: where work goes, whose memory it takes, what its kernels reported. */
#ifndef RECFUSE_API_CUDA_H
#define RECFUSE_API_CUDA_H

#include "recfuse/types.h"

RF_BEGIN_DECLARATIONS

/* Where GPU work goes. */
typedef struct rf_cuda_stream {
    int32_t device; /* ordinal */
    void *stream; /* [1] CUstream of that device, may be NULL: the default stream */
} rf_cuda_stream;

/* A caller's allocator of device memory. Memory belongs to the stream that it was made for: what is released may be
 * given out again at once for work that follows on that stream, as torch's allocator does. Functions and context must
 * live as long as the process, and be safe to call from any thread; no lock is held and no context entered in calls. */
typedef struct rf_cuda_allocator {
    void *context; /* [1] or NULL: handed to both functions */
    /* bytes > 0, of the stream's device, aligned to 16 bytes; *block is what release() wants. `lasts`: it is kept beyond
     * the call that makes it, for calls that come again; never asked for a stream that is captured. */
    rf_status (*allocate)(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **block);
    /* All work that uses the memory is in its stream. */
    void (*release)(void *context, void *block);
} rf_cuda_allocator;

/* What the compiler said about a GPU kernel, and where the kernel came from. -1: it did not say. */
typedef struct rf_kernel_info {
    int32_t registers; /* a thread */
    int32_t spill_bytes; /* a thread, stores and loads together */
    int32_t stack_bytes; /* a thread */
    int32_t shared_bytes; /* a block */
    int64_t cubin_bytes;
    double seconds; /* that this call took */
    bool cached; /* taken from the cache on disk */
    char path[512]; /* of the entry there; "": none could be written, or longer than this */
} rf_kernel_info;

/* Waits for the device, then raises one of the errors that its kernels have found (RF_ERR_INDEX, RF_ERR_VALUE) and says
 * how many are left, of calls with other tables: RF_OK once all are raised. Not while a stream is captured.
 * Also RF_ERR_NO_DEVICE, RF_ERR_CUDA. */
RF_API rf_status rf_cuda_check(int32_t device);

RF_END_DECLARATIONS

#endif
