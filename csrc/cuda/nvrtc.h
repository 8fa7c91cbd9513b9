/* NVIDIA's run-time compiler, found and opened at run time. */
#ifndef RECFUSE_CUDA_NVRTC_H
#define RECFUSE_CUDA_NVRTC_H

#include "cuda/abi.h"
#include "status.h"

enum { RF__NVRTC_PATH_BYTES = 1024 };

/* Where NVRTC is. */
typedef struct rf__nvrtc_place {
    char path[RF__NVRTC_PATH_BYTES];
    int32_t major, minor;
} rf__nvrtc_place;

/* What is compiled. */
typedef struct rf__nvrtc_input {
    const char *name;           /* of the file, for messages */
    const char *source;
    const char *const *headers; /* [n_headers] their texts */
    const char *const *header_names; /* [n_headers] as #include has them */
    int32_t n_headers;
    const char *const *options; /* [n_options] */
    int32_t n_options;
} rf__nvrtc_input;

/* Finds NVRTC without opening it where its files tell the version. RF_ERR_UNSUPPORTED: not found; the
 * message says where it was looked for. Found once, kept for ever; not finding it is not remembered. */
rf_status rf__nvrtc_find(const rf__nvrtc_place **place);

/* Compiles to a cubin. On success *cubin [*cubin_bytes] and *log, with a zero at its end, are the caller's
 * to free; on failure *log may be NULL. RF_ERR_INTERNAL: it does not compile; the message is NVRTC's text. */
rf_status rf__nvrtc_compile(const rf__nvrtc_input *input, void **cubin, int64_t *cubin_bytes, char **log);

#endif
