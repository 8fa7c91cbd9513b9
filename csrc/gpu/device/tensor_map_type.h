/* A tensor map (CUtensorMap), which the host encodes (gpu/driver/tensor_map.h) and a kernel gets as a part of
 * its argument, which is then declared __grid_constant__. */
#ifndef RECFUSE_CUDA_DEVICE_TENSOR_MAP_H
#define RECFUSE_CUDA_DEVICE_TENSOR_MAP_H

#include "gpu/device/types.h"

#ifdef __CUDACC__
typedef struct __align__(128) rf_tensor_map {
    rf_u64 opaque[16];
} rf_tensor_map;
#else
typedef struct rf_tensor_map {
    _Alignas(128) rf_u64 opaque[16];
} rf_tensor_map;
#endif
RF_SIZE_IS(rf_tensor_map, 128);

#endif
