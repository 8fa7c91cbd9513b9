#define _GNU_SOURCE /* usleep */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DEVICES = 2, MOST_NAMES = 128, MOST_DEPTH = 16, INVALID_VALUE = 1, INVALID_CONTEXT = 201 };
enum { INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };
enum { CAPTURE_UNSUPPORTED = 900, MOST_FREED = 4096 };

struct CUctx_st {
    int ordinal;
};
struct CUstream_st {
    bool capturing;
};
struct CUmod_st {
    int ordinal;
};
struct CUevent_st {
    atomic_bool reached; /* waited for, since it was recorded */
};
struct CUfunc_st {
    struct CUmod_st *module;
    int dynamic_shared;
};

static struct CUctx_st contexts[DEVICES] = {{0}, {1}};
static struct CUstream_st capturing = {true};
static _Thread_local struct CUctx_st *stack[MOST_DEPTH];
static _Thread_local int depth;
static _Thread_local int capture_mode;

static _Thread_local fake_launch last_launch;
static _Thread_local fake_tensor_map last_map;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static struct {
    const char *name;
    int calls;
} counts[MOST_NAMES];
static pid_t started_in;
static struct {
    const char *name; /* NULL: no failure */
    void (*run)(void);
} hook;
static bool watching;
static struct {
    uintptr_t begin, end;
} freed[MOST_FREED];
static int n_freed;
static atomic_int live;
static atomic_bool busy;

static int *count_of(const char *name) {
    int i = 0;
    while (counts[i].name != NULL && strcmp(counts[i].name, name) != 0) i++;
    counts[i].name = name;
    return &counts[i].calls;
}

