/* Sparse gradients as tensors. */
#ifndef RECFUSE_TORCH_GRADIENT_LIST_H
#define RECFUSE_TORCH_GRADIENT_LIST_H

#include "torch/arguments.h"

/* The tensors that list a sparse gradient, which are to be freed: rows [count], or of 2 dimensions [1, count]. */
typedef struct rf__gradient_list {
    rf__call *call;
    const rf_fused_backward_params *params;
    int64_t row_dims; /* 1 or 2 */
    AtenTensorHandle rows, values;
} rf__gradient_list;
/* Makes them, as rf_sparse_output has it: the context is an rf__gradient_list. */
rf_status rf__gradient_list_new(void *context, int64_t count, int64_t **rows, void **values);
void rf__gradient_list_free(const rf__gradient_list *list);

#endif
