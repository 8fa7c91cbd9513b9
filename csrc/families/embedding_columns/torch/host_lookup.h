/* Lookups of the columns whose tables are on the host, by threads of the library. A lookup outlives its call. */
#ifndef RECFUSE_TORCH_HOST_LOOKUP_H
#define RECFUSE_TORCH_HOST_LOOKUP_H

#include "families/embedding_columns/host/staging.h"
#include "families/embedding_columns/torch/columns_torch.h"

/* Opens messages about host columns, which are numbered by themselves; embedding_columns.py looks for it. */
#define RF__OF_HOST "of the columns whose tables are on the host"

/* The call of the host columns: its params, and the memory that they point to. */
typedef struct rf__host_columns {
    rf_embedding_columns_params params;
    rf__columns_inputs *inputs; /* a reference */
    void *buffers;
} rf__host_columns;

void rf__host_columns_free(const rf__host_columns *host);

/* Adds RF__OF_HOST to the message of a failure; returns `status`. */
rf_status rf__host_columns_status(rf_status status);

/* Returns the bytes of the pooled rows of the host columns. */
size_t rf__host_columns_bytes(const rf_embedding_columns_params *host);

/* Starts a lookup into a staging buffer, which the caller must release if *staging is set. `at`: the positions of
 * the host columns' arguments, whose memory stays until the lookup ends. Takes over `host` on success, and zeroes
 * it. */
rf_status rf__host_lookup_start(rf__call *call, const rf__columns_arguments *at, rf__host_columns *host,
                                const rf__cuda_device *device, void *stream, rf__staging **staging);

#endif
