/* Small memory of the device's own that lives long: descriptions that kernels read. */
#ifndef RECFUSE_CUDA_UPLOAD_H
#define RECFUSE_CUDA_UPLOAD_H

#include <stddef.h>

#include "cuda/driver.h"

/* New device memory with these bytes, which are there when the call returns, for any stream; also while a stream is
 * captured. In the device's context. */
rf_status rf__cuda_upload(const rf__cuda_device *device, const void *from, size_t bytes,
                          rf__cu_pointer *memory);
/* Frees it; 0 is fine. Waits for the device. */
void rf__cuda_memory_free(const rf__cuda_device *device, rf__cu_pointer memory);

/* Whether work put into the stream goes into a graph. */
bool rf__cuda_is_capturing(const rf__cuda_device *device, void *stream);

#endif
