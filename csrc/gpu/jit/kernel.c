/* The kernels that are loaded: one table for the process, read without a lock. */
#define _GNU_SOURCE /* strdup */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/jit/jit.h"

enum { BUCKETS = 1024 };

/* A kernel on a device. Its key never changes, and it is never removed. A fork waits for no lock here:
 * children of a process with a device have no CUDA and do not get here. */
typedef struct loaded {
    struct loaded *next; /* in its bucket; set before the entry can be seen */
    const rf__cuda_device *device;
    const rf__kernel_source *source;
    atomic_bool ready; /* then `kernel` is set forever */
    rf__kernel kernel;
    /* The lock of compiling and loading it. */
    pthread_mutex_t making;
    atomic_uint failures; /* failures so far; threads that waited share the last one */
    rf_status status; /* of the last failure; under the lock */
    char *message; /* of the last failure, NULL if out of memory; under the lock */
    size_t key_bytes;
    unsigned char key[];
} loaded;

static _Atomic(loaded *) buckets[BUCKETS]; /* atomic; lists that grow at their heads, under the lock */
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER; /* the lock of lists; nothing waits under it */

static uint64_t hash_word(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 32);
}

/* Only the size and the head of a long key are hashed: keys with the same head share a bucket, and are
 * compared. */
static _Atomic(loaded *) *bucket_of(const rf__cuda_device *device, const rf__kernel_source *source,
                                    const void *key, size_t key_bytes) {
    enum { HEAD_BYTES = 256 };
    const unsigned char *from = key;
    uint64_t hash = hash_word((uint64_t)(uintptr_t)device + key_bytes, (uint64_t)(uintptr_t)source);
    if (key_bytes > HEAD_BYTES) key_bytes = HEAD_BYTES;
    while (key_bytes > 0) {
        uint64_t word = 0;
        const size_t bytes = key_bytes < sizeof word ? key_bytes : sizeof word;
        memcpy(&word, from, bytes);
        hash = hash_word(hash, word);
        from += bytes;
        key_bytes -= bytes;
    }
    return &buckets[hash % BUCKETS];
}

static loaded *find(loaded *from, const rf__cuda_device *device, const rf__kernel_source *source,
                    const void *key, size_t key_bytes) {
    while (from != NULL && (from->device != device || from->source != source ||
                            from->key_bytes != key_bytes || memcmp(from->key, key, key_bytes) != 0))
        from = from->next;
    return from;
}

