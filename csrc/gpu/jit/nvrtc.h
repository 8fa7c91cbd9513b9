/* NVIDIA's run-time compiler, opened at run time. */
#ifndef RECFUSE_CUDA_NVRTC_H
#define RECFUSE_CUDA_NVRTC_H

#include "gpu/driver/cuda_abi.h"
#include "core/file.h"
#include "core/status.h"
#include "gpu/jit/source.h"

enum { RF__NVRTC_MOST_OPTIONS = 64 };

/* The path of NVRTC. Its version is taken from the name of its builtins, without which it cannot compile, so
 * a cached kernel is found without opening a library of 100 MB. */
typedef struct rf__nvrtc_library {
    char path[RF__PATH_BYTES], builtins[RF__PATH_BYTES];
    int32_t major, minor;
} rf__nvrtc_library;

/* The output of a compilation. */
typedef struct rf__nvrtc_output {
    void *cubin; /* [cubin_bytes] */
    int64_t cubin_bytes;
    char *log; /* text, with a zero at its end */
} rf__nvrtc_output;

/* Finds NVRTC, in this order: already in the process, the packages next to torch and next to this library,
 * CUDA_HOME, CUDA_PATH, /usr/local/cuda, the loader's search path. RF_ERR_UNSUPPORTED: not found; the message
 * has the places. A success is cached forever, a failure is not. */
RF__SHARED rf_status rf__nvrtc_find(const rf__nvrtc_library **library);
/* The search itself. */
rf_status rf__nvrtc_search(rf__nvrtc_library *library);

/* Compiles a file with options [n_options] to a cubin. On success `output` is the caller's to free, with the
 * function below. RF_ERR_COMPILE: it does not compile; the message has file, options and NVRTC's text. */
rf_status rf__nvrtc_compile(const char *file, const rf__source *source, const char *const *options,
                            int32_t n_options, rf__nvrtc_output *output);
void rf__nvrtc_output_free(rf__nvrtc_output *output);

/* Prevents the library of this handle from changing the program's signals, for the life of the process. The
 * caller must hold a lock. False: it calls signal() in an unknown way, and may take SIGINT and SIGTERM over
 * for a moment. */
bool rf__nvrtc_leave_signals(void *handle);

#endif
