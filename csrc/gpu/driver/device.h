/* Devices, and what the tuner and launches ask about them. */
#ifndef RECFUSE_CUDA_DRIVER_DEVICE_H
#define RECFUSE_CUDA_DRIVER_DEVICE_H

#include "gpu/driver/driver.h"
#include "gpu/driver/error_words.h"
#include "gpu/driver/gpu.h"

enum { RF__CUDA_MOST_DEVICES = 64, RF__CUDA_DESCRIBED = -1 };

typedef struct rf__cuda_device {
    const rf__cuda_driver
        *driver; /* NULL: a GPU that is described, where nothing runs (gpu/launches/explain.h) */
    int32_t ordinal;
    rf__gpu gpu;
    rf__cu_context context; /* the primary one, which torch uses too */
    rf__cuda_error_words errors;
} rf__cuda_device;

/* Until the next call of this function, device RF__CUDA_DESCRIBED of this thread is one that is described, without a driver.
 * NULL: there is none. */
void rf__cuda_device_describe(const rf__gpu *gpu);
/* The GPU that this thread describes; NULL: none. */
RF__SHARED const rf__gpu *rf__cuda_described_gpu(void);

/* Device `ordinal` with its primary context retained; made at the first call, which may wait for the device, and others
 * for it; kept for ever. RF_ERR_VALUE: there is none of this number. */
rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device);

/* Makes the device's context current on this thread until rf__cuda_leave. */
rf_status rf__cuda_enter(const rf__cuda_device *device);
void rf__cuda_leave(void);
/* The same at the end of a function: return rf__cuda_leave_with(rf__launch(...)). Returns `status`. */
rf_status rf__cuda_leave_with(rf_status status);

#endif
