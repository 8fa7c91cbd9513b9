/* The C functions of libtorch that recfuse calls, declared by hand: torch's own headers are C++.
 *
 * One list per kind serves this header, the stub library against which recfuse is linked (stub/) and
 * tests/c/test_torch_abi.py, which compares every line with the headers of the installed torch.
 * RF__TORCH_LIST: in every torch >= 2.11. RF__TORCH_NEWER_LIST: newer, so declared weak; test the address
 * before a call. All return 0 on success unless stated otherwise.
 */
#ifndef RECFUSE_TORCH_ABI_H
#define RECFUSE_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A value on the operator's stack: see values.h. */
typedef uint64_t StableIValue;
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct StringOpaque *StringHandle;
typedef void (*rf__boxed)(StableIValue *stack, uint64_t n_in, uint64_t n_out);
typedef void (*rf__parallel_body)(int64_t begin, int64_t end, void *context);

/* The version of torch whose encodings of values this code uses. */
#define RF__TORCH_BUILD_VERSION ((UINT64_C(2) << 56) | (UINT64_C(11) << 48))

/* dtype codes come from these functions instead of constants. X(name) */
#define RF__TORCH_DTYPE_LIST(X) \
    X(float32)                  \
    X(float16)                  \
    X(bfloat16)                 \
    X(int32)                    \
    X(int64)                    \
    X(float64)                  \
    X(int16)                    \
    X(int8)                     \
    X(uint8)                    \
    X(bool)                     \
    X(complex64)                \
    X(complex128)

/* X(result, name, parameters) */
#define RF__TORCH_LIST(X)                                                                                  \
    /* registration; the handles live as long as the process */                                            \
    X(int32_t, aoti_torch_library_init_def,                                                                \
      (const char *space, const char *file, uint32_t line, TorchLibraryHandle *library))                   \
    X(int32_t, aoti_torch_library_init_impl,                                                               \
      (const char *space, const char *key, const char *file, uint32_t line, TorchLibraryHandle *library))  \
    X(int32_t, aoti_torch_library_def, (TorchLibraryHandle library, const char *schema))                   \
    X(int32_t, torch_library_impl,                                                                         \
      (TorchLibraryHandle library, const char *name, rf__boxed function, uint64_t build_version))          \
    /* calls an operator by name: arguments on the stack, replaced by results */                           \
    X(int32_t, torch_call_dispatcher,                                                                      \
      (const char *name, const char *overload, StableIValue *stack, uint64_t build_version))               \
    /* lists and strings */                                                                                \
    X(int32_t, torch_list_size, (StableListHandle list, size_t *size))                                     \
    X(int32_t, torch_list_get_item, (StableListHandle list, size_t index, StableIValue *item))             \
    X(int32_t, torch_new_list_reserve_size, (size_t size, StableListHandle *list))                         \
    X(int32_t, torch_list_push_back, (StableListHandle list, StableIValue item))                           \
    X(int32_t, torch_delete_list, (StableListHandle list))                                                 \
    X(int32_t, torch_new_string_handle, (const char *data, size_t length, StringHandle *string))           \
    X(int32_t, torch_string_c_str, (StringHandle string, const char **data))                               \
    X(int32_t, torch_string_length, (StringHandle string, size_t *length))                                 \
    X(int32_t, torch_delete_string, (StringHandle string))                                                 \
    /* tensors; sizes, strides and data are borrowed */                                                    \
    X(int32_t, aoti_torch_is_defined, (AtenTensorHandle tensor, bool *is_defined))                         \
    X(int32_t, aoti_torch_get_dim, (AtenTensorHandle tensor, int64_t *dim))                                \
    X(int32_t, aoti_torch_get_sizes, (AtenTensorHandle tensor, int64_t **sizes))                           \
    X(int32_t, aoti_torch_get_strides, (AtenTensorHandle tensor, int64_t **strides))                       \
    X(int32_t, aoti_torch_get_dtype, (AtenTensorHandle tensor, int32_t *dtype))                            \
    X(int32_t, aoti_torch_get_device_type, (AtenTensorHandle tensor, int32_t *device_type))                \
    X(int32_t, aoti_torch_get_device_index, (AtenTensorHandle tensor, int32_t *device_index))              \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                         \
    X(int32_t, aoti_torch_device_type_cuda, (void))                                                        \
    X(int32_t, aoti_torch_get_storage_offset, (AtenTensorHandle tensor, int64_t *elements))                \
    X(int32_t, aoti_torch_get_storage_size, (AtenTensorHandle tensor, int64_t *bytes))                     \
    X(size_t, aoti_torch_dtype_element_size, (int32_t dtype))                                              \
    X(int32_t, torch_get_const_data_ptr, (AtenTensorHandle tensor, const void **data))                     \
    X(int32_t, torch_get_mutable_data_ptr, (AtenTensorHandle tensor, void **data))                         \
    X(int32_t, aoti_torch_empty_strided,                                                                   \
      (int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,      \
       int32_t device_index, AtenTensorHandle *tensor))                                                    \
    X(int32_t, aoti_torch_layout_strided, (void))                                                          \
    /* of existing memory; `deleter` is called on any thread when it is no longer needed */                \
    X(int32_t, torch_from_blob,                                                                            \
      (void *data, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset,      \
       int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle *tensor, int32_t layout, \
       const uint8_t *opaque_metadata, int64_t opaque_metadata_size,                                       \
       void (*deleter)(void *data, void *context), void *deleter_context))                                 \
    X(int32_t, aoti_torch__reinterpret_tensor,                                                             \
      (AtenTensorHandle self, int64_t dim, const int64_t *sizes, const int64_t *strides,                   \
       int64_t more_offset, AtenTensorHandle *view))                                                       \
    X(int32_t, aoti_torch_copy_, (AtenTensorHandle self, AtenTensorHandle source, int32_t non_blocking))   \
    X(int32_t, aoti_torch_delete_tensor_object, (AtenTensorHandle tensor))                                 \
    /* threads; the body must not throw */                                                                 \
    X(int32_t, torch_parallel_for,                                                                         \
      (int64_t begin, int64_t end, int64_t grain, rf__parallel_body body, void *context))                  \
    X(int32_t, torch_get_num_threads, (uint32_t *threads))                                                 \
    X(void, aoti_torch_warn, (const char *function, const char *file, uint32_t line, const char *message)) \
    /* throws a C++ exception with `message` unless `condition` */                                         \
    X(void, aoti_torch_check,                                                                              \
      (bool condition, const char *function, const char *file, uint32_t line, const char *message))

