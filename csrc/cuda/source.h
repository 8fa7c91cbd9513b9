/* The texts of kernels: files in the folder kernels/ beside the shared object that this code is in. */
#ifndef RECFUSE_CUDA_SOURCE_H
#define RECFUSE_CUDA_SOURCE_H

#include <stddef.h>

#include "status.h"

enum { RF__MOST_HEADERS = 16 };

typedef struct rf__source {
    char *text;
    char *headers[RF__MOST_HEADERS]; /* texts of all *.cuh files of the folder, in the order of their names */
    char *header_names[RF__MOST_HEADERS];
    int32_t n_headers;
} rf__source;

/* Reads `file` and the headers; on success `source` is the caller's to free, with the function below.
 * RF_ERR_INTERNAL: a file is missing, with its path. */
rf_status rf__source_read(const char *file, rf__source *source);
void rf__source_free(rf__source *source);

#endif
