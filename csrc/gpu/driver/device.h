/* Devices, and their properties for the tuner and launches. */
#ifndef RECFUSE_CUDA_DRIVER_DEVICE_H
#define RECFUSE_CUDA_DRIVER_DEVICE_H

#include "gpu/driver/driver.h"
#include "gpu/driver/error_words.h"
#include "gpu/driver/gpu.h"

enum { RF__CUDA_MOST_DEVICES = 64, RF__CUDA_DESCRIBED = -1 };

typedef struct rf__cuda_device {
    const rf__cuda_driver *driver; /* NULL: a described GPU, on which nothing runs (gpu/launches/explain.h) */
    int32_t ordinal;
    rf__gpu gpu;
    rf__cu_context context; /* the primary context, which torch uses too */
    rf__cuda_error_words errors;
} rf__cuda_device;

/* Makes RF__CUDA_DESCRIBED of this thread a described device without a driver, until the next call of this
 * function. NULL: none. */
void rf__cuda_device_describe(const rf__gpu *gpu);
/* Returns the GPU that this thread describes, or NULL. */
RF__SHARED const rf__gpu *rf__cuda_described_gpu(void);

/* Returns device `ordinal` with its primary context retained. The first call creates it, which may wait for
 * the device; concurrent calls wait for that. It is never freed. RF_ERR_VALUE: no device has this number. */
rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device);

/* Makes the device's context current on this thread until rf__cuda_leave. */
rf_status rf__cuda_enter(const rf__cuda_device *device);
void rf__cuda_leave(void);
/* As above, at the end of a function: return rf__cuda_leave_with(rf__launch(...)). Returns `status`. */
rf_status rf__cuda_leave_with(rf_status status);

#endif