int fake_cuda_calls(const char *name) {
    pthread_mutex_lock(&lock);
    int calls = 0;
    if (name != NULL) calls = *count_of(name);
    for (int i = 0; name == NULL && counts[i].name != NULL; i++) calls += counts[i].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

const fake_launch *fake_cuda_last_launch(void) { return &last_launch; }

const fake_tensor_map *fake_cuda_last_tensor_map(void) { return &last_map; }

int fake_cuda_live(void) { return atomic_load(&live); }

int fake_cuda_depth(void) { return depth; }

rf__cu_stream fake_cuda_capturing_stream(void) { return &capturing; }

void fake_cuda_hook(const char *name, void (*run)(void)) {
    pthread_mutex_lock(&lock);
    hook.name = name;
    hook.run = run;
    pthread_mutex_unlock(&lock);
}

void fake_cuda_watch(void) {
    pthread_mutex_lock(&lock);
    watching = true;
    pthread_mutex_unlock(&lock);
}

void fake_cuda_busy(int is_busy) { atomic_store(&busy, is_busy); }

static void hook_run(const char *name) {
    void (*run)(void) = NULL;
    pthread_mutex_lock(&lock);
    if (hook.name != NULL && strcmp(hook.name, name) == 0) {
        run = hook.run;
        hook.name = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (run != NULL) run();
}

/* Keeps a block from being used again; whether it was told to. */
static bool quarantine(uintptr_t begin, size_t bytes) {
    pthread_mutex_lock(&lock);
    const bool kept = watching && n_freed < MOST_FREED;
    if (kept) {
        freed[n_freed].begin = begin;
        freed[n_freed++].end = begin + bytes;
    }
    pthread_mutex_unlock(&lock);
    return kept;
}

/* Returns true if one of the first words of a launch's argument points to freed memory. */
static bool uses_freed(void **arguments) {
    enum { WORDS = 11 }; /* no kernel of fused calls has fewer */
    bool any = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; watching && i < WORDS; i++) {
        uintptr_t word;
        memcpy(&word, (const char *)arguments[0] + i * sizeof word, sizeof word);
        for (int k = 0; k < n_freed; k++) any |= word >= freed[k].begin && word < freed[k].end;
    }
    pthread_mutex_unlock(&lock);
    return any;
}

rf__cu_result fake_cuda_call(const char *name) {
    hook_run(name);
    const char *fail = getenv("FAKE_CUDA_FAIL");
    char failing[64];
    int code = 0, times = -1;
    pthread_mutex_lock(&lock);
    const int before = (*count_of(name))++;
    const bool child = started_in != 0 && started_in != getpid();
    pthread_mutex_unlock(&lock);
    if (child) return RF__CU_ERROR_NOT_INITIALIZED;
    if (fail == NULL || sscanf(fail, "%63[^:]:%d:%d", failing, &code, &times) < 2) return RF__CU_SUCCESS;
    return strcmp(failing, name) == 0 && (times < 0 || before < times) ? code : RF__CU_SUCCESS;
}

#define CALL(name)                                          \
    do {                                                    \
        const rf__cu_result forced = fake_cuda_call(#name); \
        if (forced != RF__CU_SUCCESS) return forced;        \
    } while (0)
#define CALL_IN_CONTEXT(name)                   \
    do {                                        \
        CALL(name);                             \
        if (depth == 0) return INVALID_CONTEXT; \
    } while (0)

rf__cu_result cuInit(unsigned int flags) {
    CALL(cuInit);
    if (getenv("FAKE_CUDA_HELPER") != NULL) {
        usleep(100000); /* so that other threads wait for this thread */
        const pid_t helper = fork();
        if (helper == 0) _exit(0);
        waitpid(helper, NULL, 0);
    }
    pthread_mutex_lock(&lock);
    started_in = getpid();
    pthread_mutex_unlock(&lock);
    return flags == 0 ? RF__CU_SUCCESS : INVALID_VALUE;
}

rf__cu_result cuGetErrorName(rf__cu_result error, const char **name) {
    *name = error == RF__CU_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return RF__CU_SUCCESS;
}

rf__cu_result cuGetErrorString(rf__cu_result error, const char **text) {
    *text = NULL;
    if (error == 999) return INVALID_VALUE; /* not a result of the driver */
    *text = "a text of the fake";
    return RF__CU_SUCCESS;
}

rf__cu_result cuDeviceGetCount(int *count) {
    CALL(cuDeviceGetCount);
    *count = DEVICES;
    return RF__CU_SUCCESS;
}

rf__cu_result cuDeviceGet(rf__cu_device *device, int ordinal) {
    CALL(cuDeviceGet);
    *device = 10 + ordinal; /* a handle may differ from the ordinal */
    return ordinal < DEVICES ? RF__CU_SUCCESS : INVALID_DEVICE;
}

rf__cu_result cuDeviceGetName(char *name, int bytes, rf__cu_device device) {
    CALL(cuDeviceGetName);
    snprintf(name, (size_t)bytes, "Fake %d", device - 10);
    return RF__CU_SUCCESS;
}

rf__cu_result cuDeviceGetAttribute(int *value, rf__cu_device_attribute attribute, rf__cu_device device) {
    CALL(cuDeviceGetAttribute);
    *value = 1000 + attribute;
    if (attribute == RF__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = device == 10 ? 9 : 8;
    if (attribute == RF__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = 0;
    return RF__CU_SUCCESS;
}

rf__cu_result cuDevicePrimaryCtxRetain(rf__cu_context *context, rf__cu_device device) {
    CALL(cuDevicePrimaryCtxRetain);
    *context = &contexts[device - 10];
    return RF__CU_SUCCESS;
}

rf__cu_result cuCtxPushCurrent_v2(rf__cu_context context) {
    CALL(cuCtxPushCurrent_v2);
    if (depth == MOST_DEPTH) return INVALID_VALUE;
    stack[depth++] = context;
    return RF__CU_SUCCESS;
}

rf__cu_result cuCtxPopCurrent_v2(rf__cu_context *context) {
    CALL_IN_CONTEXT(cuCtxPopCurrent_v2);
    *context = stack[--depth];
    return RF__CU_SUCCESS;
}

rf__cu_result cuThreadExchangeStreamCaptureMode(rf__cu_capture_mode *mode) {
    CALL(cuThreadExchangeStreamCaptureMode);
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return RF__CU_SUCCESS;
}

/* As if another stream were always captured: calls outside of a graph need the relaxed mode. */
#define CALL_RELAXED(name)                                                                  \
    do {                                                                                    \
        CALL_IN_CONTEXT(name);                                                              \
        if (capture_mode != RF__CU_STREAM_CAPTURE_MODE_RELAXED) return CAPTURE_UNSUPPORTED; \
    } while (0)

rf__cu_result cuMemAlloc_v2(rf__cu_pointer *memory, size_t bytes) {
    CALL_RELAXED(cuMemAlloc_v2);
    enum { HEAD = 256 };
    char *block = malloc(HEAD + bytes);
    if (block == NULL) return RF__CU_ERROR_OUT_OF_MEMORY;
    memcpy(block, &bytes, sizeof bytes);
    memset(block + HEAD, 0xff, bytes);
    *memory = (rf__cu_pointer)(uintptr_t)(block + HEAD);
    atomic_fetch_add(&live, 1);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemFree_v2(rf__cu_pointer memory) {
    CALL_RELAXED(cuMemFree_v2); /* it may wait for the device */
    enum { HEAD = 256 };
    size_t bytes = 0;
    memcpy(&bytes, (const char *)(uintptr_t)memory - HEAD, sizeof bytes);
    if (!quarantine((uintptr_t)memory, bytes)) free((char *)(uintptr_t)memory - HEAD);
    atomic_fetch_sub(&live, 1);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags) {
    CALL_RELAXED(cuMemHostAlloc);
    if (flags != (RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP)) return INVALID_VALUE;
    *memory = malloc(bytes);
    if (*memory == NULL) return RF__CU_ERROR_OUT_OF_MEMORY;
    memset(*memory, 0xff, bytes);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemFreeHost(void *memory) {
    CALL_IN_CONTEXT(cuMemFreeHost);
    free(memory);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemHostGetDevicePointer_v2(rf__cu_pointer *on_device, void *memory, unsigned int flags) {
    CALL_IN_CONTEXT(cuMemHostGetDevicePointer_v2);
    *on_device = (rf__cu_pointer)(uintptr_t)memory;
    return flags == 0 ? RF__CU_SUCCESS : INVALID_VALUE;
}

rf__cu_result cuMemsetD8Async(rf__cu_pointer memory, unsigned char value, size_t count,
                              rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuMemsetD8Async);
    if (stream == &capturing) return CAPTURE_UNSUPPORTED;
    memset((void *)(uintptr_t)memory, value, count);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemsetD32Async(rf__cu_pointer memory, unsigned int value, size_t count,
                               rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuMemsetD32Async);
    if (stream == &capturing) return CAPTURE_UNSUPPORTED;
    /* Atomic, because a kernel of another stream may read the word at the same time. */
    for (size_t i = 0; i < count; i++)
        __atomic_store_n((unsigned int *)(uintptr_t)memory + i, value, __ATOMIC_SEQ_CST);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemcpyHtoDAsync_v2(rf__cu_pointer to, const void *from, size_t bytes, rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuMemcpyHtoDAsync_v2);
    if (stream == &capturing) return CAPTURE_UNSUPPORTED;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return RF__CU_SUCCESS;
}

rf__cu_result cuMemcpyDtoHAsync_v2(void *to, rf__cu_pointer from, size_t bytes, rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuMemcpyDtoHAsync_v2);
    if (stream == &capturing) return CAPTURE_UNSUPPORTED;
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return RF__CU_SUCCESS;
}

/* The caller waits, instead of the following work of the stream. */
rf__cu_result cuStreamWaitValue32_v2(rf__cu_stream stream, rf__cu_pointer word, uint32_t value,
                                     unsigned int flags) {
    CALL_IN_CONTEXT(cuStreamWaitValue32_v2);
    if (stream == &capturing || flags != RF__CU_STREAM_WAIT_VALUE_GEQ) return CAPTURE_UNSUPPORTED;
    while ((int32_t)(__atomic_load_n((uint32_t *)(uintptr_t)word, __ATOMIC_ACQUIRE) - value) < 0) usleep(20);
    return RF__CU_SUCCESS;
}

rf__cu_result cuStreamCreate(rf__cu_stream *stream, unsigned int flags) {
    CALL_RELAXED(cuStreamCreate);
    *stream = calloc(1, sizeof **stream);
    if (*stream == NULL) return RF__CU_ERROR_OUT_OF_MEMORY;
    atomic_fetch_add(&live, 1);
    return flags == RF__CU_STREAM_NON_BLOCKING ? RF__CU_SUCCESS : INVALID_VALUE;
}

rf__cu_result cuStreamDestroy_v2(rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuStreamDestroy_v2);
    free(stream);
    atomic_fetch_sub(&live, 1);
    return RF__CU_SUCCESS;
}

rf__cu_result cuStreamIsCapturing(rf__cu_stream stream, rf__cu_capture_status *status) {
    CALL_IN_CONTEXT(cuStreamIsCapturing);
    *status = stream != NULL && stream->capturing;
    return RF__CU_SUCCESS;
}

rf__cu_result cuStreamGetId(rf__cu_stream stream, unsigned long long *number) {
    CALL_IN_CONTEXT(cuStreamGetId);
    *number = stream == NULL ? 1 : (uintptr_t)stream;
    return RF__CU_SUCCESS;
}

rf__cu_result cuEventCreate(rf__cu_event *event, unsigned int flags) {
    CALL_IN_CONTEXT(cuEventCreate);
    *event = calloc(1, sizeof **event);
    if (*event == NULL) return RF__CU_ERROR_OUT_OF_MEMORY;
    return flags == 0 || flags == RF__CU_EVENT_DISABLE_TIMING ? RF__CU_SUCCESS : INVALID_VALUE;
}

rf__cu_result cuEventDestroy_v2(rf__cu_event event) {
    CALL_IN_CONTEXT(cuEventDestroy_v2);
    free(event);
    return RF__CU_SUCCESS;
}

rf__cu_result cuEventRecord(rf__cu_event event, rf__cu_stream stream) {
    CALL_IN_CONTEXT(cuEventRecord);
    (void)stream;
    atomic_store(&event->reached, false);
    return RF__CU_SUCCESS;
}

rf__cu_result cuEventSynchronize(rf__cu_event event) {
    CALL(cuEventSynchronize);
    atomic_store(&event->reached, true);
    return RF__CU_SUCCESS;
}

rf__cu_result cuEventQuery(rf__cu_event event) {
    CALL_RELAXED(cuEventQuery);
    return atomic_load(&busy) && !atomic_load(&event->reached) ? RF__CU_ERROR_NOT_READY : RF__CU_SUCCESS;
}

rf__cu_result cuLaunchKernelEx(const rf__cu_launch_config *config, rf__cu_function function, void **arguments,
                               void **extra) {
    CALL_IN_CONTEXT(cuLaunchKernelEx);
    enum { MOST_ATTRIBUTES = sizeof last_launch.attributes / sizeof last_launch.attributes[0] };
    (void)function, (void)extra;
    if (config->grid[0] == 0 || config->n_attributes > MOST_ATTRIBUTES) return INVALID_VALUE;
    last_launch.config = *config;
    if (config->n_attributes > 0)
        memcpy(last_launch.attributes, config->attributes, config->n_attributes * sizeof *config->attributes);
    memcpy(last_launch.first_word, arguments[0], sizeof last_launch.first_word);
    return uses_freed(arguments) ? ILLEGAL_ADDRESS : RF__CU_SUCCESS;
}

rf__cu_result cuTensorMapEncodeTiled(rf__cu_tensor_map *map, rf__cu_tensor_type type, unsigned int dimensions,
                                     void *data, const uint64_t *sizes, const uint64_t *pitches,
                                     const uint32_t *box, const uint32_t *steps,
                                     rf__cu_tensor_interleave interleave, rf__cu_tensor_swizzle swizzle,
                                     rf__cu_tensor_promotion promotion, rf__cu_tensor_fill fill) {
    CALL(cuTensorMapEncodeTiled);
    if ((uintptr_t)map % 64 != 0) return INVALID_VALUE;
    last_map = (fake_tensor_map){.type = type,
                                 .dimensions = (int)dimensions,
                                 .data = data,
                                 .interleave = interleave,
                                 .swizzle = swizzle,
                                 .promotion = promotion,
                                 .fill = fill};
    for (unsigned int i = 0; i < dimensions; i++) {
        last_map.sizes[i] = sizes[i];
        last_map.box[i] = box[i];
        last_map.steps[i] = steps[i];
        if (i + 1 < dimensions) last_map.pitches[i] = pitches[i];
    }
    memset(map, 1, sizeof *map);
    return RF__CU_SUCCESS;
}

rf__cu_result cuModuleLoadData(rf__cu_module *module, const void *image) {
    CALL_RELAXED(cuModuleLoadData);
    if (memcmp(image, "\177ELF", 4) != 0) return INVALID_IMAGE;
    *module = calloc(1, sizeof **module);
    if (*module == NULL) return RF__CU_ERROR_OUT_OF_MEMORY;
    atomic_fetch_add(&live, 1);
    (*module)->ordinal = stack[depth - 1]->ordinal;
    return RF__CU_SUCCESS;
}

rf__cu_result cuModuleUnload(rf__cu_module module) {
    CALL_IN_CONTEXT(cuModuleUnload);
    free(module);
    atomic_fetch_sub(&live, 1);
    return RF__CU_SUCCESS;
}

rf__cu_result cuModuleGetFunction(rf__cu_function *function, rf__cu_module module, const char *name) {
    static struct CUfunc_st functions[4096]; /* under the lock */
    static int used;                         /* under the lock */
    CALL_IN_CONTEXT(cuModuleGetFunction);
    if (strncmp(name, "rf_", 3) != 0) return NOT_FOUND;
    pthread_mutex_lock(&lock);
    *function = &functions[used++ % 4096];
    pthread_mutex_unlock(&lock);
    (*function)->module = module;
    return RF__CU_SUCCESS;
}

rf__cu_result cuFuncGetAttribute(int *value, rf__cu_function_attribute attribute, rf__cu_function function) {
    CALL_IN_CONTEXT(cuFuncGetAttribute);
    *value = 100 * function->module->ordinal + attribute;
    return RF__CU_SUCCESS;
}

rf__cu_result cuFuncSetAttribute(rf__cu_function function, rf__cu_function_attribute attribute, int value) {
    CALL_IN_CONTEXT(cuFuncSetAttribute);
    if (attribute != RF__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 232448)
        return INVALID_VALUE;
    function->dynamic_shared = value;
    return RF__CU_SUCCESS;
}
