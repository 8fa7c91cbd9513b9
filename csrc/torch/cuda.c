/* torch's CUDA part, which lies in a library that need not be there. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "cuda/driver/device.h"
#include "torch/ops.h"

typedef struct CUDAStreamGuardOpaque *stream_guard;

/* What is called there. */
typedef struct torch_cuda {
    int32_t (*current_stream)(int32_t device, void **stream);
    int32_t (*create_stream_guard)(void *stream, int32_t device, stream_guard *guard);
    int32_t (*delete_stream_guard)(stream_guard guard);
} torch_cuda;

/* Filled under the lock, and read once `found` says so. */
static torch_cuda functions;
static atomic_bool found; /* atomic */
static pthread_mutex_t finding =
    PTHREAD_MUTEX_INITIALIZER; /* the lock; a child finds it free, since no one forks in it */

static rf_status torch_cuda_get(const torch_cuda **cuda) {
    *cuda = &functions;
    if (atomic_load_explicit(&found, memory_order_acquire)) return RF_OK;
    torch_cuda all = {NULL, NULL, NULL};
    /* A tensor on a GPU has come: torch has loaded it. */
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) {
        *(void **)&all.current_stream = dlsym(library, "aoti_torch_get_current_cuda_stream");
        *(void **)&all.create_stream_guard = dlsym(library, "aoti_torch_create_cuda_stream_guard");
        *(void **)&all.delete_stream_guard = dlsym(library, "aoti_torch_delete_cuda_stream_guard");
    }
    if (all.current_stream == NULL || all.create_stream_guard == NULL || all.delete_stream_guard == NULL) {
        return rf__fail(RF_ERR_UNSUPPORTED,
                        "this torch has no CUDA streams that recfuse can find (libtorch_cuda.so "
                        "with aoti_torch_get_current_cuda_stream); install a CUDA build of "
                        "torch 2.11 or newer, or move the tensors to the CPU");
    }
    pthread_mutex_lock(&finding);
    if (!atomic_load_explicit(&found, memory_order_relaxed)) functions = all;
    atomic_store_explicit(&found, true, memory_order_release);
    pthread_mutex_unlock(&finding);
    return RF_OK;
}

rf_status rf__torch_stream(const rf__place *place, rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const torch_cuda *cuda = NULL;
    RF_TRY(torch_cuda_get(&cuda));
    stream->device = place->index;
    RF__TORCH_TRY(cuda->current_stream(place->index, &stream->stream));
out:
    return status;
}

/* One allocation, and what came of it. */
typedef struct allocation {
    rf__place place;
    int64_t bytes;
    void *stream;
    AtenTensorHandle tensor;
    void *memory;
    rf_status status;
    char error[1024]; /* messages are a thread's own */
} allocation;

static rf_status allocate_on_stream(allocation *my) {
    rf_status status = RF_OK;
    const torch_cuda *cuda = NULL;
    const rf__cuda_driver *driver = NULL;
    stream_guard guard = NULL;
    RF_TRY(torch_cuda_get(&cuda));
    RF_TRY(rf__cuda_driver_get(&driver));
    /* Other threads may capture streams meanwhile. */
    (void)rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    RF__TORCH_TRY(cuda->create_stream_guard(my->stream, my->place.index, &guard));
    RF_TRY(rf__tensor_new(1, my->bytes, aoti_torch_dtype_uint8(), &my->place, &my->tensor, &my->memory));
out:
    if (guard != NULL) (void)cuda->delete_stream_guard(guard);
    return status;
}

static void *allocate_on_thread(void *context) {
    allocation *my = context;
    my->status = allocate_on_stream(my);
    if (my->status != RF_OK) snprintf(my->error, sizeof my->error, "%s", rf_last_error());
    return NULL;
}

/* The current thread may have a memory pool of its own for a while (torch.cuda.use_mem_pool, and the warm-up of
 * torch.compile(mode="reduce-overhead"), which raises if something stays in its pool). What outlives the call must not
 * come from there: so another thread asks, for the same stream. It is rare, and takes some 50 us. */
static rf_status allocate_lasting(allocation *my) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, allocate_on_thread, my) != 0)
        return rf__fail(RF_ERR_MEMORY, "no thread to allocate %lld bytes", (long long)my->bytes);
    pthread_join(thread, NULL);
    return my->status == RF_OK ? RF_OK : rf__fail(my->status, "%s", my->error);
}

static rf_status allocate(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **block) {
    rf_status status = RF_OK;
    allocation my = {
        .place = {(int32_t)(intptr_t)context, stream->device}, .bytes = bytes, .stream = stream->stream};
    if (lasts) {
        RF_TRY(allocate_lasting(&my));
    } else {
        RF_TRY(rf__tensor_new(1, bytes, aoti_torch_dtype_uint8(), &my.place, &my.tensor, &my.memory));
    }
    *memory = my.memory;
    *block = my.tensor;
out:
    if (status != RF_OK) rf__tensor_free(my.tensor);
    return status;
}

static void release(void *context, void *block) {
    (void)context;
    rf__tensor_free(block);
}

rf_cuda_allocator rf__torch_allocator(const rf__place *place) {
    return (rf_cuda_allocator){
        .context = (void *)(intptr_t)place->type, .allocate = allocate, .release = release};
}
