/* GPUs: streams, allocators of device memory, and errors that kernels reported. */
#ifndef RECFUSE_API_CUDA_H
#define RECFUSE_API_CUDA_H

#include "recfuse/types.h"

RF_BEGIN_DECLARATIONS

/* The destination of GPU work. */
typedef struct rf_cuda_stream {
    int32_t device; /* ordinal */
    void *stream; /* [1] CUstream of that device, may be NULL: the default stream */
} rf_cuda_stream;

/* A caller's allocator of device memory. Memory belongs to the stream for which it was allocated: released
 * memory may be reused at once for later work on that stream, as by torch's allocator. Functions and context
 * must live as long as the process, and be callable from any thread; during calls recfuse holds no lock and
 * has made no context current. */
typedef struct rf_cuda_allocator {
    void *context; /* [1] or NULL: handed to both functions */
    /* bytes > 0, on the stream's device, aligned to 16 bytes; *block is the argument of release(). `lasts`:
     * it outlives the call, for repeated calls; never requested for a stream that is being captured. */
    rf_status (*allocate)(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **block);
    /* All work that uses the memory is in its stream. */
    void (*release)(void *context, void *block);
} rf_cuda_allocator;

/* Waits for the device, then raises one of the errors that its kernels have reported (RF_ERR_INDEX,
 * RF_ERR_VALUE), with the number of remaining errors of calls with other tables. Returns RF_OK once all are
 * raised. Not allowed while a stream is captured. Also RF_ERR_NO_DEVICE, RF_ERR_CUDA. */
RF_API rf_status rf_cuda_check(int32_t device);

RF_END_DECLARATIONS

#endif
