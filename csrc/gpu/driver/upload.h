/* Memory of the driver's own, which is written once. */
#ifndef RECFUSE_CUDA_DRIVER_UPLOAD_H
#define RECFUSE_CUDA_DRIVER_UPLOAD_H

#include <stddef.h>

#include "gpu/driver/driver.h"

/* Both in the current context; also while a stream is captured. */

/* Allocates memory with `bytes` of `from`, complete for any stream when the call returns. Waits for its own
 * copy. *memory is 0 for 0 bytes and on failure. */
rf_status rf__cuda_upload(const rf__cuda_driver *driver, const void *from, size_t bytes,
                          rf__cu_pointer *memory);
/* Frees memory; 0 is fine. Waits for the device. */
void rf__cuda_memory_free(const rf__cuda_driver *driver, rf__cu_pointer memory);

#endif
