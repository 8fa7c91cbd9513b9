/* Devices, and what the tuner and launches ask about them. */
#ifndef RECFUSE_CUDA_DRIVER_DEVICE_H
#define RECFUSE_CUDA_DRIVER_DEVICE_H

#include "cuda/driver/driver.h"
#include "cuda/driver/error_word.h"

enum { RF__CUDA_MOST_DEVICES = 64 };

typedef struct rf__cuda_device {
    const rf__cuda_driver *driver;
    int32_t ordinal, sms, cc_major, cc_minor;
    char arch[16]; /* what its kernels are compiled for: "sm_80", "sm_90a" */
    char name[96];
    int64_t l2_bytes, shared_per_sm, shared_per_block_optin, reserved_shared_per_block, registers_per_sm;
    int32_t threads_per_sm, blocks_per_sm;
    rf__cu_context context; /* the primary one, which torch uses too */
    rf__cuda_error_words errors;
} rf__cuda_device;

/* Device `ordinal` with its primary context retained; made at the first call, which may wait for the device, and others
 * for it; kept for ever. RF_ERR_VALUE: there is none of this number. */
rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device);

/* Makes the device's context current on this thread until rf__cuda_leave. */
rf_status rf__cuda_enter(const rf__cuda_device *device);
void rf__cuda_leave(void);
/* The same at the end of a function: return rf__cuda_leave_with(rf__launch(...)). Returns `status`. */
rf_status rf__cuda_leave_with(rf_status status);

#endif
