/* The CUDA driver, opened at run time; devices with what the tuner and the launchers ask about them. */
#ifndef RECFUSE_CUDA_DRIVER_H
#define RECFUSE_CUDA_DRIVER_H

#include "cuda/driver/abi.h"
#include "cuda/driver/error.h"
#include "base/status.h"

typedef struct rf__cuda_driver {
    RF__CUDA_LIST(RF__CUDA_MEMBER)
    RF__CUDA_NEWER_LIST(RF__CUDA_MEMBER)
} rf__cuda_driver;

enum { RF__CUDA_MOST_DEVICES = 64 };

typedef struct rf__cuda_device {
    const rf__cuda_driver *driver;
    int32_t ordinal, sms, cc_major, cc_minor;
    char arch[16]; /* what its kernels are compiled for: "sm_80", "sm_90a" */
    char name[96];
    int64_t l2_bytes, persisting_l2_bytes;
    int64_t shared_per_sm, shared_per_block_optin, reserved_shared_per_block, registers_per_sm;
    int32_t threads_per_sm, blocks_per_sm;
    rf__cu_context context; /* the primary one, which torch uses too */
    rf__cuda_errors errors;
} rf__cuda_device;

/* The driver with cuInit done. RF_ERR_NO_DEVICE: no driver or no GPU. RF_ERR_UNSUPPORTED: an old driver, or
 * CUDA was started before a fork. */
rf_status rf__cuda_driver_get(const rf__cuda_driver **driver);

/* Makes rf__cuda_driver_get, and so every function that works on a GPU, fail with this text: for a second copy of the
 * library in a process. Once, before any of them is called. */
void rf__cuda_refuse(const char *reason);

/* Device `ordinal` with its primary context retained; made at the first call and kept for ever. */
rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device);

/* Makes the device's context current on this thread until rf__cuda_leave. */
rf_status rf__cuda_enter(const rf__cuda_device *device);
void rf__cuda_leave(void);

/* A launch of one-dimensional blocks. */
typedef struct rf__cuda_launch {
    rf__cu_function function;
    unsigned blocks, slices; /* of the grid, along x and y */
    unsigned threads, shared_bytes;
    /* Before the stream's last kernel has ended, where the GPU can: see rf_wait_for_previous_kernel. */
    bool early;
    void *stream;
} rf__cuda_launch;
/* `arguments`: a pointer to each. In the device's context. */
rf_status rf__cuda_launch_kernel(const rf__cuda_device *device, const rf__cuda_launch *launch,
                                 void **arguments);

/* Sets how this thread counts while a stream of the process is captured into a graph, and returns what it was.
 * With RF__CU_STREAM_CAPTURE_MODE_RELAXED it may allocate and load modules, which are no part of a graph. */
rf__cu_capture_mode rf__cuda_capture_mode(const rf__cuda_driver *driver, rf__cu_capture_mode mode);

/* RF_OK for 0; else a message with the function at the head of `call`, and CUDA's name and text of the
 * error; RF_ERR_OUT_OF_MEMORY when memory ran out, else RF_ERR_CUDA. Only after rf__cuda_driver_get. */
rf_status rf__cuda_status(rf__cu_result result, const char *call);

/* RF_TRY for a function of the driver: RF__CUDA_TRY(driver->cuMemFree_v2(memory)). */
#define RF__CUDA_TRY(call) RF_TRY(rf__cuda_status((call), #call))

#endif
