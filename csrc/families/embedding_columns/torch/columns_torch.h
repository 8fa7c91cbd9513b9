/* Arguments that the operators of embedding columns share. */
#ifndef RECFUSE_TORCH_COLUMNS_H
#define RECFUSE_TORCH_COLUMNS_H

#include "gpu/driver/memory.h"
#include "families/embedding_columns/tensors/columns_inputs.h"
#include "torch/call.h"

/* Positions of an operator's arguments; -1: it has no such argument. */
typedef struct rf__columns_arguments {
    int weights, program, dense, values, offsets, value_weights, batch, bounds_check;
    int inputs; /* the number of a list of inputs, instead of tensors */
    int64_t gap; /* zero inputs after the dense ones, to be filled by the caller */
} rf__columns_arguments;

/* Copies nothing, so a tensor must be contiguous if its format has no strides: a copy of a batch or of
 * weights costs more than the call. RF_ERR_VALUE otherwise. */
rf_status rf__columns_contiguous_check(const rf__tensor *tensor);

/* The inputs of a call that rf__columns_read has read. */
static inline rf__columns_inputs *rf__columns_inputs_of(const rf__call *call) { return call->reference; }

/* Reads all arguments but the output into params, which points to rf__columns_inputs_of(call) and
 * call->scratch; the call's device is that of the tensors. */
rf_status rf__columns_read(rf__call *call, const rf__columns_arguments *at,
                           rf_embedding_columns_params *params);

/* As above, for an operator with one output, which it creates with the width `output_dim`. */
rf_status rf__columns_read_with_output(rf__call *call, const rf__columns_arguments *at, int output_dim,
                                       rf_embedding_columns_params *params);

/* A program at an address for a GPU: the caller's, or a copy of the call's. */
typedef struct rf__columns_program {
    const int64_t *words;
    rf_cuda_stream stream; /* of the call */
    rf_cuda_allocator allocator; /* torch's */
    rf__cuda_store store;
    rf__cuda_block copy; /* to release when the work is in the stream: rf__cuda_block_free */
} rf__columns_program;

/* `argument`: program_on_device, which may be None. A captured call has a resident copy. */
rf_status rf__columns_program_read(rf__call *call, int argument, const rf_embedding_columns_params *params,
                                   rf__columns_program *program);

#endif
