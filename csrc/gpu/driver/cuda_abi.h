/* The functions of libcuda and of NVRTC that recfuse calls, declared by hand: the build needs neither.
 *
 * Both libraries are opened at run time (driver.h, nvrtc.h). One list per library serves the struct of its
 * function pointers, the look-up of their names and tests/c/test_cuda_abi.py, which compares every line,
 * struct and number with the installed cuda.h and nvrtc.h, if any.
 */
#ifndef RECFUSE_CUDA_ABI_H
#define RECFUSE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifndef RF__CUDA_LISTS_ONLY
#include "gpu/device/tensor_map_type.h"

typedef int rf__cu_result;
typedef int rf__cu_device;
typedef int rf__cu_device_attribute;
typedef int rf__cu_function_attribute;
typedef int rf__cu_capture_status;
typedef int rf__cu_capture_mode;
typedef int rf__cu_pointer_attribute;
typedef uint64_t rf__cu_pointer; /* an address on a device */
typedef struct CUctx_st *rf__cu_context;
typedef struct CUmod_st *rf__cu_module;
typedef struct CUfunc_st *rf__cu_function;
typedef struct CUstream_st *rf__cu_stream;
typedef struct CUevent_st *rf__cu_event;

typedef int rf__cu_tensor_type;
typedef int rf__cu_tensor_interleave;
typedef int rf__cu_tensor_swizzle;
typedef int rf__cu_tensor_promotion;
typedef int rf__cu_tensor_fill;

/* The description for a kernel's tensor copies: in a parameter of it (__grid_constant__), or in its
 * memory. */
typedef rf_tensor_map rf__cu_tensor_map;

typedef struct rf__cu_launch_attribute {
    int id; /* RF__CU_LAUNCH_ATTRIBUTE_... */
    int unused;
    union {
        int cooperative;
        unsigned int cluster[3];
        int programmatic_stream_serialization;
        char bytes[64];
        void *alignment;
    } value;
} rf__cu_launch_attribute;

typedef struct rf__cu_launch_config {
    unsigned int grid[3], block[3], shared_bytes;
    rf__cu_stream stream;
    rf__cu_launch_attribute *attributes; /* [n_attributes], may be NULL */
    unsigned int n_attributes;
} rf__cu_launch_config;

typedef int rf__nvrtc_result;
typedef struct _nvrtcProgram *rf__nvrtc_program;
#endif

