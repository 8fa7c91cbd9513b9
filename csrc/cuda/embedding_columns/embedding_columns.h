/* Embedding columns on a GPU. */
#ifndef RECFUSE_CUDA_EMBEDDING_COLUMNS_H
#define RECFUSE_CUDA_EMBEDDING_COLUMNS_H

#include "base/columns.h"
#include "cuda/driver/device.h"
#include "cuda/embedding_columns/args.h"

/* A call as its kernels take it. */
typedef struct rf__columns_launch {
    rf__columns columns;
    int32_t units; /* of tensors that the kernel is compiled for */
    int32_t shared_bytes;
    uint32_t blocks;
} rf__columns_launch;

/* Checks a call, raises what earlier ones with these tables left, and fills in the launch of all tasks and its arguments. blocks 0: there is
 * nothing to do. `with_output`: of the forward; else tables and output are not looked at. */
rf_status rf__columns_prepare(const rf_embedding_columns_params *params, const int64_t *program_on_device,
                              bool with_output, const rf_cuda_stream *stream, const rf__cuda_device **device,
                              rf__columns_launch *launch, rf_columns_args *args);

/* How many lookups there are behind a call of rf_embedding_columns_lookups_cuda without indices: waits for the stream, which
 * must not be captured. */
rf_status rf__columns_lookups_count(const rf_cuda_stream *stream, const int64_t *last_offset, int64_t *count);

/* Compiles the kernels that most calls need; and those of their gradients. */
RF__SHARED rf_status rf__columns_compile(const char *arch);
RF__SHARED rf_status rf__columns_lookups_compile(const char *arch);

#endif
