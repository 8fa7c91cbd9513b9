#include "gpu/jit/nvrtc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"

typedef struct nvrtc_functions {
    RF__NVRTC_LIST(RF__CUDA_MEMBER)
} nvrtc_functions;

/* Each is filled once, under the lock below, and then read without it. */
static rf__nvrtc_library opened;
static nvrtc_functions functions;
static bool is_open; /* under the lock */
static _Atomic(const rf__nvrtc_library *) in_use; /* atomic: &found, or NULL before */

/* The lock of finding and opening; taken inside a fork guard, so that a child finds it free. */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

rf_status rf__nvrtc_find(const rf__nvrtc_library **library) {
    *library = atomic_load_explicit(&in_use, memory_order_acquire);
    if (*library != NULL) return RF_OK;
    rf_status status = RF_OK;
    rf__fork_guard_begin();
    pthread_mutex_lock(&opening);
    if (atomic_load_explicit(&in_use, memory_order_relaxed) == NULL) {
        status = rf__nvrtc_search(&opened);
        if (status == RF_OK) atomic_store_explicit(&in_use, &opened, memory_order_release);
    }
    pthread_mutex_unlock(&opening);
    rf__fork_guard_end();
    if (status == RF_OK) *library = &opened;
    return status;
}

/* Both libraries of `library`, and the functions. The builtins first: NVRTC opens them by their bare name,
 * which the loader then has already. */
static rf_status nvrtc_open(const rf__nvrtc_library *library) {
    void *handle = NULL;
    if (dlopen(library->builtins, RTLD_NOW | RTLD_LOCAL) != NULL)
        handle = dlopen(library->path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *reason = dlerror();
        return rf__fail(RF_ERR_UNSUPPORTED, "NVRTC was found but does not load: %s",
                        reason != NULL ? reason : library->path);
    }
#define RF__LOOK_UP(result, name, parameters)         \
    *(void **)&functions.name = dlsym(handle, #name); \
    RF_FAIL_IF(functions.name == NULL, RF_ERR_UNSUPPORTED, "%s has no " #name, library->path);
    RF__NVRTC_LIST(RF__LOOK_UP)
#undef RF__LOOK_UP
    (void)rf__nvrtc_leave_signals(handle); /* compiling is possible all the same */
    return RF_OK;
}

static rf_status nvrtc_get(const nvrtc_functions **nvrtc) {
    const rf__nvrtc_library *library = NULL;
    rf_status status = RF_OK;
    RF_TRY(rf__nvrtc_find(&library));
    pthread_mutex_lock(&opening);
    if (!is_open) {
        status = nvrtc_open(library);
        is_open = status == RF_OK;
    }
    pthread_mutex_unlock(&opening);
    *nvrtc = &functions;
out:
    return status;
}

/* Returns the log, zero-terminated; NULL if out of memory. */
static char *log_of(const nvrtc_functions *nvrtc, rf__nvrtc_program program) {
    size_t bytes = 0;
    if (nvrtc->nvrtcGetProgramLogSize(program, &bytes) != 0) bytes = 0;
    char *log = calloc(1, bytes + 1);
    if (log != NULL && bytes > 0) (void)nvrtc->nvrtcGetProgramLog(program, log);
    return log;
}

static rf_status fail_compiling(const nvrtc_functions *nvrtc, rf__nvrtc_result result, const char *file,
                                const char *const *options, int32_t n_options, const char *log) {
    char text[1024] = "";
    size_t used = 0;
    for (int32_t i = 0; i < n_options && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, " %s", options[i]);
    return rf__fail(RF_ERR_COMPILE, "%s with%s does not compile (%s by NVRTC %d.%d, %s):\n%s", file, text,
                    nvrtc->nvrtcGetErrorString(result), (int)opened.major, (int)opened.minor, opened.path,
                    log != NULL ? log : "");
}

static rf_status compile(const nvrtc_functions *nvrtc, const char *file, const rf__source *source,
                         const char *const *options, int32_t n_options, rf__nvrtc_output *output) {
    rf_status status = RF_OK;
    rf__nvrtc_program program = NULL;
    rf__nvrtc_result result = 0;
    size_t bytes = 0;
    /* Results of NVRTC's own cache, on machines with a GPU, lack the report on registers. */
    const bool has_cache = opened.major > 12 || (opened.major == 12 && opened.minor >= 9);
    const char *all_options[RF__NVRTC_MOST_OPTIONS + 1];
    RF_FAIL_IF(n_options > RF__NVRTC_MOST_OPTIONS, RF_ERR_VALUE,
               "%s: the compiler has %d options; expected at most %d", file, (int)n_options,
               RF__NVRTC_MOST_OPTIONS);
    for (int32_t i = 0; i < n_options; i++) all_options[i] = options[i];
    all_options[n_options] = "--no-cache";
    result = nvrtc->nvrtcCreateProgram(&program, source->text, file, source->n_headers,
                                       (const char *const *)source->headers,
                                       (const char *const *)source->header_names);
    if (result == 0) {
        result = nvrtc->nvrtcCompileProgram(program, n_options + has_cache, all_options);
        output->log = log_of(nvrtc, program);
    }
    if (result == 0) result = nvrtc->nvrtcGetCUBINSize(program, &bytes);
    if (result != 0) {
        status = fail_compiling(nvrtc, result, file, options, n_options, output->log);
        goto out;
    }
    output->cubin = malloc(bytes);
    output->cubin_bytes = (int64_t)bytes;
    if (output->log == NULL || output->cubin == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for the %zu bytes that %s compiled to", bytes, file);
        goto out;
    }
    result = nvrtc->nvrtcGetCUBIN(program, output->cubin);
    if (result != 0 || bytes == 0)
        status = fail_compiling(nvrtc, result, file, options, n_options, output->log);
out:
    if (status != RF_OK) rf__nvrtc_output_free(output);
    if (program != NULL) (void)nvrtc->nvrtcDestroyProgram(&program);
    return status;
}

rf_status rf__nvrtc_compile(const char *file, const rf__source *source, const char *const *options,
                            int32_t n_options, rf__nvrtc_output *output) {
    const nvrtc_functions *nvrtc = NULL;
    memset(output, 0, sizeof *output);
    rf__fork_guard_begin();
    rf_status status = nvrtc_get(&nvrtc);
    if (status == RF_OK) status = compile(nvrtc, file, source, options, n_options, output);
    rf__fork_guard_end();
    return status;
}

void rf__nvrtc_output_free(rf__nvrtc_output *output) {
    free(output->cubin);
    free(output->log);
    memset(output, 0, sizeof *output);
}
