/* The CUDA driver, opened at run time. */
#ifndef RECFUSE_CUDA_DRIVER_DRIVER_H
#define RECFUSE_CUDA_DRIVER_DRIVER_H

#include "gpu/driver/cuda_abi.h"
#include "core/status.h"

typedef struct rf__cuda_driver {
    RF__CUDA_LIST(RF__CUDA_MEMBER)
} rf__cuda_driver;

/* The driver with cuInit done; the first call opens it, and others wait for that. RF_ERR_NO_DEVICE: no driver
 * or no GPU. RF_ERR_UNSUPPORTED: an old driver, or CUDA was started before a fork. */
rf_status rf__cuda_driver_get(const rf__cuda_driver **driver);

/* Makes rf__cuda_driver_get, and so every function that works on a GPU, fail with this text: for a second
 * copy of the library in a process. Once, before any of them is called. */
void rf__cuda_refuse(const char *reason);

/* Sets how this thread behaves while a stream of the process is captured into a graph, and returns the
 * previous mode. With RF__CU_STREAM_CAPTURE_MODE_RELAXED it may allocate and load modules, which are not part
 * of a graph. */
rf__cu_capture_mode rf__cuda_capture_mode(const rf__cuda_driver *driver, rf__cu_capture_mode mode);

/* Returns RF_OK for 0; otherwise sets a message with the function at the head of `call`, and CUDA's name and
 * text of the error, and returns RF_ERR_OUT_OF_MEMORY if memory ran out, else RF_ERR_CUDA. Requires
 * rf__cuda_driver_get. */
rf_status rf__cuda_status(rf__cu_result result, const char *call);

/* The status of a function of the driver, RF__CUDA_CALL(driver->cuMemFree_v2(memory)); and RF_TRY for it. */
#define RF__CUDA_CALL(call) rf__cuda_status((call), #call)
#define RF__CUDA_TRY(call) RF_TRY(RF__CUDA_CALL(call))

#endif
