/* What features are like for a kernel, and what no GPU does. */
#ifndef RECFUSE_CUDA_FUSED_GEOMETRY_H
#define RECFUSE_CUDA_FUSED_GEOMETRY_H

#include "base/status.h"
#include "fused_embedding_bag/args.h"

/* What a feature's rows are like, for a kernel. */
typedef struct rf__fused_geometry {
    int32_t dtype, align, store; /* bytes of a vector; that its place in the output is aligned to */
    int32_t lanes, vectors; /* that read a row, and how often each */
    int32_t slices; /* of a row that is wider */
    int32_t columns; /* vectors of a row */
    int32_t row_bytes;
    int32_t pooling, is_padded;
} rf__fused_geometry;

/* The geometry of one feature. Of the weight's and the output's addresses only the alignment matters. */
RF__SHARED rf_status rf__fused_geometry_of(const rf_fused_embedding_bag_params *params, int64_t feature,
                                           rf__fused_geometry *shape);
/* RF_ERR_UNSUPPORTED: more bags, features or columns than a GPU call may have. */
rf_status rf__fused_check_limits(const rf_fused_embedding_bag_params *params);

#endif
