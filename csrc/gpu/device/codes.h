/* Codes that the host and kernels share, and the bytes of types. Included as "gpu/device/codes.h" on both sides. */
#ifndef RECFUSE_CUDA_DEVICE_CODES_H
#define RECFUSE_CUDA_DEVICE_CODES_H

#include "recfuse/codes.h"

/* Returns the bytes of an element of an rf_dtype: core/row_format.h and element.cuh have them from here. */
#ifdef __CUDACC__
static constexpr __device__ __forceinline__ int rf_element_bytes(int dtype) {
#else
static inline int rf_element_bytes(int dtype) {
#endif
    return dtype == RF_FLOAT32 ? 4 : dtype == RF_FLOAT64 ? 8 : 2;
}

#endif
