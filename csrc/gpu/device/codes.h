/* Codes that the host and kernels share, and the bytes of types. Included as "gpu/device/codes.h" on both sides. */
#ifndef RECFUSE_CUDA_DEVICE_CODES_H
#define RECFUSE_CUDA_DEVICE_CODES_H

#ifndef __CUDACC__
#include <stdbool.h>
#endif

#include "recfuse/codes.h"

#ifdef __CUDACC__
#define RF_CODES_FUNCTION static constexpr __device__ __forceinline__
#else
#define RF_CODES_FUNCTION static inline
#endif

/* Returns true for codes with a scale and a bias a row. */
RF_CODES_FUNCTION bool rf_is_quantized(int dtype) { return dtype == RF_INT8_ROWS || dtype == RF_INT4_ROWS; }
/* Returns the bits of an element of an rf_dtype: core/row_format.h and element.cuh have them from here. */
RF_CODES_FUNCTION int rf_element_bits(int dtype) {
    return dtype == RF_FLOAT32     ? 32
           : dtype == RF_FLOAT64   ? 64
           : dtype == RF_INT8_ROWS ? 8
           : dtype == RF_INT4_ROWS ? 4
                                   : 16;
}
/* Returns the bytes of an element of any dtype but int4. */
RF_CODES_FUNCTION int rf_element_bytes(int dtype) { return rf_element_bits(dtype) / 8; }
#undef RF_CODES_FUNCTION

#endif
