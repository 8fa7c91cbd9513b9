/* Embedding columns on a GPU, lowered. */
#ifndef RECFUSE_CUDA_EMBEDDING_COLUMNS_H
#define RECFUSE_CUDA_EMBEDDING_COLUMNS_H

#include "families/embedding_columns/program/columns_program.h"
#include "families/embedding_columns/columns_args.h"
#include "gpu/launches/launches.h"

/* The launch of all tasks of a call. */
typedef struct rf__columns_launch {
    int32_t units; /* of tensors, for which the kernel is compiled */
    int32_t shared_bytes;
    uint32_t blocks; /* 0: no work */
    int64_t n_tables;
    bool has_bags;
    int64_t read_bytes; /* of inputs and the program */
} rf__columns_launch;

/* Checks a call, and fills in the launch of all tasks, its arguments and the call's error word.
 * `with_output`: of the forward pass; otherwise tables and output are not read. `args`: unused tensors are
 * not written. */
rf_status rf__columns_prepare(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                              const int64_t *program_on_device, bool with_output, rf__launches *launches,
                              rf__columns_launch *launch, rf_columns_args *args);

rf_status rf__embedding_columns_lower(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                                      const int64_t *program_on_device, rf__launches *launches);
rf_status rf__columns_lookups_lower(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                                    const int64_t *program_on_device,
                                    const rf_embedding_columns_lookups *lookups, rf__launches *launches);

/* Sets *count to the number of lookups of a previous call of rf_embedding_columns_lookups_cuda without
 * indices. Waits for the stream, which must not be captured. Of a described device 0. */
rf_status rf__columns_lookups_count(const rf_cuda_stream *stream, const int64_t *last_offset, int64_t *count);

#endif
