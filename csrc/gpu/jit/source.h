/* The texts of kernels: files in kernels/ next to this library, which is csrc in a source tree. */
#ifndef RECFUSE_CUDA_SOURCE_H
#define RECFUSE_CUDA_SOURCE_H

#include <stddef.h>

#include "core/status.h"

enum { RF__MOST_HEADERS = 32 };

/* A kernel's file and its include closure: the files that it includes by `#include "NAME"`, and those that
 * these include. So an edit of one family leaves the compiled kernels of the others valid. */
typedef struct rf__source {
    char *text;
    char *headers[RF__MOST_HEADERS]; /* texts, in the order in which the includes are met */
    char *header_names[RF__MOST_HEADERS]; /* as in the #include line: a path in kernels/ */
    int32_t n_headers;
} rf__source;

/* Reads `file`, a path under kernels/, and its closure; on success `source` is the caller's to free, with the
 * function below. RF_ERR_INTERNAL: a file is missing, with its path. RF_ERR_MEMORY; RF_ERR_COMPILE: too many
 * files are open. */
rf_status rf__source_read(const char *file, rf__source *source);
void rf__source_free(rf__source *source);

#endif
