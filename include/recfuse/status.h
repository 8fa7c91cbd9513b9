/* Errors: a call returns a status, and its detail is stored for the thread. */
#ifndef RECFUSE_API_STATUS_H
#define RECFUSE_API_STATUS_H

#if defined(__GNUC__)
#define RF_API __attribute__((visibility("default")))
#else
#define RF_API
#endif

#ifdef __cplusplus
#define RF_BEGIN_DECLARATIONS extern "C" {
#define RF_END_DECLARATIONS }
#else
#define RF_BEGIN_DECLARATIONS
#define RF_END_DECLARATIONS
#endif

RF_BEGIN_DECLARATIONS

/* The list of statuses: code, Python exception (Python's own, or of recfuse.errors), text. Memory is the
 * host's, device memory a GPU's. Internal: a bug, or an incomplete package. */
#define RF_STATUS_LIST(X)                                               \
    X(RF_OK, "", "ok")                                                  \
    X(RF_ERR_VALUE, "ValueError", "a bad argument")                     \
    X(RF_ERR_TYPE, "TypeError", "a type that is not supported")         \
    X(RF_ERR_INDEX, "IndexError", "an index out of range")              \
    X(RF_ERR_MEMORY, "MemoryError", "out of memory")                    \
    X(RF_ERR_UNSUPPORTED, "NotImplementedError", "not supported here")  \
    X(RF_ERR_INTERNAL, "InternalError", "an internal error")            \
    X(RF_ERR_NO_DEVICE, "NoDeviceError", "no GPU, or no driver for it") \
    X(RF_ERR_CUDA, "CudaError", "the CUDA driver failed")               \
    X(RF_ERR_COMPILE, "CompileError", "a GPU kernel does not compile")  \
    X(RF_ERR_OUT_OF_MEMORY, "MemoryError", "out of device memory")      \
    X(RF_ERR_OFFSET, "OffsetError", "an offset that begins no bag")

typedef enum rf_status {
#define RF_STATUS_ENUM(code, python, text) code,
    RF_STATUS_LIST(RF_STATUS_ENUM)
#undef RF_STATUS_ENUM
} rf_status;

/* Static text of a status; never NULL. */
RF_API const char *rf_status_text(rf_status status);
/* Name of the Python exception a status becomes; "" for RF_OK. */
RF_API const char *rf_status_python(rf_status status);
/* Returns the detail of the last failure on this thread: the value and the allowed values; "" without a
 * failure. UTF-8. The pointer is valid until the next failing call on this thread. */
RF_API const char *rf_last_error(void);

/* RECFUSE_VERSION of the library in use; static. */
RF_API const char *rf_version(void);

RF_END_DECLARATIONS

#endif
