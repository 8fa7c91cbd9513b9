#include "cuda/driver/error.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver/driver.h"

rf_status rf__cuda_errors_new(const rf__cuda_driver *driver, rf__cuda_errors *errors) {
    rf_status status = RF_OK;
    rf__cu_stream stream = NULL;
    void *records = NULL;
    const size_t bytes = RF__CUDA_ERROR_PLACES * sizeof *errors->records;
    memset(errors, 0, sizeof *errors);
    errors->keys = calloc(RF__CUDA_ERROR_PLACES, sizeof *errors->keys);
    if (errors->keys == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for the errors of a GPU");
    RF__CUDA_TRY(driver->cuMemHostAlloc(&records, bytes,
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    errors->records = records;
    memset(records, 0, bytes);
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&errors->records_on_device, records, 0));
    RF__CUDA_TRY(driver->cuMemAlloc_v2(&errors->claimed, RF__CUDA_ERROR_PLACES * sizeof(uint32_t)));
    /* A stream of its own: the default one must not be used while others are captured. */
    RF__CUDA_TRY(driver->cuStreamCreate(&stream, RF__CU_STREAM_NON_BLOCKING));
    RF__CUDA_TRY(driver->cuMemsetD32Async(errors->claimed, 0, RF__CUDA_ERROR_PLACES, stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(stream));
out:
    if (stream != NULL) (void)driver->cuStreamDestroy_v2(stream);
    if (status != RF_OK) rf__cuda_errors_free(driver, errors);
    return status;
}

void rf__cuda_errors_free(const rf__cuda_driver *driver, rf__cuda_errors *errors) {
    if (errors->claimed != 0) (void)driver->cuMemFree_v2(errors->claimed);
    if (errors->records != NULL) (void)driver->cuMemFreeHost(errors->records);
    free(errors->keys);
    memset(errors, 0, sizeof *errors);
}

/* Spreads every bit over all (the finaliser of a 64-bit hash). */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 32)) * 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
    return value ^ (value >> 32);
}

/* Number of the place of a key, which is taken where it is new. */
static uint32_t place_number(const rf__cuda_errors *errors, uint64_t key) {
    enum { PROBES = 64 };
    const uint32_t first = (uint32_t)(key % RF__CUDA_ERROR_PLACES);
    for (uint32_t i = 0; i < PROBES; i++) {
        const uint32_t at = (first + i) % RF__CUDA_ERROR_PLACES;
        uint64_t owner = __atomic_load_n(&errors->keys[at], __ATOMIC_RELAXED);
        if (owner == 0 && __atomic_compare_exchange_n(&errors->keys[at], &owner, key, false, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED))
            owner = key;
        if (owner == key) return at;
    }
    return first;
}

rf__cuda_error_place rf__cuda_error_place_of(const rf__cuda_device *device, const void *weight,
                                             uint64_t shape) {
    const rf__cuda_errors *errors = &device->errors;
    const uint64_t key = mix((uintptr_t)weight ^ mix(shape + 1));
    const uint32_t at = place_number(errors, key != 0 ? key : 1);
    return (rf__cuda_error_place){.claimed = errors->claimed + at * sizeof(uint32_t),
                                  .record_on_device =
                                      errors->records_on_device + at * sizeof *errors->records,
                                  .record = &errors->records[at]};
}

