/* Arguments that the operators of fused calls share. */
#ifndef RECFUSE_TORCH_FUSED_ARGUMENTS_H
#define RECFUSE_TORCH_FUSED_ARGUMENTS_H

#include "torch/arguments.h"

/* features: int64 [features, 7], on the CPU for any device, because the host plans by
 * them. */
rf_status rf__fused_features_read(rf__call *call, int argument, const rf_feature **features,
                                  int64_t *n_features);
/* Reads a weight of floats. *dim: columns, -1 for a weight of one dimension. */
rf_status rf__fused_weight_read(const char *argument, AtenTensorHandle handle, rf__torch_device device,
                                rf_buffer *buffer, int64_t *dim);
/* Reads weights, and the type of the output: theirs if they agree, else float32. They are the call's scratch,
 * followed by *columns for rf__check_fused_rows. */
rf_status rf__fused_weights_read(rf__call *call, int argument, const int64_t **columns,
                                 rf_fused_embedding_bag_params *params);
/* As above, of a call with quantised tables: argument `weights`, then their parameters, and `stored`. Leaves
 * the type of the output. */
rf_status rf__fused_quantized_weights_read(rf__call *call, int weights, int stored, const int64_t **columns,
                                           rf_fused_embedding_bag_params *params);
/* Runs a call whose arguments `schedules`, warps and mapping follow each other. */
rf_status rf__fused_pool(rf__call *call, int schedules, const rf_fused_embedding_bag_params *params,
                         const int64_t *columns);
/* Reads indices and offsets of a call whose features are read. `bags` per feature, if known (else -1): then
 * offsets of one feature on the CPU may lack the last one, which is the number of indices. */
rf_status rf__fused_lookups_read(rf__call *call, int indices, int offsets, int64_t bags,
                                 rf_fused_embedding_bag_params *params);
/* grad: [bags, columns] of any float type, contiguous. */
rf_status rf__fused_grad_read(rf__call *call, int argument, int64_t bags, rf__tensor *grad, rf_dtype *dtype);
/* int64 of the shape of grad, contiguous; NULL if absent. */
rf_status rf__call_winners(rf__call *call, int argument, const rf__tensor *grad, const int64_t **winners);

#endif
