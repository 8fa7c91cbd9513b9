#include "gpu/driver/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "core/file.h"
#include "core/fork.h"

static const char library_name[] = "libcuda.so.1";

/* Filled and published once, under the lock below; read without it. */
static rf__cuda_driver functions;
static _Atomic(const rf__cuda_driver *) driver_in_use; /* atomic */

/* The lock of opening; taken inside a fork guard, so that a child finds it free. */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static rf_status describe(const rf__cuda_driver *driver, rf__cu_result result, const char *call) {
    const char *name = NULL, *text = NULL;
    if (driver->cuGetErrorName(result, &name) != RF__CU_SUCCESS || name == NULL) name = "an unknown error";
    if (driver->cuGetErrorString(result, &text) != RF__CU_SUCCESS || text == NULL) text = "no text";
    const char *arrow = strstr(call, "->");
    const char *function = arrow != NULL ? arrow + 2 : call;
    return rf__fail(result == RF__CU_ERROR_OUT_OF_MEMORY ? RF_ERR_OUT_OF_MEMORY : RF_ERR_CUDA,
                    "%.*s of the CUDA driver failed with %s (%d): %s", (int)strcspn(function, "("), function,
                    name, result, text);
}

rf_status rf__cuda_status(rf__cu_result result, const char *call) {
    if (result == RF__CU_SUCCESS) return RF_OK;
    return describe(atomic_load_explicit(&driver_in_use, memory_order_acquire), result, call);
}

rf__cu_capture_mode rf__cuda_capture_mode(const rf__cuda_driver *driver, rf__cu_capture_mode mode) {
    (void)driver->cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static char refusal[2 * RF__PATH_BYTES + 512]; /* written once, by a constructor; "": not refused */

void rf__cuda_refuse(const char *reason) { snprintf(refusal, sizeof refusal, "%s", reason); }

static rf_status fail_after_fork(void) {
    return rf__fail(RF_ERR_UNSUPPORTED,
                    "CUDA was initialised before this process was forked, and does not work in the child. "
                    "Use the \"spawn\" start method of multiprocessing, or fork before CUDA is used.");
}

/* Looks up every function; NULL, or the name of the first that an old driver lacks. */
static const char *look_up(void *library) {
#define RF__LOOK_UP(result, name, parameters)          \
    *(void **)&functions.name = dlsym(library, #name); \
    if (functions.name == NULL) return #name;
    RF__CUDA_LIST(RF__LOOK_UP)
#undef RF__LOOK_UP
    return NULL;
}

static rf_status driver_open(void) {
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *reason = dlerror();
        return rf__fail(
            RF_ERR_NO_DEVICE,
            "the CUDA driver does not load: %s. Install NVIDIA's driver, or keep the tensors on the CPU.",
            reason != NULL ? reason : library_name);
    }
    const char *missing = look_up(library);
    RF_FAIL_IF(missing != NULL, RF_ERR_UNSUPPORTED,
               "the CUDA driver (%s) has no %s; expected the driver of CUDA 12.0 or newer", library_name,
               missing);
    const rf__cu_result result = functions.cuInit(0);
    /* The error in a child whose parent used CUDA through other libraries, such as torch. */
    if (result == RF__CU_ERROR_NOT_INITIALIZED) return fail_after_fork();
    RF_FAIL_IF(
        result == RF__CU_ERROR_NO_DEVICE, RF_ERR_NO_DEVICE,
        "the CUDA driver finds no GPU (CUDA_ERROR_NO_DEVICE). See nvidia-smi and CUDA_VISIBLE_DEVICES.");
    if (result != RF__CU_SUCCESS) return describe(&functions, result, "cuInit");
    rf__fork_cuda_started();
    return RF_OK;
}

rf_status rf__cuda_driver_get(const rf__cuda_driver **driver) {
    if (rf__fork_cuda_lost()) return fail_after_fork();
    RF_FAIL_IF(refusal[0] != '\0', RF_ERR_UNSUPPORTED, "%s", refusal);
    *driver = atomic_load_explicit(&driver_in_use, memory_order_acquire);
    if (*driver != NULL) return RF_OK;
    rf_status status = RF_OK;
    rf__fork_guard_begin();
    pthread_mutex_lock(&opening);
    if (atomic_load_explicit(&driver_in_use, memory_order_relaxed) == NULL) {
        status = driver_open();
        if (status == RF_OK) atomic_store_explicit(&driver_in_use, &functions, memory_order_release);
    }
    pthread_mutex_unlock(&opening);
    rf__fork_guard_end();
    if (status == RF_OK) *driver = &functions;
    return status;
}