/* Since torch 2.13. X(result, name, parameters) */
#define RF__TORCH_NEWER_LIST(X)                                    \
    X(int32_t, torch_new_stable_ivalue, (StableIValue * *value))   \
    X(int32_t, torch_delete_stable_ivalue, (StableIValue * value)) \
    /* text of this thread's last failure inside libtorch */       \
    X(const char *, torch_exception_get_what_without_backtrace, (void))

/* In libtorch_cuda, which may be absent: looked up at run time (cuda.c). Handles are borrowed, NULL is None.
 * X(result, name, parameters) */
#define RF__TORCH_CUDA_LIST(X)                                                                         \
    X(int32_t, aoti_torch_cuda__efficient_attention_forward,                                           \
      (AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle * bias,  \
       AtenTensorHandle * cu_seqlens_q, AtenTensorHandle * cu_seqlens_k, int64_t *max_seqlen_q,        \
       int64_t *max_seqlen_k, double dropout_p, int64_t custom_mask_type, int32_t compute_log_sumexp,  \
       double *scale, AtenTensorHandle *seqlen_k, int64_t *window_size, AtenTensorHandle *output,      \
       AtenTensorHandle *logsumexp, AtenTensorHandle *seed, AtenTensorHandle *offset, int64_t *most_q, \
       int64_t *most_k))

#ifndef RF__TORCH_LISTS_ONLY
#define RF__TORCH_DECLARE(result, name, parameters) result name parameters;
#define RF__TORCH_DECLARE_WEAK(result, name, parameters) __attribute__((weak)) result name parameters;
#define RF__TORCH_DECLARE_DTYPE(name) int32_t aoti_torch_dtype_##name(void);
RF__TORCH_LIST(RF__TORCH_DECLARE)
RF__TORCH_NEWER_LIST(RF__TORCH_DECLARE_WEAK)
RF__TORCH_DTYPE_LIST(RF__TORCH_DECLARE_DTYPE)

/* name_type: the type of such a function. */
#define RF__TORCH_TYPE(result, name, parameters) typedef result name##_type parameters;
RF__TORCH_CUDA_LIST(RF__TORCH_TYPE)

/* The C++ operators new and delete of libtorch's runtime: they hold boxed optionals on torch < 2.13. */
__attribute__((weak)) void *rf__cxx_new(size_t bytes) __asm__("_Znwm");
__attribute__((weak)) void rf__cxx_delete(void *memory) __asm__("_ZdlPv");
#endif

#endif
