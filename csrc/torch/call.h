/* The definition of an operator, and the conversion of a boxed call to a C call and an exception.
 *
 * An operator is a schema and a function. The schema determines how arguments are unpacked. Borrowed, copied
 * and returned tensors belong to the call, which frees all of them at the end: an operator frees nothing and
 * may return at any point.
 */
#ifndef RECFUSE_TORCH_CALL_H
#define RECFUSE_TORCH_CALL_H

#include "torch/values.h"

enum { RF__MAX_ARGUMENTS = 16, RF__MAX_OUTPUTS = 4, RF__MAX_TEMPORARIES = 24, RF__NAME_BYTES = 32 };

typedef struct rf__call rf__call;

/* Dispatch keys that an operator is registered for. */
enum { RF__CPU = 1, RF__CUDA = 2, RF__ANYWHERE = 4 };

/* The definition in X.c. `schema` has arguments and outputs: "(Tensor weight, float? scale=None) -> (Tensor,
 * Tensor?)". */
typedef struct rf__operator {
    const char *schema;
    int32_t keys;
    rf_status (*run)(rf__call *call);
} rf__operator;

/* A schema, read once. */
typedef struct rf__signature {
    int32_t n_arguments, n_outputs;
    rf__type arguments[RF__MAX_ARGUMENTS], outputs[RF__MAX_OUTPUTS];
    char names[RF__MAX_ARGUMENTS][RF__NAME_BYTES];
} rf__signature;

/* False: a type that is not supported, or too much of something. */
bool rf__signature_read(const char *schema, rf__signature *signature);

typedef struct rf__registered {
    const char *name;
    const rf__operator *definition;
    rf__boxed boxed; /* hands this entry and the stack to rf__call_run */
    rf__signature signature; /* written by rf__operators_register, as the next one */
    const char
        *public_name; /* of messages: for a private operator, that of the operator to which it belongs */
} rf__registered;

/* Registers operators [count] in a namespace of torch. False: another library has created it; then nothing is
 * registered. */
bool rf__operators_register(const char *space, rf__registered *operators, size_t count);

/* Runs a boxed call and raises its error. */
void rf__call_run(const rf__registered *registered, StableIValue *stack);

/* One call. Arguments and outputs have the numbers of their positions in the schema. */
struct rf__call {
    const rf__registered *registered;
    rf__value values[RF__MAX_ARGUMENTS], outputs[RF__MAX_OUTPUTS];
    rf__torch_device device; /* where it runs: rf__call_device */
    AtenTensorHandle temporaries[RF__MAX_TEMPORARIES];
    int32_t n_temporaries;
    void *scratch; /* of the host, or NULL: freed with the call */
    void *offsets; /* of rf__call_offsets_complete, freed like scratch */
    void *reference; /* to an object of a family, or NULL: passed to `drop` at the end of the call */
    void (*drop)(void *reference);
};

/* Sets the device of the call to that of this tensor. */
rf_status rf__call_device(rf__call *call, int argument);
/* Returns true if it runs on the CPU: its tensors are there, and this thread does not explain calls for a
 * GPU. Otherwise the GPU's functions run or lower it, with rf__call_stream. */
bool rf__call_on_cpu(const rf__call *call);
/* Returns true if it is lowered for a described GPU: nothing runs, and nothing reads its tensors. */
bool rf__call_is_explained(const rf__call *call);
/* Returns the number of the call's GPU for rf__cuda_device_get; RF__CUDA_DESCRIBED if the tensors are on the
 * CPU. */
int32_t rf__call_gpu(const rf__call *call);
/* Reads a tensor of `dim` dimensions (or RF__ANY_DIM) on the call's device; the second: on the CPU, for any
 * device of the call. */
rf_status rf__call_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor);
rf_status rf__call_host_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor);
/* Replaces `tensor` by a contiguous copy as `dtype`, unless it is that. */
rf_status rf__call_contiguous(rf__call *call, rf__tensor *tensor, int32_t dtype);
/* Contiguous int32 or int64 [count]. */
rf_status rf__call_integers(rf__call *call, int argument, const void **data, int64_t *count,
                            rf_int_type *type);
/* As above, for a tensor of a list; `argument` names it. */
rf_status rf__call_integers_of(rf__call *call, const char *argument, AtenTensorHandle handle,
                               const void **data, int64_t *count, rf_int_type *type);
/* Contiguous int32 or int64 [rows, columns]. */
rf_status rf__call_integer_rows(rf__call *call, int argument, const void **data, int64_t *rows,
                                int64_t *columns, rf_int_type *type);
/* Text without a zero inside, borrowed; which of `choices` (up to NULL) it is. RF_ERR_VALUE otherwise. */
rf_status rf__call_text(rf__call *call, int argument, const char **text);
rf_status rf__call_choice(rf__call *call, int argument, const char *const *choices, int *chosen);

/* Creates a contiguous tensor for an output, and returns the address of its data. */
rf_status rf__call_output(rf__call *call, int output, int64_t dim, const int64_t *sizes, int32_t dtype,
                          void **data);
/* Creates a contiguous tensor on the call's device; the caller frees it. If the call is explained, nothing
 * writes it: then it is zeros without memory. */
rf_status rf__call_new(const rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                       AtenTensorHandle *tensor, void **data);
/* A tensor that lasts as long as the call. */
rf_status rf__call_temporary(rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                             AtenTensorHandle *tensor, void **data);
rf_status rf__call_output_text(rf__call *call, int output, const char *text);

/* Threads of torch's own pool; in a forked child only the caller's. */
rf_status rf__call_executor(rf_executor *executor);
/* torch's current stream of the call's GPU. RF_ERR_UNSUPPORTED: this torch has no CUDA. */
rf_status rf__call_stream(const rf__call *call, rf_cuda_stream *stream);
/* torch's memory-efficient attention, by its function in libtorch_cuda: torch_call_dispatcher returns results
 * of several types, which the operator has, in the wrong order. RF_ERR_UNSUPPORTED: this torch lacks it. */
rf_status rf__call_efficient_attention(aoti_torch_cuda__efficient_attention_forward_type **function);
/* torch's caching allocator of that GPU. Blocks are tensors. A separate thread allocates memory that lasts:
 * see cuda.c. */
rf_cuda_allocator rf__call_allocator(const rf__call *call);

#endif
