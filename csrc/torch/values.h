/* The values that libtorch passes to a boxed kernel, as C, and the way back.
 *
 * Inputs belong to the kernel. rf__call (ops.h) takes them apart with rf__arguments_take and frees
 * them all at its end, so an operator only borrows them.
 */
#ifndef RECFUSE_TORCH_VALUES_H
#define RECFUSE_TORCH_VALUES_H

#include "base/status.h"
#include "torch/abi.h"

/* One letter per argument of a schema:
 *   t Tensor   o Tensor?   l Tensor[]   s str   i int, SymInt   b bool */
enum { RF__MAX_ARGUMENTS = 16 };

typedef union rf__value {
    AtenTensorHandle tensor; /* t, o: NULL when absent */
    StableListHandle list;   /* l */
    StringHandle string;     /* s */
    int64_t integer;         /* i */
    bool boolean;            /* b */
} rf__value;

/* Moves stack[0 .. strlen(kinds)) into `values`; boxes of optionals are freed. Cannot fail. */
void rf__arguments_take(const char *kinds, const StableIValue *stack, rf__value *values);
/* Frees what rf__arguments_take gave. */
void rf__arguments_free(const char *kinds, rf__value *values);

/* With libtorch's own text, if `code` says that a call to libtorch failed: RF_ERR_MEMORY or RF_ERR_OUT_OF_MEMORY where there was too little,
 * RF_ERR_CUDA where that is what the text is of, else RF_ERR_INTERNAL. */
rf_status rf__torch_status(int32_t code, const char *call);
#define RF__TORCH_TRY(call) RF_TRY(rf__torch_status((call), #call))

/* The device of an operator's tensors. */
typedef struct rf__place {
    int32_t type, index; /* torch's code; ordinal, -1 where there is one alone */
} rf__place;

/* Where a tensor is. */
rf_status rf__tensor_place(AtenTensorHandle handle, rf__place *place);
bool rf__place_is_cpu(const rf__place *place);
rf__place rf__place_of_cpu(void);

/* A dense tensor, looked at once. Everything is borrowed from `handle`. */
typedef struct rf__tensor {
    const char *argument; /* its name in the schema, for errors */
    AtenTensorHandle handle;
    const void *data;
    int64_t dim;
    const int64_t *sizes, *strides;
    int32_t dtype; /* torch's code */
    rf__place place;
} rf__tensor;

/* Text of a string that has no zero inside, borrowed; RF_ERR_VALUE otherwise. */
rf_status rf__string_read(const char *argument, StringHandle string, const char **text);

/* Looks at `handle`. RF_ERR_VALUE unless it is at `place`, has `dim` dimensions, and memory for its elements. */
rf_status rf__tensor_read(const char *argument, AtenTensorHandle handle, int64_t dim, const rf__place *place,
                          rf__tensor *tensor);
/* Replaces `tensor` by a contiguous copy as `dtype` unless it is contiguous and has it. A copy is also
 * left in *copy (NULL before), to be freed by the caller once `tensor` is done with. */
rf_status rf__tensor_make_contiguous(rf__tensor *tensor, int32_t dtype, AtenTensorHandle *copy);
bool rf__tensor_is_contiguous(const rf__tensor *tensor);
/* New contiguous [rows, columns], and where its data is. */
rf_status rf__tensor_new(int64_t rows, int64_t columns, int32_t dtype, const rf__place *place,
                         AtenTensorHandle *tensor, void **data);
/* New [count], and where its data is. */
rf_status rf__tensor_new_list(int64_t count, int32_t dtype, const rf__place *place, AtenTensorHandle *tensor,
                              void **data);
/* Frees a tensor; NULL is fine. */
void rf__tensor_free(AtenTensorHandle tensor);

/* Element types; RF_ERR_TYPE names the argument, what was found and what is allowed. */
rf_status rf__tensor_dtype(const rf__tensor *tensor, rf_dtype *dtype);
rf_status rf__tensor_int_type(const rf__tensor *tensor, rf_int_type *type);
int32_t rf__torch_dtype(rf_dtype dtype);
/* "float64" and so on; "another dtype" for codes that are not in RF__TORCH_DTYPE_LIST. */
const char *rf__torch_dtype_name(int32_t dtype);

#endif
