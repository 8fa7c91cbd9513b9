/* The values that libtorch passes to a boxed kernel and takes from it, and its tensors, as C. */
#ifndef RECFUSE_TORCH_VALUES_H
#define RECFUSE_TORCH_VALUES_H

#include "core/status.h"
#include "torch/torch_abi.h"

/* The type of an argument or output in a schema: Tensor, str, int (also SymInt and ScalarType), float or
 * bool; a list of these; each of them optional. */
typedef enum rf__kind { RF__TENSOR, RF__STRING, RF__INTEGER, RF__FLOAT, RF__BOOLEAN } rf__kind;
typedef struct rf__type {
    rf__kind kind;
    bool list, optional;
} rf__type;

typedef struct rf__value {
    bool is_present; /* false: an optional value that is None; all other fields are 0 then */
    union {
        StableIValue bits;
        AtenTensorHandle tensor;
        StringHandle string;
        StableListHandle list;
        int64_t integer;
        double number;
        bool boolean;
    };
} rf__value;
_Static_assert(sizeof(void *) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "a value is read as it lies");

/* Takes a value from the stack and frees the box of an optional one. Cannot fail. */
rf__value rf__value_take(rf__type type, StableIValue bits);
/* Puts a value on the stack, which then owns it. RF_ERR_MEMORY: no box for an optional one. */
rf_status rf__value_release(rf__type type, const rf__value *value, StableIValue *bits);
/* Frees a value and, of a list, its elements. */
void rf__value_free(rf__type type, const rf__value *value);

/* Fails with libtorch's own text if `code` is a failure of libtorch: RF_ERR_MEMORY or RF_ERR_OUT_OF_MEMORY if
 * memory ran out, RF_ERR_CUDA if the text is CUDA's, else RF_ERR_INTERNAL. */
rf_status rf__torch_status(int32_t code, const char *call);
#define RF__TORCH_CHECK(call) RF_CHECK(rf__torch_status((call), #call))

/* The device of a tensor. */
typedef struct rf__torch_device {
    int32_t type, index; /* torch's code; ordinal, -1 if there is a single one */
} rf__torch_device;

rf_status rf__tensor_device(AtenTensorHandle handle, rf__torch_device *device);
bool rf__device_is_cpu(rf__torch_device device);
rf__torch_device rf__device_cpu(void);

/* A dense tensor, looked at once. Everything is borrowed from `handle`. */
typedef struct rf__tensor {
    const char *argument; /* its name in the schema, for errors */
    AtenTensorHandle handle;
    const void *data;
    int64_t dim;
    const int64_t *sizes, *strides;
    int32_t dtype; /* torch's code */
    rf__torch_device device;
} rf__tensor;

enum { RF__MAX_DIM = 8, RF__ANY_DIM = -1 };

/* Looks at `handle`. RF_ERR_VALUE unless it is on `device`, has `dim` dimensions, and memory for its
 * elements. */
rf_status rf__tensor_read(const char *argument, AtenTensorHandle handle, int64_t dim, rf__torch_device device,
                          rf__tensor *tensor);
/* Replaces `tensor` by a contiguous copy as `dtype` unless it is contiguous and has it; at most RF__MAX_DIM
 * dimensions. The copy is also left in *copy (NULL before), to be freed by the caller once `tensor` is done
 * with. */
rf_status rf__tensor_make_contiguous(rf__tensor *tensor, int32_t dtype, AtenTensorHandle *copy);
bool rf__tensor_is_contiguous(const rf__tensor *tensor);
/* Creates a contiguous tensor of sizes [dim], and returns the address of its data; at most RF__MAX_DIM
 * dimensions. */
rf_status rf__tensor_new(int64_t dim, const int64_t *sizes, int32_t dtype, rf__torch_device device,
                         AtenTensorHandle *tensor, void **data);
/* As above, on the CPU, of zeros that take no memory until they are written, of any size. RF_ERR_MEMORY. */
rf_status rf__tensor_reserve(int64_t dim, const int64_t *sizes, int32_t dtype, AtenTensorHandle *tensor,
                             void **data);
/* Frees a tensor; NULL is fine. */
void rf__tensor_free(AtenTensorHandle tensor);
/* Fails with "<argument> is <dtype> [<sizes>]; expected " and the text. */
rf_status rf__tensor_refuse(const rf__tensor *tensor, rf_status code, const char *format, ...)
    RF__PRINTF(3, 4);

/* Reads the element type; RF_ERR_TYPE names the argument, its type and the allowed types. */
rf_status rf__tensor_dtype(const rf__tensor *tensor, rf_dtype *dtype);
int32_t rf__torch_dtype(rf_dtype dtype);
/* "float64" and so on; "another dtype" for codes that are not in RF__TORCH_DTYPE_LIST. */
const char *rf__torch_dtype_name(int32_t dtype);

#endif