/* X(name, number): the number of CU_name; here it is RF__CU_name. */
#define RF__CU_NUMBER_LIST(X)                                    \
    X(DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                 \
    X(DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 38)                        \
    X(DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 39)       \
    X(DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)             \
    X(DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)             \
    X(DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 81) \
    X(DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 82)     \
    X(DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97)    \
    X(DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 106)       \
    X(DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 111)    \
    X(FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1)                       \
    X(FUNC_ATTRIBUTE_NUM_REGS, 4)                                \
    X(FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8)           \
    X(STREAM_CAPTURE_STATUS_NONE, 0)                             \
    X(STREAM_CAPTURE_STATUS_INVALIDATED, 2)                      \
    X(STREAM_CAPTURE_MODE_RELAXED, 2)                            \
    X(STREAM_NON_BLOCKING, 1)                                    \
    X(POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                          \
    X(POINTER_ATTRIBUTE_DEVICE_POINTER, 3)                       \
    X(MEMORYTYPE_HOST, 1)                                        \
    X(STREAM_WAIT_VALUE_GEQ, 0)                                  \
    X(EVENT_DEFAULT, 0)                                          \
    X(EVENT_DISABLE_TIMING, 2)                                   \
    X(LAUNCH_ATTRIBUTE_COOPERATIVE, 2)                           \
    X(LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4)                     \
    X(LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 6)     \
    X(TENSOR_MAP_DATA_TYPE_FLOAT16, 6)                           \
    X(TENSOR_MAP_DATA_TYPE_FLOAT32, 7)                           \
    X(TENSOR_MAP_DATA_TYPE_BFLOAT16, 9)                          \
    X(TENSOR_MAP_INTERLEAVE_NONE, 0)                             \
    X(TENSOR_MAP_SWIZZLE_NONE, 0)                                \
    X(TENSOR_MAP_SWIZZLE_32B, 1)                                 \
    X(TENSOR_MAP_SWIZZLE_64B, 2)                                 \
    X(TENSOR_MAP_SWIZZLE_128B, 3)                                \
    X(TENSOR_MAP_L2_PROMOTION_L2_128B, 2)                        \
    X(TENSOR_MAP_L2_PROMOTION_L2_256B, 3)                        \
    X(TENSOR_MAP_FLOAT_OOB_FILL_NONE, 0)

/* As above, for CUDA_name and for CU_MEMHOSTALLOC_name. */
#define RF__CU_RESULT_LIST(X)   \
    X(SUCCESS, 0)               \
    X(ERROR_OUT_OF_MEMORY, 2)   \
    X(ERROR_NOT_INITIALIZED, 3) \
    X(ERROR_NO_DEVICE, 100)     \
    X(ERROR_NOT_READY, 600)     \
    X(ERROR_NOT_SUPPORTED, 801) \
    X(ERROR_STREAM_CAPTURE_INVALIDATED, 901)
#define RF__CU_HOST_MEMORY_LIST(X) \
    X(PORTABLE, 1)                 \
    X(DEVICEMAP, 2)

/* In every driver that recfuse works with. X(result, name, parameters) */
#define RF__CUDA_LIST(X)                                                                                \
    X(rf__cu_result, cuInit, (unsigned int flags))                                                      \
    X(rf__cu_result, cuGetErrorName, (rf__cu_result error, const char **name))                          \
    X(rf__cu_result, cuGetErrorString, (rf__cu_result error, const char **text))                        \
    /* devices and contexts */                                                                          \
    X(rf__cu_result, cuDeviceGetCount, (int *count))                                                    \
    X(rf__cu_result, cuDeviceGet, (rf__cu_device * device, int ordinal))                                \
    X(rf__cu_result, cuDeviceGetName, (char *name, int bytes, rf__cu_device device))                    \
    X(rf__cu_result, cuDeviceGetAttribute,                                                              \
      (int *value, rf__cu_device_attribute attribute, rf__cu_device device))                            \
    X(rf__cu_result, cuDevicePrimaryCtxRetain, (rf__cu_context * context, rf__cu_device device))        \
    X(rf__cu_result, cuDevicePrimaryCtxRelease_v2, (rf__cu_device device))                              \
    X(rf__cu_result, cuCtxPushCurrent_v2, (rf__cu_context context))                                     \
    X(rf__cu_result, cuCtxPopCurrent_v2, (rf__cu_context * context))                                    \
    X(rf__cu_result, cuCtxSynchronize, (void))                                                          \
    X(rf__cu_result, cuCtxResetPersistingL2Cache, (void))                                               \
    /* memory */                                                                                        \
    X(rf__cu_result, cuMemAlloc_v2, (rf__cu_pointer * memory, size_t bytes))                            \
    X(rf__cu_result, cuMemFree_v2, (rf__cu_pointer memory))                                             \
    X(rf__cu_result, cuMemHostAlloc, (void **memory, size_t bytes, unsigned int flags))                 \
    X(rf__cu_result, cuMemFreeHost, (void *memory))                                                     \
    X(rf__cu_result, cuMemHostGetDevicePointer_v2,                                                      \
      (rf__cu_pointer * on_device, void *memory, unsigned int flags))                                   \
    X(rf__cu_result, cuPointerGetAttributes,                                                            \
      (unsigned int count, rf__cu_pointer_attribute *attributes, void **values, rf__cu_pointer inside)) \
    X(rf__cu_result, cuMemsetD8Async,                                                                   \
      (rf__cu_pointer memory, unsigned char value, size_t count, rf__cu_stream stream))                 \
    X(rf__cu_result, cuMemsetD32Async,                                                                  \
      (rf__cu_pointer memory, unsigned int value, size_t count, rf__cu_stream stream))                  \
    X(rf__cu_result, cuMemcpyHtoDAsync_v2,                                                              \
      (rf__cu_pointer to, const void *from, size_t bytes, rf__cu_stream stream))                        \
    X(rf__cu_result, cuMemcpyDtoHAsync_v2,                                                              \
      (void *to, rf__cu_pointer from, size_t bytes, rf__cu_stream stream))                              \
    /* streams and events */                                                                            \
    X(rf__cu_result, cuStreamIsCapturing, (rf__cu_stream stream, rf__cu_capture_status * status))       \
    X(rf__cu_result, cuStreamCreate, (rf__cu_stream * stream, unsigned int flags))                      \
    X(rf__cu_result, cuStreamGetId, (rf__cu_stream stream, unsigned long long *number))                 \
    X(rf__cu_result, cuStreamDestroy_v2, (rf__cu_stream stream))                                        \
    X(rf__cu_result, cuThreadExchangeStreamCaptureMode, (rf__cu_capture_mode * mode))                   \
    X(rf__cu_result, cuStreamSynchronize, (rf__cu_stream stream))                                       \
    X(rf__cu_result, cuStreamWaitValue32_v2,                                                            \
      (rf__cu_stream stream, rf__cu_pointer word, uint32_t value, unsigned int flags))                  \
    X(rf__cu_result, cuEventCreate, (rf__cu_event * event, unsigned int flags))                         \
    X(rf__cu_result, cuEventDestroy_v2, (rf__cu_event event))                                           \
    X(rf__cu_result, cuEventRecord, (rf__cu_event event, rf__cu_stream stream))                         \
    X(rf__cu_result, cuEventSynchronize, (rf__cu_event event))                                          \
    X(rf__cu_result, cuEventQuery, (rf__cu_event event))                                                \
    X(rf__cu_result, cuEventElapsedTime, (float *milliseconds, rf__cu_event from, rf__cu_event to))     \
    /* kernels */                                                                                       \
    X(rf__cu_result, cuModuleLoadData, (rf__cu_module * module, const void *image))                     \
    X(rf__cu_result, cuModuleUnload, (rf__cu_module module))                                            \
    X(rf__cu_result, cuModuleGetFunction,                                                               \
      (rf__cu_function * function, rf__cu_module module, const char *name))                             \
    X(rf__cu_result, cuFuncGetAttribute,                                                                \
      (int *value, rf__cu_function_attribute attribute, rf__cu_function function))                      \
    X(rf__cu_result, cuFuncSetAttribute,                                                                \
      (rf__cu_function function, rf__cu_function_attribute attribute, int value))                       \
    X(rf__cu_result, cuLaunchKernelEx,                                                                  \
      (const rf__cu_launch_config *config, rf__cu_function function, void **arguments, void **extra))   \
    X(rf__cu_result, cuOccupancyMaxActiveClusters,                                                      \
      (int *clusters, rf__cu_function function, const rf__cu_launch_config *config))                    \
    X(rf__cu_result, cuTensorMapEncodeTiled,                                                            \
      (rf__cu_tensor_map * map, rf__cu_tensor_type type, unsigned int dimensions, void *data,           \
       const uint64_t *sizes, const uint64_t *pitches, const uint32_t *box, const uint32_t *steps,      \
       rf__cu_tensor_interleave interleave, rf__cu_tensor_swizzle swizzle,                              \
       rf__cu_tensor_promotion promotion, rf__cu_tensor_fill fill))

/* X(result, name, parameters) */
#define RF__NVRTC_LIST(X)                                                                   \
    X(const char *, nvrtcGetErrorString, (rf__nvrtc_result result))                         \
    X(rf__nvrtc_result, nvrtcCreateProgram,                                                 \
      (rf__nvrtc_program * program, const char *source, const char *name, int n_headers,    \
       const char *const *headers, const char *const *names))                               \
    X(rf__nvrtc_result, nvrtcDestroyProgram, (rf__nvrtc_program * program))                 \
    X(rf__nvrtc_result, nvrtcCompileProgram,                                                \
      (rf__nvrtc_program program, int n_options, const char *const *options))               \
    X(rf__nvrtc_result, nvrtcGetCUBINSize, (rf__nvrtc_program program, size_t *bytes))      \
    X(rf__nvrtc_result, nvrtcGetCUBIN, (rf__nvrtc_program program, char *cubin))            \
    X(rf__nvrtc_result, nvrtcGetProgramLogSize, (rf__nvrtc_program program, size_t *bytes)) \
    X(rf__nvrtc_result, nvrtcGetProgramLog, (rf__nvrtc_program program, char *log))

#ifndef RF__CUDA_LISTS_ONLY
enum {
#define RF__CU_NUMBER(name, number) RF__CU_##name = number,
#define RF__CU_HOST_MEMORY(name, number) RF__CU_MEMHOSTALLOC_##name = number,
    RF__CU_NUMBER_LIST(RF__CU_NUMBER) RF__CU_RESULT_LIST(RF__CU_NUMBER)
        RF__CU_HOST_MEMORY_LIST(RF__CU_HOST_MEMORY)
#undef RF__CU_NUMBER
#undef RF__CU_HOST_MEMORY
};

/* A member of a struct of function pointers. */
#define RF__CUDA_MEMBER(result, name, parameters) result(*name) parameters;
#endif

#endif
