#include "cuda/error.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda/driver.h"

rf_status rf__cuda_errors_new(const rf__cuda_driver *driver, rf__cuda_errors *errors) {
    rf_status status = RF_OK;
    rf__cu_stream stream = NULL;
    void *record = NULL;
    memset(errors, 0, sizeof *errors);
    RF__CUDA_TRY(driver->cuMemHostAlloc(&record, sizeof *errors->record,
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    errors->record = record;
    memset(record, 0, sizeof *errors->record);
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&errors->record_on_device, record, 0));
    RF__CUDA_TRY(driver->cuMemAlloc_v2(&errors->claimed, sizeof(uint32_t)));
    /* A stream of its own: the default one must not be used while others are captured. */
    RF__CUDA_TRY(driver->cuStreamCreate(&stream, RF__CU_STREAM_NON_BLOCKING));
    RF__CUDA_TRY(driver->cuMemsetD32Async(errors->claimed, 0, 1, stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(stream));
out:
    if (stream != NULL) (void)driver->cuStreamDestroy_v2(stream);
    if (status != RF_OK) rf__cuda_errors_free(driver, errors);
    return status;
}

void rf__cuda_errors_free(const rf__cuda_driver *driver, rf__cuda_errors *errors) {
    if (errors->claimed != 0) (void)driver->cuMemFree_v2(errors->claimed);
    if (errors->record != NULL) (void)driver->cuMemFreeHost(errors->record);
    memset(errors, 0, sizeof *errors);
}

static rf_status raise_record(const rf__cuda_error_record *record) {
    static const char *const operators[] = {
#define RF__CUDA_OPERATOR(name) #name,
        RF__CUDA_OPERATOR_LIST(RF__CUDA_OPERATOR)
#undef RF__CUDA_OPERATOR
    };
    const char *operator_name = record->operator_name < sizeof operators / sizeof operators[0]
                                    ? operators[record->operator_name]
                                    : "an operator";
    static const char when[] = "(found on the GPU by an earlier call, whose output is wrong)";
    const char *argument = record->bag >= 0 ? "indices" : "rows";
    char place[80] = "";
    if (record->bag >= 0 && record->feature >= 0) {
        snprintf(place, sizeof place, ", for feature %" PRId32 ", bag %" PRId64, record->feature,
                 record->bag);
    } else if (record->bag >= 0) {
        snprintf(place, sizeof place, ", for bag %" PRId64, record->bag);
    }
    if (record->kind == RF__CUDA_BAD_INDEX && record->limit <= 0) {
        return rf__fail(RF_ERR_INDEX,
                        "recfuse.%s: %s[%" PRId64 "] is %" PRId64
                        "%s; its table has no rows, which allows no index %s",
                        operator_name, argument, record->position, record->value, place, when);
    }
    if (record->kind == RF__CUDA_BAD_INDEX) {
        return rf__fail(RF_ERR_INDEX,
                        "recfuse.%s: %s[%" PRId64 "] is %" PRId64 "%s; allowed is 0 to %" PRId64
                        ", less than the %" PRId64 " rows of its table %s",
                        operator_name, argument, record->position, record->value, place, record->limit - 1,
                        record->limit, when);
    }
    if (record->position == 0) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.%s: offsets[0] is %" PRId64 "; the first bag must begin at 0 %s",
                        operator_name, record->value, when);
    }
    return rf__fail(
        RF_ERR_VALUE,
        "recfuse.%s: offsets[%" PRId64 "] is %" PRId64 "%s; allowed is %" PRId64
        " (where the bag before begins; offsets must not decrease) to %" PRId64 " (the number of indices) %s",
        operator_name, record->position, record->value, place, record->limit, record->lookups, when);
}

/* The lock of taking a record, so that one thread raises it. A child, which has no CUDA, never comes here. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;

rf_status rf__cuda_pending_error(const rf__cuda_device *device, void *stream) {
    const rf__cuda_errors *errors = &device->errors;
    if (__atomic_load_n(&errors->record->ready, __ATOMIC_ACQUIRE) == 0) return RF_OK;

    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    rf__cuda_error_record record;
    rf__cu_capture_status capturing = RF__CU_STREAM_CAPTURE_STATUS_NONE;
    RF_TRY(rf__cuda_enter(device));
    pthread_mutex_lock(&taking);
    /* It also fails where the default stream may not be asked because another is captured. */
    if (driver->cuStreamIsCapturing(stream, &capturing) != RF__CU_SUCCESS ||
        capturing != RF__CU_STREAM_CAPTURE_STATUS_NONE ||
        __atomic_load_n(&errors->record->ready, __ATOMIC_ACQUIRE) == 0) {
        goto taken;
    }
    record = *errors->record;
    /* In this order: the word is free again, and then a kernel may write the next record. */
    __atomic_store_n(&errors->record->ready, 0, __ATOMIC_RELEASE);
    status = rf__cuda_status(driver->cuMemsetD32Async(errors->claimed, 0, 1, stream), "cuMemsetD32Async");
    if (status != RF_OK) { /* CUDA itself is in trouble: the record stays for later */
        __atomic_store_n(&errors->record->ready, 1, __ATOMIC_RELEASE);
    } else {
        status = raise_record(&record);
    }
taken:
    pthread_mutex_unlock(&taking);
    rf__cuda_leave();
out:
    return status;
}

rf_status rf_cuda_check(int32_t device_ordinal) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    RF_TRY(rf__cuda_device_get(device_ordinal, &device));
    RF_TRY(rf__cuda_enter(device));
    status = rf__cuda_status(device->driver->cuCtxSynchronize(), "cuCtxSynchronize");
    if (status == RF_OK) {
        status = rf__cuda_pending_error(device, NULL);
        /* Its word is free again before any other stream goes on. */
        if (status != RF_OK) (void)device->driver->cuCtxSynchronize();
    }
    rf__cuda_leave();
out:
    return status;
}
