/* Codes of the public header that kernels are compiled with: X(name, number). Kernels have them from here,
 * and on the host each is held against <recfuse.h>. Included as "gpu/device/codes.h" on both sides. */
#ifndef RECFUSE_CUDA_DEVICE_CODES_H
#define RECFUSE_CUDA_DEVICE_CODES_H

#define RF_CODE_LIST(X)             \
    X(RF_FLOAT32, 0)                \
    X(RF_FLOAT16, 1)                \
    X(RF_BFLOAT16, 2)               \
    X(RF_FLOAT64, 3)                \
    X(RF_SUM, 0)                    \
    X(RF_MEAN, 1)                   \
    X(RF_MAX, 2)                    \
    X(RF_INT32, 0)                  \
    X(RF_INT64, 1)                  \
    X(RF_COLUMN_FLOAT32, 0)         \
    X(RF_COLUMN_INT32, 1)           \
    X(RF_COLUMN_INT64, 2)           \
    X(RF_COLUMN_AFFINE, 0)          \
    X(RF_COLUMN_LOG1P, 1)           \
    X(RF_COLUMN_CLIP, 2)            \
    X(RF_COLUMN_CAST, 3)            \
    X(RF_COLUMN_CLIP_INTEGER, 4)    \
    X(RF_COLUMN_MODULO, 5)          \
    X(RF_COLUMN_BUCKETIZE, 6)       \
    X(RF_COLUMN_BUCKETIZE_RIGHT, 7) \
    X(RF_COLUMN_HASH, 8)            \
    X(RF_COLUMN_VOCABULARY, 9)      \
    X(RF_COLUMN_SUM, 0)             \
    X(RF_COLUMN_MEAN, 1)            \
    X(RF_COLUMN_MAX, 2)             \
    X(RF_COLUMN_SQRTN, 3)           \
    X(RF_COLUMN_INVALID_ERROR, -2)  \
    X(RF_STATION_NONE, 1)           \
    X(RF_STATION_REGISTER, 2)       \
    X(RF_STATION_SHARED, 3)         \
    X(RF_STATION_LOCAL, 4)          \
    X(RF_STATION_L1, 5)             \
    X(RF_ACTIVATION_NONE, 0)        \
    X(RF_ACTIVATION_RELU, 1)        \
    X(RF_ACTIVATION_GELU, 2)        \
    X(RF_ACTIVATION_SILU, 3)        \
    X(RF_SGD, 0)                    \
    X(RF_ADAGRAD, 1)                \
    X(RF_ROWWISE_ADAGRAD, 2)        \
    X(RF_ADAM, 3)                   \
    X(RF_UPDATE_LR, 0)              \
    X(RF_UPDATE_WEIGHT_DECAY, 1)    \
    X(RF_UPDATE_EPS, 2)             \
    X(RF_UPDATE_BETA1, 3)           \
    X(RF_UPDATE_BETA2, 4)           \
    X(RF_UPDATE_STEP, 5)            \
    X(RF_UPDATE_GRAD_SCALE, 6)      \
    X(RF_UPDATE_SKIP, 7)            \
    X(RF_UPDATE_NUMBERS, 8)

#ifdef __CUDACC__
#define RF_CODE(name, number) name = number,
enum { RF_CODE_LIST(RF_CODE) };
#else
#include <recfuse.h>
#define RF_CODE(name, number) _Static_assert((name) == (number), "the same number as in recfuse.h");
RF_CODE_LIST(RF_CODE)
#endif
#undef RF_CODE

/* Returns the bytes of an element of an rf_dtype: core/row_format.h and element.cuh have them from here. */
#ifdef __CUDACC__
static constexpr __device__ __forceinline__ int rf_element_bytes(int dtype) {
#else
static inline int rf_element_bytes(int dtype) {
#endif
    return dtype == RF_FLOAT32 ? 4 : dtype == RF_FLOAT64 ? 8 : 2;
}

#endif
