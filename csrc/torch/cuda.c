/* torch's CUDA part, in a library that may be absent. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "gpu/driver/device.h"
#include "torch/call.h"

typedef struct CUDAStreamGuardOpaque *stream_guard;

/* The functions called there. */
typedef struct torch_cuda {
    int32_t (*current_stream)(int32_t device, void **stream);
    int32_t (*create_stream_guard)(void *stream, int32_t device, stream_guard *guard);
    int32_t (*delete_stream_guard)(stream_guard guard);
    aoti_torch_cuda__efficient_attention_forward_type *efficient_attention; /* NULL if absent */
} torch_cuda;

/* Written under the lock, and read only after `is_loaded` is set. */
static torch_cuda functions;
static atomic_bool is_loaded; /* atomic */
static pthread_mutex_t finding =
    PTHREAD_MUTEX_INITIALIZER; /* the lock; a child finds it free, since no one forks in it */

static rf_status torch_cuda_get(const torch_cuda **cuda) {
    *cuda = &functions;
    if (atomic_load_explicit(&is_loaded, memory_order_acquire)) return RF_OK;
    torch_cuda loaded = {NULL, NULL, NULL, NULL};
    /* A tensor on a GPU exists, so torch has loaded it. */
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) {
        *(void **)&loaded.current_stream = dlsym(library, "aoti_torch_get_current_cuda_stream");
        *(void **)&loaded.create_stream_guard = dlsym(library, "aoti_torch_create_cuda_stream_guard");
        *(void **)&loaded.delete_stream_guard = dlsym(library, "aoti_torch_delete_cuda_stream_guard");
        *(void **)&loaded.efficient_attention =
            dlsym(library, "aoti_torch_cuda__efficient_attention_forward");
    }
    RF_FAIL_IF(loaded.current_stream == NULL || loaded.create_stream_guard == NULL ||
                   loaded.delete_stream_guard == NULL,
               RF_ERR_UNSUPPORTED,
               "this torch has no CUDA streams that recfuse can find (libtorch_cuda.so with "
               "aoti_torch_get_current_cuda_stream). Install a CUDA build of torch 2.11 or newer, or move "
               "the tensors to the CPU.");
    pthread_mutex_lock(&finding);
    if (!atomic_load_explicit(&is_loaded, memory_order_relaxed)) functions = loaded;
    atomic_store_explicit(&is_loaded, true, memory_order_release);
    pthread_mutex_unlock(&finding);
    return RF_OK;
}

bool rf__call_on_cpu(const rf__call *call) {
    return rf__device_is_cpu(call->device) && rf__cuda_described_gpu() == NULL;
}

bool rf__call_is_explained(const rf__call *call) {
    return rf__device_is_cpu(call->device) && rf__cuda_described_gpu() != NULL;
}

int32_t rf__call_gpu(const rf__call *call) {
    return rf__device_is_cpu(call->device) ? RF__CUDA_DESCRIBED : call->device.index;
}

rf_status rf__call_stream(const rf__call *call, rf_cuda_stream *stream) {
    const torch_cuda *cuda = NULL;
    *stream = (rf_cuda_stream){.device = rf__call_gpu(call)};
    if (stream->device == RF__CUDA_DESCRIBED) return RF_OK;
    RF_CHECK(torch_cuda_get(&cuda));
    RF__TORCH_CHECK(cuda->current_stream(stream->device, &stream->stream));
    return RF_OK;
}

rf_status rf__call_efficient_attention(aoti_torch_cuda__efficient_attention_forward_type **function) {
    const torch_cuda *cuda = NULL;
    RF_CHECK(torch_cuda_get(&cuda));
    RF_FAIL_IF(cuda->efficient_attention == NULL, RF_ERR_UNSUPPORTED,
               "this torch has no memory-efficient attention that recfuse can find (libtorch_cuda.so with "
               "aoti_torch_cuda__efficient_attention_forward). Use float16 or bfloat16, or the CPU.");
    *function = cuda->efficient_attention;
    return RF_OK;
}

/* An allocation and its result. */
typedef struct allocation {
    rf__torch_device device;
    int64_t bytes;
    void *stream;
    AtenTensorHandle tensor;
    void *memory;
    rf_status status;
    char error[1024]; /* messages are a thread's own */
} allocation;

static rf_status allocate_bytes(allocation *request) {
    return rf__tensor_new(1, &request->bytes, aoti_torch_dtype_uint8(), request->device, &request->tensor,
                          &request->memory);
}

static rf_status allocate_on_stream(allocation *request) {
    const torch_cuda *cuda = NULL;
    const rf__cuda_driver *driver = NULL;
    stream_guard guard = NULL;
    RF_CHECK(torch_cuda_get(&cuda));
    RF_CHECK(rf__cuda_driver_get(&driver));
    /* Other threads may be capturing streams. */
    (void)rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    RF__TORCH_CHECK(cuda->create_stream_guard(request->stream, request->device.index, &guard));
    const rf_status status = allocate_bytes(request);
    (void)cuda->delete_stream_guard(guard);
    return status;
}

static void *allocate_on_thread(void *context) {
    allocation *request = context;
    request->status = allocate_on_stream(request);
    if (request->status != RF_OK) snprintf(request->error, sizeof request->error, "%s", rf_last_error());
    return NULL;
}

/* The current thread may temporarily have its own memory pool (torch.cuda.use_mem_pool, and the warm-up of
 * torch.compile(mode="reduce-overhead"), which raises if memory stays in its pool). Memory that outlives the
 * call must not come from there, so another thread allocates it for the same stream. This is rare, and takes
 * about 50 us. */
static rf_status allocate_lasting(allocation *request) {
    pthread_t thread;
    RF_FAIL_IF(pthread_create(&thread, NULL, allocate_on_thread, request) != 0, RF_ERR_MEMORY,
               "no thread to allocate %lld bytes", (long long)request->bytes);
    pthread_join(thread, NULL);
    return request->status == RF_OK ? RF_OK : rf__fail(request->status, "%s", request->error);
}

static rf_status allocate(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **block) {
    allocation request = {
        .device = {(int32_t)(intptr_t)context, stream->device}, .bytes = bytes, .stream = stream->stream};
    const rf_status status = lasts ? allocate_lasting(&request) : allocate_bytes(&request);
    if (status != RF_OK) rf__tensor_free(request.tensor);
    *memory = request.memory;
    *block = request.tensor;
    return status;
}

static void release(void *context, void *block) {
    (void)context;
    rf__tensor_free(block);
}

rf_cuda_allocator rf__call_allocator(const rf__call *call) {
    return (rf_cuda_allocator){
        .context = (void *)(intptr_t)call->device.type, .allocate = allocate, .release = release};
}
