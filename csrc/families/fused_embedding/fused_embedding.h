/* Lookups of many features without pooling, lowered. */
#ifndef RECFUSE_CUDA_FUSED_EMBEDDING_H
#define RECFUSE_CUDA_FUSED_EMBEDDING_H

#include "gpu/launches/launches.h"

/* Lowers a call with checked params. RF_ERR_UNSUPPORTED: more features or slots than a kernel has. */
rf_status rf__fused_embedding_lower(const rf_fused_embedding_params *params, rf__launches *launches);

#endif
