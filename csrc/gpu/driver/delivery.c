#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "gpu/driver/delivery.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum {
    HEAD = 256, /* bytes before the memory, of which the first four are the word */
    LEAST = 1 << 16,
    SIZES = 48, /* LEAST, and twice the one before */
    MOST = 32, /* deliveries of a device */
    FEWEST = 2, /* of them however large they are */
};
/* Of all that are at least of some size, if they were of that size. More there are where more callers had them in their hands
 * at once. */
static const size_t MOST_BYTES = (size_t)256 << 20;

/* Those of one device that nobody has taken, the oldest first. None is ever freed: its event may be asked while it is taken. */
typedef struct delivery_pool {
    pthread_mutex_t lock; /* guards the rest; the driver is not called under it */
    rf__cuda_delivery *first;
    uint64_t turns; /* the last one's */
    int32_t counts[SIZES]; /* with those that are taken */
} delivery_pool;

/* A delivery of the pool, of which the rest is others' as soon as the lock is left. */
typedef struct listed {
    uint64_t turn;
    rf__cu_event read;
} listed;

/* Each under its own lock. A child of a process with a device has no CUDA and never comes here. */
static delivery_pool pools[RF__CUDA_MOST_DEVICES] = {
    [0 ... RF__CUDA_MOST_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static int32_t size_of(size_t bytes) {
    int32_t size = 0;
    while (size < SIZES - 1 && (size_t)LEAST << size < bytes) size++;
    return size;
}

static size_t bytes_of(int32_t size) { return (size_t)LEAST << size; }

static int32_t most_of(int32_t size) {
    const size_t most = MOST_BYTES / bytes_of(size);
    return most > MOST ? MOST : most < FEWEST ? FEWEST : (int32_t)most;
}

static bool is_filled(const rf__cuda_delivery *delivery) {
    return __atomic_load_n(delivery->word, __ATOMIC_ACQUIRE) == delivery->number;
}

/* The oldest after a turn that is of at least a size, of those that are filled or of all; false: there is none. */
static bool pool_look(delivery_pool *pool, uint64_t after, int32_t size, bool filled, listed *seen) {
    pthread_mutex_lock(&pool->lock);
    const rf__cuda_delivery *at = pool->first;
    while (at != NULL && (at->turn <= after || at->bytes < bytes_of(size) || (filled && !is_filled(at))))
        at = at->next;
    if (at != NULL) *seen = (listed){at->turn, at->read};
    pthread_mutex_unlock(&pool->lock);
    return at != NULL;
}

/* NULL: another caller has taken it. */
static rf__cuda_delivery *pool_take(delivery_pool *pool, uint64_t turn) {
    pthread_mutex_lock(&pool->lock);
    rf__cuda_delivery **at = &pool->first;
    while (*at != NULL && (*at)->turn != turn) at = &(*at)->next;
    rf__cuda_delivery *taken = *at;
    if (taken != NULL) *at = taken->next;
    pthread_mutex_unlock(&pool->lock);
    return taken;
}

/* As the youngest, or where it was. */
static void pool_put(delivery_pool *pool, rf__cuda_delivery *delivery) {
    pthread_mutex_lock(&pool->lock);
    if (delivery->turn == 0) delivery->turn = ++pool->turns;
    rf__cuda_delivery **at = &pool->first;
    while (*at != NULL && (*at)->turn < delivery->turn) at = &(*at)->next;
    delivery->next = *at;
    *at = delivery;
    pthread_mutex_unlock(&pool->lock);
}

/* Counts one more of a size; false: there are so many of it and larger ones, and not all are in the hands of callers. *all: that
 * there are, without it. */
static bool pool_reserve(delivery_pool *pool, int32_t size, int32_t *all) {
    int32_t as_large = 0;
    pthread_mutex_lock(&pool->lock);
    *all = 0;
    for (int32_t i = 0; i < SIZES; i++) {
        *all += pool->counts[i];
        if (i >= size) as_large += pool->counts[i];
    }
    const rf__cuda_delivery *at = pool->first;
    while (at != NULL && at->bytes < bytes_of(size)) at = at->next;
    const bool granted = as_large < most_of(size) || at == NULL;
    pool->counts[size] += granted;
    pthread_mutex_unlock(&pool->lock);
    return granted;
}

static void pool_uncount(delivery_pool *pool, int32_t size) {
    pthread_mutex_lock(&pool->lock);
    pool->counts[size]--;
    pthread_mutex_unlock(&pool->lock);
}

/* In the device's context, and so below. */
static rf_status memory_new(const rf__cuda_driver *driver, int32_t size, rf__cuda_delivery *delivery) {
    rf_status status = RF_OK;
    void *memory = NULL;
    RF__CUDA_TRY(driver->cuMemHostAlloc(&memory, HEAD + bytes_of(size),
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&delivery->word_on_device, memory, 0));
    delivery->word = memory;
    delivery->memory = (char *)memory + HEAD;
    delivery->memory_on_device = delivery->word_on_device + HEAD;
    delivery->bytes = bytes_of(size);
    __atomic_store_n(delivery->word, delivery->number, __ATOMIC_RELEASE);
out:
    if (status != RF_OK && memory != NULL) (void)driver->cuMemFreeHost(memory);
    return status;
}

static void delivery_free(const rf__cuda_driver *driver, rf__cuda_delivery *delivery) {
    if (delivery == NULL) return;
    if (delivery->word != NULL) (void)driver->cuMemFreeHost(delivery->word);
    if (delivery->read != NULL) (void)driver->cuEventDestroy_v2(delivery->read);
    free(delivery);
}

/* A new one; waits in the stream for what is there already, which tells whether the device can. */
static rf_status delivery_make(const rf__cuda_device *device, void *stream, int32_t size,
                               rf__cuda_delivery **made) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    rf__cuda_delivery *delivery = calloc(1, sizeof *delivery);
    RF_FAIL_IF(delivery == NULL, RF_ERR_MEMORY, "no memory for what a stream waits for");
    RF__CUDA_TRY(driver->cuEventCreate(&delivery->read, RF__CU_EVENT_DISABLE_TIMING));
    RF_TRY(memory_new(driver, size, delivery));
    const rf__cu_result result = driver->cuStreamWaitValue32_v2(
        stream, delivery->word_on_device, delivery->number, RF__CU_STREAM_WAIT_VALUE_GEQ);
    if (result == RF__CU_ERROR_NOT_SUPPORTED) {
        status = rf__fail(RF_ERR_UNSUPPORTED, "streams of GPU %d cannot wait for memory of the host",
                          (int)device->ordinal);
        goto out;
    }
    RF_TRY(rf__cuda_status(result, "cuStreamWaitValue32_v2"));
    *made = delivery;
out:
    if (status != RF_OK) delivery_free(driver, delivery);
    return status;
}

/* The oldest of at least a size that is filled and read, or NULL. */
static rf__cuda_delivery *take_idle(const rf__cuda_driver *driver, delivery_pool *pool, int32_t size) {
    listed seen = {0};
    rf__cuda_delivery *taken = NULL;
    for (int i = 0; i < MOST && taken == NULL && pool_look(pool, seen.turn, size, true, &seen); i++)
        if (driver->cuEventQuery(seen.read) == RF__CU_SUCCESS) taken = pool_take(pool, seen.turn);
    return taken;
}

/* Makes what is taken as large, which the pool counts as one more of that size. Where it fails, the pool has it again and
 * *taken is NULL. */
static rf_status delivery_grow(const rf__cuda_driver *driver, delivery_pool *pool, int32_t size,
                               rf__cuda_delivery **taken) {
    int32_t no_more = size; /* of the sizes that were counted */
    rf_status status = RF_OK;
    if ((*taken)->bytes < bytes_of(size)) {
        const int32_t before = size_of((*taken)->bytes);
        uint32_t *word = (*taken)->word;
        status = memory_new(driver, size, *taken);
        if (status == RF_OK) {
            (void)driver->cuMemFreeHost(word);
            no_more = before;
        } else {
            pool_put(pool, *taken);
            *taken = NULL;
        }
    }
    pool_uncount(pool, no_more);
    return status;
}

/* One whose memory is idle and of at least so many bytes. It grows rather than that there is one more, but of one size and larger
 * ones there are never more than that size allows: memory that has grown stays. */
static rf_status delivery_find(const rf__cuda_device *device, void *stream, size_t bytes,
                               rf__cuda_delivery **found) {
    const rf__cuda_driver *driver = device->driver;
    delivery_pool *pool = &pools[device->ordinal];
    const int32_t size = size_of(bytes);
    rf_status status = RF_OK;
    for (uint64_t waited = 0;;) {
        listed oldest;
        int32_t all;
        *found = take_idle(driver, pool, size);
        if (*found != NULL) return RF_OK;
        const bool granted = pool_reserve(pool, size, &all);
        if (granted && (*found = take_idle(driver, pool, 0)) != NULL)
            return delivery_grow(driver, pool, size, found);
        const bool waits = pool_look(pool, 0, granted ? 0 : size, false, &oldest);
        if (granted && (all < MOST || !waits)) break;
        if (granted) pool_uncount(pool, size);
        if (!waits) continue;
        RF__CUDA_TRY(driver->cuEventSynchronize(oldest.read));
        /* Where its wait could not be put into the stream, that is done before the thread is. */
        if (oldest.turn == waited) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        waited = oldest.turn;
    }
    status = delivery_make(device, stream, size, found);
    if (status != RF_OK) pool_uncount(pool, size);
out:
    return status;
}

static rf_status delivery_new(const rf__cuda_device *device, void *stream, size_t bytes,
                              rf__cuda_delivery **delivery) {
    RF_CHECK(delivery_find(device, stream, bytes, delivery));
    (*delivery)->number++;
    (*delivery)->turn = 0;
    return RF_OK;
}

rf_status rf__cuda_delivery_new(const rf__cuda_device *device, void *stream, size_t bytes,
                                rf__cuda_delivery **delivery) {
    RF_CHECK(rf__cuda_enter(device));
    const rf__cu_capture_mode mode =
        rf__cuda_capture_mode(device->driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    const rf_status status = delivery_new(device, stream, bytes, delivery);
    (void)rf__cuda_capture_mode(device->driver, mode);
    return rf__cuda_leave_with(status);
}

void rf__cuda_delivery_post(rf__cuda_delivery *delivery) {
    __atomic_store_n(delivery->word, delivery->number, __ATOMIC_RELEASE);
}

static rf_status copy(const rf__cuda_driver *driver, const rf__cuda_delivery *delivery, size_t bytes,
                      rf__cu_pointer to, void *stream) {
    rf_status status = RF_OK;
    RF__CUDA_TRY(driver->cuStreamWaitValue32_v2(stream, delivery->word_on_device, delivery->number,
                                                RF__CU_STREAM_WAIT_VALUE_GEQ));
    if (bytes > 0) RF__CUDA_TRY(driver->cuMemcpyHtoDAsync_v2(to, delivery->memory, bytes, stream));
out:
    return status;
}

rf_status rf__cuda_delivery_copy(const rf__cuda_device *device, const rf__cuda_delivery *delivery,
                                 size_t bytes, rf__cu_pointer to, void *stream) {
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(copy(device->driver, delivery, bytes, to, stream));
}

rf_status rf__cuda_delivery_end(const rf__cuda_device *device, rf__cuda_delivery *delivery, void *stream,
                                rf_status status) {
    rf_status recorded = rf__cuda_enter(device);
    if (recorded == RF_OK)
        recorded = rf__cuda_leave_with(RF__CUDA_CALL(device->driver->cuEventRecord(delivery->read, stream)));
    /* Else nobody knows when the stream has read it: it is lost. */
    if (recorded == RF_OK) pool_put(&pools[device->ordinal], delivery);
    return status != RF_OK ? status : recorded;
}