static rf_status raise_record(const rf_error_record *record) {
    static const char *const operators[] = {
#define RF_OPERATOR(name) #name,
        RF_OPERATOR_LIST(RF_OPERATOR)
#undef RF_OPERATOR
    };
    static const struct {
        const char *name, *counted, *none;
        rf_rule rule;
    } arguments[] = {
#define RF_ARGUMENT(name, rule, counted, none) {#name, counted, none, RF_RULE_##rule},
        RF_ARGUMENT_LIST(RF_ARGUMENT)
#undef RF_ARGUMENT
    };
    static const char when[] =
        "(found on the GPU by an earlier call with these tables, whose output is wrong)";
    const bool readable = record->operator_number < sizeof operators / sizeof operators[0] &&
                          record->argument < sizeof arguments / sizeof arguments[0];
    RF_FAIL_IF(!readable, RF_ERR_INTERNAL,
               "a GPU kernel left an error that nobody knows: argument %u of operator %u",
               (unsigned)record->argument, (unsigned)record->operator_number);
    const char *name = arguments[record->argument].name, *counted = arguments[record->argument].counted;
    char bag[80] = "", found[256];
    if (record->bag >= 0 && record->feature >= 0) {
        snprintf(bag, sizeof bag, ", for feature %" PRId32 ", bag %" PRId64, record->feature, record->bag);
    } else if (record->bag >= 0) {
        snprintf(bag, sizeof bag, ", for bag %" PRId64, record->bag);
    }
    snprintf(found, sizeof found, "recfuse.%s: %s[%" PRId64 "] is %" PRId64,
             operators[record->operator_number], name, record->position, record->value);
    if (arguments[record->argument].rule == RF_RULE_INDEX) {
        RF_FAIL_IF(record->limit <= 0, RF_ERR_INDEX, "%s%s; %s, which allows no index %s", found, bag,
                   arguments[record->argument].none, when);
        return rf__fail(RF_ERR_INDEX, "%s%s; allowed is 0 to %" PRId64 ", less than the %" PRId64 " %s %s",
                        found, bag, record->limit - 1, record->limit, counted, when);
    }
    RF_FAIL_IF(record->position == 0, RF_ERR_VALUE, "%s; the first bag must begin at 0 %s", found, when);
    return rf__fail(RF_ERR_VALUE,
                    "%s%s; allowed is %" PRId64
                    " (where the bag before begins; %s must not decrease) to %" PRId64
                    " (the number of indices) %s",
                    found, bag, record->limit, name, record->lookups, when);
}

/* The lock of taking a record, so that one thread raises it; nothing waits under it. A child, which has no CUDA, never
 * comes here. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;

static bool is_ready(const rf_error_record *record) {
    return __atomic_load_n(&record->ready, __ATOMIC_ACQUIRE) != 0;
}

/* Copies a record and frees its place; false where another thread was first. */
static bool record_take(rf_error_record *record, rf_error_record *copy) {
    pthread_mutex_lock(&taking);
    const bool taken = is_ready(record);
    if (taken) {
        *copy = *record;
        /* In this order: it is empty, and then a kernel may write the next one. */
        __atomic_store_n(&record->ready, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&record->raised, copy->raised + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&taking);
    return taken;
}

rf_status rf__cuda_pending_error(const rf__cuda_device *device, const rf__cuda_error_place *place,
                                 void *stream) {
    if (!is_ready(place->record)) return RF_OK;
    rf_status status = RF_OK;
    rf_error_record record;
    rf__cu_capture_status capturing = RF__CU_STREAM_CAPTURE_STATUS_NONE;
    RF_TRY(rf__cuda_enter(device));
    /* It also fails where the default stream may not be asked because another is captured. */
    if (device->driver->cuStreamIsCapturing(stream, &capturing) == RF__CU_SUCCESS &&
        capturing == RF__CU_STREAM_CAPTURE_STATUS_NONE && record_take(place->record, &record))
        status = raise_record(&record);
    rf__cuda_leave();
out:
    return status;
}

/* Raises the first record that there is, and says how many others are left. */
static rf_status raise_first(const rf__cuda_device *device) {
    rf_error_record record, *first = NULL;
    int32_t more = 0;
    for (int32_t i = 0; i < RF__CUDA_ERROR_PLACES; i++) {
        rf_error_record *other = &device->errors.records[i];
        if (!is_ready(other)) continue;
        if (first == NULL)
            first = other;
        else
            more++;
    }
    if (first == NULL || !record_take(first, &record)) return RF_OK;
    const rf_status status = raise_record(&record);
    if (more == 0) return status;
    char text[1024];
    snprintf(text, sizeof text, "%s", rf_last_error());
    return rf__fail(status, "%s; calls with other tables left %d more: check again", text, (int)more);
}

rf_status rf_cuda_check(int32_t device_ordinal) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    RF_TRY(rf__cuda_device_get(device_ordinal, &device));
    RF_TRY(rf__cuda_enter(device));
    status = rf__cuda_status(device->driver->cuCtxSynchronize(), "cuCtxSynchronize");
    rf__cuda_leave();
    if (status == RF_OK) status = raise_first(device);
out:
    return status;
}
