/* Devices, each opened at its first use and kept forever. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu/driver/device.h"
#include "core/fork.h"

/* Atomic; each is set once, under the lock. */
static _Atomic(const rf__cuda_device *) devices[RF__CUDA_MOST_DEVICES]; /* atomic */

/* The locks of opening each, which may wait for the device; taken inside a fork guard, so that a child finds
 * them free. */
static pthread_mutex_t opening[RF__CUDA_MOST_DEVICES] = {[0 ... RF__CUDA_MOST_DEVICES - 1] =
                                                             PTHREAD_MUTEX_INITIALIZER};

static _Thread_local rf__cuda_device described;
static _Thread_local bool is_described;

void rf__cuda_device_describe(const rf__gpu *gpu) {
    is_described = gpu != NULL;
    if (gpu != NULL) described = (rf__cuda_device){.ordinal = RF__CUDA_DESCRIBED, .gpu = *gpu};
}

const rf__gpu *rf__cuda_described_gpu(void) { return is_described ? &described.gpu : NULL; }

rf_status rf__cuda_enter(const rf__cuda_device *device) {
    return RF__CUDA_CALL(device->driver->cuCtxPushCurrent_v2(device->context));
}

void rf__cuda_leave(void) {
    const rf__cuda_driver *driver = NULL;
    rf__cu_context context;
    if (rf__cuda_driver_get(&driver) == RF_OK) (void)driver->cuCtxPopCurrent_v2(&context);
}

rf_status rf__cuda_leave_with(rf_status status) {
    rf__cuda_leave();
    return status;
}

static rf_status attributes_read(rf__cu_device handle, rf__cuda_device *device) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    int value = 0;
#define RF__READ(field, name)                                                                   \
    RF__CUDA_TRY(driver->cuDeviceGetAttribute(&value, RF__CU_DEVICE_ATTRIBUTE_##name, handle)); \
    device->gpu.field = value;
    RF__READ(sms, MULTIPROCESSOR_COUNT)
    RF__READ(cc_major, COMPUTE_CAPABILITY_MAJOR)
    RF__READ(cc_minor, COMPUTE_CAPABILITY_MINOR)
    RF__READ(l2_bytes, L2_CACHE_SIZE)
    RF__READ(shared_per_sm, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    RF__READ(shared_per_block_optin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    RF__READ(reserved_shared_per_block, RESERVED_SHARED_MEMORY_PER_BLOCK)
    RF__READ(registers_per_sm, MAX_REGISTERS_PER_MULTIPROCESSOR)
    RF__READ(threads_per_sm, MAX_THREADS_PER_MULTIPROCESSOR)
    RF__READ(blocks_per_sm, MAX_BLOCKS_PER_MULTIPROCESSOR)
#undef RF__READ
    /* The "a" enables features of Hopper only. */
    snprintf(device->gpu.arch, sizeof device->gpu.arch, "sm_%d%d%s", (int)device->gpu.cc_major,
             (int)device->gpu.cc_minor, device->gpu.cc_major == 9 && device->gpu.cc_minor == 0 ? "a" : "");
    RF__CUDA_TRY(driver->cuDeviceGetName(device->gpu.name, sizeof device->gpu.name, handle));
    device->gpu.name[sizeof device->gpu.name - 1] = '\0';
    rf__gpu_add_rates(&device->gpu);
out:
    return status;
}

static rf_status device_open(const rf__cuda_driver *driver, int32_t ordinal, rf__cuda_device **new_device) {
    rf_status status = RF_OK;
    rf__cu_device handle = 0;
    rf__cu_capture_mode mode = RF__CU_STREAM_CAPTURE_MODE_RELAXED;
    bool retained = false;
    int count = 0;
    rf__cuda_device *device = calloc(1, sizeof *device);
    RF_FAIL_IF(device == NULL, RF_ERR_MEMORY, "no memory to describe GPU %d", (int)ordinal);
    device->driver = driver;
    device->ordinal = ordinal;
    RF__CUDA_TRY(driver->cuDeviceGetCount(&count));
    if (ordinal >= count) {
        status = rf__fail(
            RF_ERR_VALUE,
            "no GPU has the number %d; expected one of the %d GPUs that this process sees, from 0 on",
            (int)ordinal, count);
        goto out;
    }
    RF__CUDA_TRY(driver->cuDeviceGet(&handle, ordinal));
    RF_TRY(attributes_read(handle, device));
    RF__CUDA_TRY(driver->cuDevicePrimaryCtxRetain(&device->context, handle));
    retained = true;
    RF_TRY(rf__cuda_enter(device));
    mode = rf__cuda_capture_mode(driver, mode);
    status = rf__cuda_error_words_new(driver, &device->errors);
    (void)rf__cuda_capture_mode(driver, mode);
    rf__cuda_leave();
out:
    if (status != RF_OK) {
        if (retained) (void)driver->cuDevicePrimaryCtxRelease_v2(handle);
        free(device);
        device = NULL;
    }
    *new_device = device;
    return status;
}

rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device) {
    rf_status status = RF_OK;
    const rf__cuda_driver *driver = NULL;
    rf__cuda_device *new_device = NULL;
    if (ordinal == RF__CUDA_DESCRIBED && is_described) {
        *device = &described;
        return RF_OK;
    }
    RF_TRY(rf__cuda_driver_get(&driver));
    RF_FAIL_IF(ordinal < 0 || ordinal >= RF__CUDA_MOST_DEVICES, RF_ERR_VALUE,
               "no GPU has the number %d; expected 0 to %d", (int)ordinal, RF__CUDA_MOST_DEVICES - 1);
    *device = atomic_load_explicit(&devices[ordinal], memory_order_acquire);
    if (*device != NULL) return RF_OK;
    rf__fork_guard_begin();
    pthread_mutex_lock(&opening[ordinal]);
    *device = atomic_load_explicit(&devices[ordinal], memory_order_relaxed);
    if (*device == NULL) {
        status = device_open(driver, ordinal, &new_device);
        atomic_store_explicit(&devices[ordinal], new_device, memory_order_release);
        *device = new_device;
    }
    pthread_mutex_unlock(&opening[ordinal]);
    rf__fork_guard_end();
out:
    return status;
}
