/* Arguments that several operators share; what is wrong with one names what is allowed. */
#ifndef RECFUSE_TORCH_ARGUMENTS_H
#define RECFUSE_TORCH_ARGUMENTS_H

#include "torch/call.h"

rf_status rf__call_bounds_check(rf__call *call, int argument, bool *check);
rf_status rf__call_prefetch_distance(rf__call *call, int argument, int32_t *distance);
/* per_sample_weights [lookups] as contiguous float32; NULL: there are none. */
rf_status rf__call_sample_weights(rf__call *call, int argument, int64_t lookups, const float **weights);

/* Of fused calls. features: int64 [features, 7], on the CPU whichever device pools: the host plans by them. */
rf_status rf__fused_features_read(rf__call *call, int argument, const rf_feature **features,
                                  int64_t *n_features);
/* weights, and the type of the output: theirs where they agree, else float32. They are the call's scratch, with *columns
 * for rf__check_fused_rows behind them. */
rf_status rf__fused_weights_read(rf__call *call, int argument, const int64_t **columns,
                                 rf_fused_embedding_bag_params *params);
/* indices and offsets of a call whose features are read. */
rf_status rf__fused_lookups_read(rf__call *call, int indices, int offsets,
                                 rf_fused_embedding_bag_params *params);
/* grad: [bags, columns] of any float type, contiguous. */
rf_status rf__fused_grad_read(rf__call *call, int argument, int64_t bags, rf__tensor *grad, rf_dtype *dtype);

#endif
