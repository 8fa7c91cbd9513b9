#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "families/embedding_columns/host/staging.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum {
    HEAD = 256, /* bytes before the memory; the first four are the word */
    LEAST_BYTES = 1 << 16,
    SIZES = 48, /* classes of sizes: LEAST_BYTES, then twice the class before */
    MOST_BUFFERS = 32, /* buffers of a device */
    FEWEST = 2, /* buffers of a class and larger that are always allowed */
};
/* Bounds the buffers of a size class and larger, counted as if each had the size of that class. The bound is
 * exceeded if callers held more at once. */
static const size_t MOST_BYTES = (size_t)256 << 20;

/* The free buffers of a device, the oldest first. A buffer is never freed: another thread may query its
 * event. */
typedef struct buffer_pool {
    pthread_mutex_t lock; /* guards the following fields; no driver call is made under it */
    rf__staging *first;
    uint64_t n_uses; /* the last turn */
    int32_t counts[SIZES]; /* of all buffers, also acquired ones */
} buffer_pool;

/* Identifies a buffer of the pool after the lock is released. */
typedef struct buffer_key {
    uint64_t last_use;
    rf__cu_event read;
} buffer_key;

/* Each is guarded by its own lock. A child of a process with a device has no CUDA and never gets here. */
static buffer_pool pools[RF__CUDA_MOST_DEVICES] = {
    [0 ... RF__CUDA_MOST_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static int32_t size_of(size_t bytes) {
    int32_t size = 0;
    while (size < SIZES - 1 && (size_t)LEAST_BYTES << size < bytes) size++;
    return size;
}

static size_t bytes_of(int32_t size) { return (size_t)LEAST_BYTES << size; }

static int32_t most_of(int32_t size) {
    const size_t most = MOST_BYTES / bytes_of(size);
    return most > MOST_BUFFERS ? MOST_BUFFERS : most < FEWEST ? FEWEST : (int32_t)most;
}

static bool is_filled(const rf__staging *buffer) {
    return __atomic_load_n(buffer->word, __ATOMIC_ACQUIRE) == buffer->number;
}

/* Finds the oldest buffer after a turn that has at least a size and, with `filled`, is filled. */
static bool pool_next(buffer_pool *pool, uint64_t after, int32_t size, bool filled, buffer_key *key) {
    pthread_mutex_lock(&pool->lock);
    const rf__staging *at = pool->first;
    while (at != NULL && (at->last_use <= after || at->bytes < bytes_of(size) || (filled && !is_filled(at))))
        at = at->next;
    if (at != NULL) *key = (buffer_key){at->last_use, at->read};
    pthread_mutex_unlock(&pool->lock);
    return at != NULL;
}

/* Takes the buffer of a turn. Returns NULL if another caller has taken it. */
static rf__staging *pool_take(buffer_pool *pool, uint64_t last_use) {
    pthread_mutex_lock(&pool->lock);
    rf__staging **at = &pool->first;
    while (*at != NULL && (*at)->last_use != last_use) at = &(*at)->next;
    rf__staging *buffer_taken = *at;
    if (buffer_taken != NULL) *at = buffer_taken->next;
    pthread_mutex_unlock(&pool->lock);
    return buffer_taken;
}

/* Puts a buffer at the end, or back to its turn. */
static void pool_put(buffer_pool *pool, rf__staging *buffer) {
    pthread_mutex_lock(&pool->lock);
    if (buffer->last_use == 0) buffer->last_use = ++pool->n_uses;
    rf__staging **at = &pool->first;
    while (*at != NULL && (*at)->last_use < buffer->last_use) at = &(*at)->next;
    buffer->next = *at;
    *at = buffer;
    pthread_mutex_unlock(&pool->lock);
}

/* Counts an additional buffer of a size, unless that reaches the bound and the pool has such a buffer. *all:
 * buffers of all sizes, without the new one. */
static bool pool_reserve(buffer_pool *pool, int32_t size, int32_t *n_buffers) {
    int32_t as_large = 0;
    pthread_mutex_lock(&pool->lock);
    *n_buffers = 0;
    for (int32_t i = 0; i < SIZES; i++) {
        *n_buffers += pool->counts[i];
        if (i >= size) as_large += pool->counts[i];
    }
    const rf__staging *at = pool->first;
    while (at != NULL && at->bytes < bytes_of(size)) at = at->next;
    const bool granted = as_large < most_of(size) || at == NULL;
    pool->counts[size] += granted;
    pthread_mutex_unlock(&pool->lock);
    return granted;
}

static void pool_uncount(buffer_pool *pool, int32_t size) {
    pthread_mutex_lock(&pool->lock);
    pool->counts[size]--;
    pthread_mutex_unlock(&pool->lock);
}

/* Allocates the memory of a buffer. In the device's context, as all functions up to buffer_find. */
static rf_status memory_new(const rf__cuda_driver *driver, int32_t size, rf__staging *buffer) {
    rf_status status = RF_OK;
    void *memory = NULL;
    RF__CUDA_TRY(driver->cuMemHostAlloc(&memory, HEAD + bytes_of(size),
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&buffer->word_on_device, memory, 0));
    buffer->word = memory;
    buffer->memory = (char *)memory + HEAD;
    buffer->memory_on_device = buffer->word_on_device + HEAD;
    buffer->bytes = bytes_of(size);
    __atomic_store_n(buffer->word, buffer->number, __ATOMIC_RELEASE);
out:
    if (status != RF_OK && memory != NULL) (void)driver->cuMemFreeHost(memory);
    return status;
}

static void buffer_free(const rf__cuda_driver *driver, rf__staging *buffer) {
    if (buffer == NULL) return;
    if (buffer->word != NULL) (void)driver->cuMemFreeHost(buffer->word);
    if (buffer->read != NULL) (void)driver->cuEventDestroy_v2(buffer->read);
    free(buffer);
}

/* Makes a buffer. Puts a wait for its present word into the stream, which shows whether the device can
 * wait. */
static rf_status buffer_new(const rf__cuda_device *device, void *stream, int32_t size,
                            rf__staging **created) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    rf__staging *buffer = calloc(1, sizeof *buffer);
    RF_FAIL_IF(buffer == NULL, RF_ERR_MEMORY, "no memory for a staging buffer");
    RF__CUDA_TRY(driver->cuEventCreate(&buffer->read, RF__CU_EVENT_DISABLE_TIMING));
    RF_TRY(memory_new(driver, size, buffer));
    const rf__cu_result result = driver->cuStreamWaitValue32_v2(stream, buffer->word_on_device,
                                                                buffer->number, RF__CU_STREAM_WAIT_VALUE_GEQ);
    if (result == RF__CU_ERROR_NOT_SUPPORTED) {
        status = rf__fail(RF_ERR_UNSUPPORTED, "streams of GPU %d cannot wait for memory of the host",
                          (int)device->ordinal);
        goto out;
    }
    RF_TRY(rf__cuda_status(result, "cuStreamWaitValue32_v2"));
    *created = buffer;
out:
    if (status != RF_OK) buffer_free(driver, buffer);
    return status;
}

/* Takes the oldest buffer of at least a size that is filled and read, or returns NULL. */
static rf__staging *take_idle(const rf__cuda_driver *driver, buffer_pool *pool, int32_t size) {
    buffer_key key = {0};
    rf__staging *buffer_taken = NULL;
    for (int i = 0;
         i < MOST_BUFFERS && buffer_taken == NULL && pool_next(pool, key.last_use, size, true, &key); i++)
        if (driver->cuEventQuery(key.read) == RF__CU_SUCCESS) buffer_taken = pool_take(pool, key.last_use);
    return buffer_taken;
}

/* Grows a taken buffer to at least a size that the pool has counted. On failure, returns the buffer to the
 * pool and sets *taken to NULL. */
static rf_status buffer_grow(const rf__cuda_driver *driver, buffer_pool *pool, int32_t size,
                             rf__staging **buffer_taken) {
    int32_t uncounted = size;
    rf_status status = RF_OK;
    if ((*buffer_taken)->bytes < bytes_of(size)) {
        const int32_t before = size_of((*buffer_taken)->bytes);
        uint32_t *word = (*buffer_taken)->word;
        status = memory_new(driver, size, *buffer_taken);
        if (status == RF_OK) {
            (void)driver->cuMemFreeHost(word);
            uncounted = before;
        } else {
            pool_put(pool, *buffer_taken);
            *buffer_taken = NULL;
        }
    }
    pool_uncount(pool, uncounted);
    return status;
}

/* Finds an idle buffer of at least `bytes`. Grows an idle buffer before it allocates one, within the bound of
 * each size: grown memory stays. */
static rf_status buffer_find(const rf__cuda_device *device, void *stream, size_t bytes, rf__staging **found) {
    const rf__cuda_driver *driver = device->driver;
    buffer_pool *pool = &pools[device->ordinal];
    const int32_t size = size_of(bytes);
    rf_status status = RF_OK;
    for (uint64_t waited = 0;;) {
        buffer_key oldest;
        int32_t n_buffers;
        *found = take_idle(driver, pool, size);
        if (*found != NULL) return RF_OK;
        const bool granted = pool_reserve(pool, size, &n_buffers);
        if (granted && (*found = take_idle(driver, pool, 0)) != NULL)
            return buffer_grow(driver, pool, size, found);
        const bool waits = pool_next(pool, 0, granted ? 0 : size, false, &oldest);
        if (granted && (n_buffers < MOST_BUFFERS || !waits)) break;
        if (granted) pool_uncount(pool, size);
        if (!waits) continue;
        RF__CUDA_TRY(driver->cuEventSynchronize(oldest.read));
        /* If the wait could not be put into the stream, the event completes before the thread. */
        if (oldest.last_use == waited) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        waited = oldest.last_use;
    }
    status = buffer_new(device, stream, size, found);
    if (status != RF_OK) pool_uncount(pool, size);
out:
    return status;
}

rf_status rf__staging_acquire(const rf__cuda_device *device, void *stream, size_t bytes,
                              rf__staging **buffer) {
    RF_CHECK(rf__cuda_enter(device));
    const rf__cu_capture_mode mode =
        rf__cuda_capture_mode(device->driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    const rf_status status = buffer_find(device, stream, bytes, buffer);
    if (status == RF_OK) {
        (*buffer)->number++;
        (*buffer)->last_use = 0;
    }
    (void)rf__cuda_capture_mode(device->driver, mode);
    return rf__cuda_leave_with(status);
}

void rf__staging_fill_end(rf__staging *buffer) {
    __atomic_store_n(buffer->word, buffer->number, __ATOMIC_RELEASE);
}

static rf_status copy(const rf__cuda_driver *driver, const rf__staging *buffer, size_t bytes,
                      rf__cu_pointer to, void *stream) {
    rf_status status = RF_OK;
    RF__CUDA_TRY(driver->cuStreamWaitValue32_v2(stream, buffer->word_on_device, buffer->number,
                                                RF__CU_STREAM_WAIT_VALUE_GEQ));
    if (bytes > 0) RF__CUDA_TRY(driver->cuMemcpyHtoDAsync_v2(to, buffer->memory, bytes, stream));
out:
    return status;
}

rf_status rf__staging_copy(const rf__cuda_device *device, const rf__staging *buffer, size_t bytes,
                           rf__cu_pointer to, void *stream) {
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(copy(device->driver, buffer, bytes, to, stream));
}

rf_status rf__staging_release(const rf__cuda_device *device, rf__staging *buffer, void *stream,
                              rf_status status) {
    rf_status recorded = rf__cuda_enter(device);
    if (recorded == RF_OK)
        recorded = rf__cuda_leave_with(RF__CUDA_CALL(device->driver->cuEventRecord(buffer->read, stream)));
    /* Without the event nothing tells when the stream has read the buffer, so it stays unused. */
    if (recorded == RF_OK) pool_put(&pools[device->ordinal], buffer);
    return status != RF_OK ? status : recorded;
}
