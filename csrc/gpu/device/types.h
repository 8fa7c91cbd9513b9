/* Integers in structs that host C and the kernels both read. Kernels compiled by NVRTC have no <stdint.h>;
 * long long has 64 bits on both sides. Included as "gpu/device/types.h" on both. RF_INDEX and RF_OFFSET: the
 * types of indices and offsets that a kernel is compiled for; on the host pointers to either. */
#ifndef RECFUSE_CUDA_DEVICE_TYPES_H
#define RECFUSE_CUDA_DEVICE_TYPES_H

#ifdef __CUDACC__
typedef unsigned char rf_u8;
typedef unsigned short rf_u16;
typedef int rf_i32;
typedef unsigned int rf_u32;
typedef long long rf_i64;
typedef unsigned long long rf_u64;
#ifndef RF_INDEX
#define RF_INDEX rf_i64
#endif
#ifndef RF_OFFSET
#define RF_OFFSET rf_i64
#endif
#define RF_SIZE_IS(type, bytes) static_assert(sizeof(type) == (bytes), "the same on the host and in kernels")
#else
#include <stdint.h>
typedef uint8_t rf_u8;
typedef uint16_t rf_u16;
typedef int32_t rf_i32;
typedef uint32_t rf_u32;
typedef int64_t rf_i64;
typedef uint64_t rf_u64;
#define RF_INDEX void
#define RF_OFFSET void
#define RF_SIZE_IS(type, bytes) _Static_assert(sizeof(type) == (bytes), "the same on the host and in kernels")
#endif

#endif
