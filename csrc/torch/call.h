/* How an operator is written, and how a boxed call of it becomes a C call and an exception.
 *
 * An operator is a schema and a function. What it takes comes apart by the schema; what it borrows, copies and gives
 * belongs to the call, which frees all of it at the end: an operator frees nothing and may return at any point.
 */
#ifndef RECFUSE_TORCH_CALL_H
#define RECFUSE_TORCH_CALL_H

#include "torch/values.h"

enum { RF__MAX_ARGUMENTS = 16, RF__MAX_OUTPUTS = 4, RF__MAX_TEMPORARIES = 24, RF__NAME_BYTES = 32 };

typedef struct rf__call rf__call;

/* Dispatch keys that an operator is registered for. */
enum { RF__CPU = 1, RF__CUDA = 2, RF__ANYWHERE = 4 };

/* What X.c gives. In `schema` stand arguments and outputs: "(Tensor weight, float? scale=None) -> (Tensor, Tensor?)". */
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
        *public_name; /* of messages: of a private operator, that of the operator that it is a part of */
} rf__registered;

/* Registers operators [count] in a namespace of torch. False: another library has made it; then nothing is done. */
bool rf__operators_register(const char *space, rf__registered *operators, size_t count);

/* Runs one boxed call and raises what it fails with. */
void rf__call_run(const rf__registered *registered, StableIValue *stack);

/* One call. Arguments and outputs have the numbers of their positions in the schema. */
struct rf__call {
    const rf__registered *registered;
    rf__value values[RF__MAX_ARGUMENTS], outputs[RF__MAX_OUTPUTS];
    rf__torch_device device; /* where it runs: rf__call_device */
    AtenTensorHandle temporaries[RF__MAX_TEMPORARIES];
    int32_t n_temporaries;
    void *scratch; /* of the host, or NULL: freed with the call */
    void *offsets; /* of rf__call_offsets_complete, as scratch */
    void *reference; /* to an object of a family, or NULL: passed to `drop` at the end of the call */
    void (*drop)(void *reference);
};

/* The call runs where this tensor is. */
rf_status rf__call_device(rf__call *call, int argument);
/* Whether it runs on the CPU: its tensors are there, and this thread does not explain calls for a GPU. Else it is run, or
 * lowered, by the GPU's functions, with rf__call_stream. */
bool rf__call_on_cpu(const rf__call *call);
/* Whether it is lowered for a described GPU: nothing runs, and nothing reads its tensors. */
bool rf__call_is_explained(const rf__call *call);
/* The number of the call's GPU for rf__cuda_device_get; RF__CUDA_DESCRIBED where the tensors are on the CPU. */
int32_t rf__call_gpu(const rf__call *call);
/* A tensor of `dim` dimensions (or RF__ANY_DIM) on the call's device; the second: on the CPU, whatever that is. */
rf_status rf__call_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor);
rf_status rf__call_host_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor);
/* Replaces `tensor` by a contiguous copy as `dtype`, unless it is that. */
rf_status rf__call_contiguous(rf__call *call, rf__tensor *tensor, int32_t dtype);
/* Contiguous int32 or int64 [count]. */
rf_status rf__call_integers(rf__call *call, int argument, const void **data, int64_t *count,
                            rf_int_type *type);
/* The same of a tensor of a list; `argument` names it. */
rf_status rf__call_integers_of(rf__call *call, const char *argument, AtenTensorHandle handle,
                               const void **data, int64_t *count, rf_int_type *type);
/* Contiguous int32 or int64 [rows, columns]. */
rf_status rf__call_integer_rows(rf__call *call, int argument, const void **data, int64_t *rows,
                                int64_t *columns, rf_int_type *type);
/* Text without a zero inside, borrowed; which of `choices` (up to NULL) it is. RF_ERR_VALUE otherwise. */
rf_status rf__call_text(rf__call *call, int argument, const char **text);
rf_status rf__call_choice(rf__call *call, int argument, const char *const *choices, int *chosen);

/* A new contiguous tensor for an output, and where its data is. */
rf_status rf__call_output(rf__call *call, int output, int64_t dim, const int64_t *sizes, int32_t dtype,
                          void **data);
/* A new contiguous tensor on the call's device, which is the caller's. Where the call is explained nothing writes it: then it is
 * zeros that take no memory. */
rf_status rf__call_new(const rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                       AtenTensorHandle *tensor, void **data);
/* A tensor that lasts as long as the call. */
rf_status rf__call_temporary(rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                             AtenTensorHandle *tensor, void **data);
rf_status rf__call_output_text(rf__call *call, int output, const char *text);

/* Threads of torch's own pool; in a forked child the caller's alone. */
rf_status rf__call_executor(rf_executor *executor);
/* torch's current stream of the call's GPU. RF_ERR_UNSUPPORTED: this torch has no CUDA. */
rf_status rf__call_stream(const rf__call *call, rf_cuda_stream *stream);
/* torch's memory-efficient attention, by its function in libtorch_cuda: torch_call_dispatcher takes results of several
 * types, which the operator has, in the wrong order. RF_ERR_UNSUPPORTED: this torch has none. */
rf_status rf__call_efficient_attention(aoti_torch_cuda__efficient_attention_forward_type **function);
/* torch's caching allocator of that GPU. Blocks are tensors. Memory that lasts is made on a thread of its own: see
 * cuda.c. */
rf_cuda_allocator rf__call_allocator(const rf__call *call);

#endif
