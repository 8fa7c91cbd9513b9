#include "gpu/driver/memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Page-locked memory from which copies start. It is reused after its last copy, and never freed, because
 * freeing waits for the device. So there is as much as copies have been in flight at once. */
typedef struct staging {
    struct staging *next;
    void *memory;
    size_t bytes;
    rf__cu_event copied;
} staging;

/* Bytes of a resident store that several graphs may read. */
typedef struct shared_bytes {
    struct shared_bytes *next;
    rf__cu_pointer memory;
    size_t bytes;
    unsigned char copy[];
} shared_bytes;

/* That of one device. */
typedef struct staging_pool {
    pthread_mutex_t lock;
    shared_bytes *shared; /* under the lock; never freed, since graphs read them */
    staging *idle, *lost; /* under the lock; the completion of copies from lost memory is unknown */
} staging_pool;

/* Each is guarded by its own lock. A child of a process with a device has no CUDA and never gets here. */
static staging_pool pools[RF__CUDA_MOST_DEVICES] = {
    [0 ... RF__CUDA_MOST_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

void rf__cuda_lock(const rf__cuda_device *device) { pthread_mutex_lock(&pools[device->ordinal].lock); }

void rf__cuda_unlock(const rf__cuda_device *device) { pthread_mutex_unlock(&pools[device->ordinal].lock); }

/* In the device's context. */
static rf_status capturing_read(const rf__cuda_driver *driver, void *stream, bool *capturing) {
    rf_status status = RF_OK;
    rf__cu_capture_status buffer = RF__CU_STREAM_CAPTURE_STATUS_NONE;
    RF__CUDA_TRY(driver->cuStreamIsCapturing(stream, &buffer));
    if (buffer == RF__CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        status = rf__cuda_status(RF__CU_ERROR_STREAM_CAPTURE_INVALIDATED, "cuStreamIsCapturing");
    *capturing = buffer != RF__CU_STREAM_CAPTURE_STATUS_NONE;
out:
    return status;
}

rf_status rf__cuda_is_capturing(const rf__cuda_device *device, void *stream, bool *capturing) {
    *capturing = false;
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(capturing_read(device->driver, stream, capturing));
}

rf__cu_pointer rf__cuda_host_pointer(const rf__cuda_device *device, const void *memory) {
    rf__cu_pointer_attribute attributes[] = {RF__CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                             RF__CU_POINTER_ATTRIBUTE_DEVICE_POINTER};
    unsigned int type = 0;
    rf__cu_pointer on_device = 0;
    void *values[] = {&type, &on_device};
    if (rf__cuda_enter(device) != RF_OK) return 0;
    /* For memory unknown to the driver this function returns 0; the function for a single attribute fails. */
    const rf__cu_result result =
        device->driver->cuPointerGetAttributes(2, attributes, values, (uintptr_t)memory);
    rf__cuda_leave();
    return result == RF__CU_SUCCESS && type == RF__CU_MEMORYTYPE_HOST ? on_device : 0;
}

bool rf__cuda_is_page_locked(const rf__cuda_device *device, const void *memory) {
    return rf__cuda_host_pointer(device, memory) != 0;
}

/* The number of the default stream, which is always the same stream: the driver need not be called, and gives
 * no other stream this number. */
static const unsigned long long DEFAULT_STREAM = ~0ULL;

rf_status rf__cuda_store_of(const rf__cuda_device *device, void *stream, const rf_cuda_allocator *allocator,
                            rf__cuda_store *store) {
    memset(store, 0, sizeof *store);
    store->device = device;
    store->stream = stream;
    if (allocator != NULL) store->allocator = *allocator;
    if (device->driver == NULL) return RF_OK;
    RF_CHECK(rf__cuda_enter(device));
    rf_status status = capturing_read(device->driver, stream, &store->resident);
    if (!store->resident) store->stream_id = DEFAULT_STREAM;
    if (status == RF_OK && !store->resident && stream != NULL)
        status = RF__CUDA_CALL(device->driver->cuStreamGetId(stream, &store->stream_id));
    return rf__cuda_leave_with(status);
}

/* Returns staging memory of at least this size whose last copy is done, or allocates it. In the device's
 * context. */
static rf_status staging_take(const rf__cuda_device *device, size_t bytes, staging **acquired) {
    enum { LEAST_BYTES = 1 << 16 };
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    staging_pool *pool = &pools[device->ordinal];
    staging *buffer = NULL, *idle, **end;
    pthread_mutex_lock(&pool->lock);
    idle = pool->idle; /* all of it, because no driver call is made under the lock */
    pool->idle = NULL;
    pthread_mutex_unlock(&pool->lock);
    for (end = &idle; *end != NULL;) {
        staging *next = *end;
        if (buffer == NULL && next->bytes >= bytes && driver->cuEventQuery(next->copied) == RF__CU_SUCCESS) {
            buffer = next;
            *end = next->next;
        } else {
            end = &next->next;
        }
    }
    if (idle != NULL) {
        pthread_mutex_lock(&pool->lock);
        *end = pool->idle;
        pool->idle = idle;
        pthread_mutex_unlock(&pool->lock);
    }
    if (buffer == NULL) {
        buffer = calloc(1, sizeof *buffer);
        RF_FAIL_IF(buffer == NULL, RF_ERR_MEMORY, "no memory to copy %zu bytes to the GPU", bytes);
        for (buffer->bytes = LEAST_BYTES; buffer->bytes < bytes;) buffer->bytes *= 2;
        RF__CUDA_TRY(driver->cuEventCreate(&buffer->copied, RF__CU_EVENT_DISABLE_TIMING));
        RF__CUDA_TRY(driver->cuMemHostAlloc(&buffer->memory, buffer->bytes,
                                            RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    }
    *acquired = buffer;
out:
    if (status != RF_OK) {
        if (buffer->copied != NULL) (void)driver->cuEventDestroy_v2(buffer->copied);
        free(buffer);
    }
    return status;
}

static void staging_release(const rf__cuda_device *device, staging *buffer, bool lost) {
    staging_pool *pool = &pools[device->ordinal];
    staging **list = lost ? &pool->lost : &pool->idle;
    pthread_mutex_lock(&pool->lock);
    buffer->next = *list;
    *list = buffer;
    pthread_mutex_unlock(&pool->lock);
}

/* Copies on the stream, from memory that the caller need not keep. In the device's context. */
static rf_status copy(const rf__cuda_store *store, const void *from, size_t bytes, rf__cu_pointer to) {
    const rf__cuda_driver *driver = store->device->driver;
    staging *buffer = NULL;
    RF_CHECK(staging_take(store->device, bytes, &buffer));
    memcpy(buffer->memory, from, bytes);
    rf_status status = RF__CUDA_CALL(driver->cuMemcpyHtoDAsync_v2(to, buffer->memory, bytes, store->stream));
    const bool begun = status == RF_OK;
    if (begun) status = RF__CUDA_CALL(driver->cuEventRecord(buffer->copied, store->stream));
    staging_release(store->device, buffer, begun && status != RF_OK);
    return status;
}

rf_status rf__cuda_copy(const rf__cuda_store *store, const void *from, size_t bytes, rf__cu_pointer to) {
    if (bytes == 0) return RF_OK;
    RF_CHECK(rf__cuda_enter(store->device));
    const rf__cu_capture_mode mode =
        rf__cuda_capture_mode(store->device->driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    const rf_status status = copy(store, from, bytes, to);
    (void)rf__cuda_capture_mode(store->device->driver, mode);
    return rf__cuda_leave_with(status);
}

static rf_status allocate(const rf__cuda_store *store, size_t bytes, bool lasts, rf__cuda_block *block) {
    const rf__cuda_driver *driver = store->device->driver;
    if (store->allocator.allocate != NULL) {
        const rf_cuda_stream stream = {store->device->ordinal, store->stream};
        void *memory = NULL;
        RF_CHECK(store->allocator.allocate(store->allocator.context, (int64_t)bytes, lasts, &stream, &memory,
                                           &block->handle));
        block->memory = (uintptr_t)memory;
        return RF_OK;
    }
    RF_CHECK(rf__cuda_enter(store->device));
    const rf__cu_capture_mode mode = rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    const rf_status status = RF__CUDA_CALL(driver->cuMemAlloc_v2(&block->memory, bytes));
    (void)rf__cuda_capture_mode(driver, mode);
    return rf__cuda_leave_with(status);
}

rf_status rf__cuda_block_new(const rf__cuda_store *store, const void *from, size_t bytes, bool lasts,
                             rf__cuda_block *block) {
    const rf__cuda_device *device = store->device;
    rf_status status = RF_OK;
    *block = (rf__cuda_block){0};
    if (bytes == 0 || device->driver == NULL) return RF_OK;
    if (store->resident) {
        RF_TRY(rf__cuda_enter(device));
        status = rf__cuda_leave_with(rf__cuda_upload(device->driver, from, bytes, &block->memory));
    } else {
        RF_TRY(allocate(store, bytes, lasts, block));
        status = rf__cuda_copy(store, from, bytes, block->memory);
    }
out:
    if (status != RF_OK) rf__cuda_block_free(store, block);
    return status;
}

static void release(const rf__cuda_store *store, rf__cuda_block *block) {
    const rf__cuda_block old = *block;
    *block = (rf__cuda_block){0};
    if (old.memory == 0) return;
    if (store->allocator.allocate != NULL) {
        store->allocator.release(store->allocator.context, old.handle);
    } else if (rf__cuda_enter(store->device) == RF_OK) {
        rf__cuda_memory_free(store->device->driver, old.memory);
        rf__cuda_leave();
    }
}

void rf__cuda_block_free(const rf__cuda_store *store, rf__cuda_block *block) {
    if (!store->resident) release(store, block);
    *block = (rf__cuda_block){0};
}

rf_status rf__cuda_room_new(const rf__cuda_store *store, size_t bytes, rf__cuda_block *block) {
    *block = (rf__cuda_block){0};
    return bytes == 0 || store->device->driver == NULL ? RF_OK : allocate(store, bytes, false, block);
}

void rf__cuda_room_free(const rf__cuda_store *store, rf__cuda_block *block) {
    if (!store->resident || store->allocator.allocate != NULL) release(store, block);
    *block = (rf__cuda_block){0};
}

/* Under the lock. */
static const shared_bytes *shared_find(const rf__cuda_device *device, const void *from, size_t bytes) {
    const shared_bytes *at = pools[device->ordinal].shared;
    while (at != NULL && (at->bytes != bytes || memcmp(at->copy, from, bytes) != 0)) at = at->next;
    return at;
}

rf_status rf__cuda_block_shared(const rf__cuda_store *store, const void *from, size_t bytes,
                                rf__cuda_block *block) {
    if (!store->resident || bytes == 0) return rf__cuda_block_new(store, from, bytes, false, block);
    const rf__cuda_device *device = store->device;
    *block = (rf__cuda_block){0};
    rf__cuda_lock(device);
    const shared_bytes *buffer = shared_find(device, from, bytes);
    rf__cuda_unlock(device);
    if (buffer == NULL) {
        shared_bytes *created = malloc(sizeof *created + bytes);
        RF_FAIL_IF(created == NULL, RF_ERR_MEMORY, "no memory for %zu bytes that a CUDA graph reads", bytes);
        *created = (shared_bytes){.bytes = bytes};
        memcpy(created->copy, from, bytes);
        const rf_status status = rf__cuda_block_new(store, from, bytes, true, block);
        if (status != RF_OK) {
            free(created);
            return status;
        }
        created->memory = block->memory;
        rf__cuda_lock(device);
        created->next = pools[device->ordinal].shared;
        pools[device->ordinal].shared = created;
        rf__cuda_unlock(device);
        return RF_OK;
    }
    block->memory = buffer->memory;
    return RF_OK;
}
