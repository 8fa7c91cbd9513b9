/* What the operators of embedding columns read alike. */
#ifndef RECFUSE_TORCH_COLUMNS_H
#define RECFUSE_TORCH_COLUMNS_H

#include "gpu/driver/memory.h"
#include "torch/call.h"

/* Where the arguments stand that they have; -1 where one does not. */
typedef struct rf__columns_arguments {
    int weights, program, dense, values, offsets, value_weights, batch, bounds_check;
    int inputs; /* the number of a list of inputs, in the place of tensors */
    int64_t gap; /* inputs behind the dense ones that are left empty for the caller */
} rf__columns_arguments;

/* Reads all but the output into params; the call's device is that of the tensors. */
rf_status rf__columns_read(rf__call *call, const rf__columns_arguments *at,
                           rf_embedding_columns_params *params);

/* The same of an operator with one output, which is made, as wide as the argument `output_dim` says. */
rf_status rf__columns_read_with_output(rf__call *call, const rf__columns_arguments *at, int output_dim,
                                       rf_embedding_columns_params *params);

/* A program where a GPU reads it: the caller's, or a copy of the call's. */
typedef struct rf__columns_program {
    const int64_t *words;
    rf_cuda_stream stream; /* of the call */
    rf_cuda_allocator allocator; /* torch's */
    rf__cuda_store store;
    rf__cuda_block copy; /* to be given back when the work is in the stream: rf__cuda_block_free */
} rf__columns_program;

/* `argument`: program_on_device, which may be None. A captured call has a copy that lasts. */
rf_status rf__columns_program_read(rf__call *call, int argument, const rf_embedding_columns_params *params,
                                   rf__columns_program *program);

#endif