/* In the device's context. The module is never unloaded once its kernel is in use. */
static rf_status module_load(const rf__cuda_driver *driver, const char *entry, int32_t dynamic_shared,
                             const void *cubin, rf__kernel *kernel) {
    rf_status status = RF_OK;
    rf__cu_module module = NULL;
    kernel->dynamic_shared = dynamic_shared;
    RF__CUDA_TRY(driver->cuModuleLoadData(&module, cubin));
    RF__CUDA_TRY(driver->cuModuleGetFunction(&kernel->function, module, entry));
#define RF__READ(field, name) \
    RF__CUDA_TRY(driver->cuFuncGetAttribute(&kernel->field, RF__CU_FUNC_ATTRIBUTE_##name, kernel->function));
    RF__READ(registers, NUM_REGS)
    RF__READ(static_shared, SHARED_SIZE_BYTES)
#undef RF__READ
    if (dynamic_shared > 0)
        RF__CUDA_TRY(driver->cuFuncSetAttribute(
            kernel->function, RF__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared));
out:
    if (status != RF_OK && module != NULL) (void)driver->cuModuleUnload(module);
    return status;
}

static rf_status load(const rf__cuda_device *device, const rf__kernel_source *source,
                      const rf__kernel_options *options, const void *cubin, rf__kernel *kernel) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = rf__cuda_enter(device);
    if (status == RF_OK) {
        const rf__cu_capture_mode mode = rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
        status = module_load(driver, source->entry, options->dynamic_shared, cubin, kernel);
        (void)rf__cuda_capture_mode(driver, mode);
        rf__cuda_leave();
    }
    RF_FAIL_IF(status != RF_OK, status,
               "the GPU kernel %s of %s for %s with %d bytes of dynamic shared memory does not load: %s",
               source->entry, source->file, device->gpu.arch, (int)options->dynamic_shared, rf_last_error());
    return RF_OK;
}

static rf_status kernel_make(const rf__cuda_device *device, const rf__kernel_source *source, const void *key,
                             rf__kernel_describe describe, rf__kernel *kernel) {
    rf_status status = RF_OK;
    rf__kernel_options options = {0};
    void *cubin = NULL;
    int64_t cubin_bytes = 0;
    RF_TRY(describe(key, &options));
    RF_TRY(rf__jit_compile(source, &options, device->gpu.arch, &cubin, &cubin_bytes, NULL));
    RF_TRY(load(device, source, &options, cubin, kernel));
out:
    free(cubin);
    return status;
}

/* Returns the entry of a kernel, or adds one at the head of its bucket. */
static rf_status find_or_add(_Atomic(loaded *) *bucket, const rf__cuda_device *device,
                             const rf__kernel_source *source, const void *key, size_t key_bytes,
                             loaded **entry) {
    pthread_mutex_lock(&adding);
    loaded *head = atomic_load_explicit(bucket, memory_order_relaxed);
    loaded *found = find(head, device, source, key, key_bytes);
    if (found == NULL) found = calloc(1, sizeof *found + key_bytes);
    if (found != NULL && found->device == NULL) {
        *found = (loaded){.next = head, .device = device, .source = source, .key_bytes = key_bytes};
        memcpy(found->key, key, key_bytes);
        (void)pthread_mutex_init(&found->making, NULL);
        atomic_store_explicit(bucket, found, memory_order_release);
    }
    pthread_mutex_unlock(&adding);
    RF_FAIL_IF(found == NULL, RF_ERR_MEMORY, "no memory for the GPU kernel %s", source->entry);
    *entry = found;
    return RF_OK;
}

/* Stores a failure for the threads that wait for the kernel; under its lock. */
static void failure_keep(loaded *entry, rf_status status) {
    free(entry->message);
    entry->message = strdup(rf_last_error());
    entry->status = entry->message != NULL ? status : RF_ERR_MEMORY;
    atomic_fetch_add_explicit(&entry->failures, 1, memory_order_relaxed);
}

/* Makes the kernel, or waits for the thread that does. */
static rf_status make_or_wait(loaded *entry, rf__kernel_describe describe) {
    rf_status status = RF_OK;
    const unsigned failures = atomic_load_explicit(&entry->failures, memory_order_relaxed);
    pthread_mutex_lock(&entry->making);
    const bool ready = atomic_load_explicit(&entry->ready, memory_order_relaxed);
    if (!ready && atomic_load_explicit(&entry->failures, memory_order_relaxed) != failures) {
        status = rf__fail(entry->status, "%s",
                          entry->message != NULL ? entry->message : rf_status_text(entry->status));
    } else if (!ready) {
        status = kernel_make(entry->device, entry->source, entry->key, describe, &entry->kernel);
        if (status == RF_OK)
            atomic_store_explicit(&entry->ready, true, memory_order_release);
        else
            failure_keep(entry, status);
    }
    pthread_mutex_unlock(&entry->making);
    return status;
}

rf_status rf__jit_kernel(const rf__cuda_device *device, const rf__kernel_source *source, const void *key,
                         size_t key_bytes, rf__kernel_describe describe, const rf__kernel **kernel) {
    _Atomic(loaded *) *bucket = bucket_of(device, source, key, key_bytes);
    loaded *entry = find(atomic_load_explicit(bucket, memory_order_acquire), device, source, key, key_bytes);
    rf_status status = RF_OK;
    if (entry == NULL || !atomic_load_explicit(&entry->ready, memory_order_acquire)) {
        const rf__cuda_driver *driver = NULL;
        RF_TRY(rf__cuda_driver_get(&driver)); /* fails in a child */
        RF_TRY(find_or_add(bucket, device, source, key, key_bytes, &entry));
        RF_TRY(make_or_wait(entry, describe));
    }
    *kernel = &entry->kernel;
out:
    return status;
}

rf_status rf__kernel_clusters(const rf__cuda_device *device, const rf__kernel *kernel,
                              const rf__launch_config *config, int32_t *clusters) {
    int32_t *cached = (int32_t *)(uintptr_t)&kernel->clusters; /* atomic */
    *clusters = __atomic_load_n(cached, __ATOMIC_RELAXED);
    if (*clusters > 0) return RF_OK;
    RF_CHECK(rf__launch_clusters(device, config, clusters));
    __atomic_store_n(cached, *clusters, __ATOMIC_RELAXED);
    return RF_OK;
}
