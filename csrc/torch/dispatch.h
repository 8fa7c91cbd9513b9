/* Calls of torch's operators by their names, from C. */
#ifndef RECFUSE_TORCH_DISPATCH_H
#define RECFUSE_TORCH_DISPATCH_H

#include "torch/values.h"

enum { RF__MOST_DISPATCHED = 24, RF__DISPATCH_STACK = 64 };

/* A call: rf__dispatch_of, an rf__pass_... for each argument in the schema's order, rf__dispatch_run, and
 * always rf__dispatch_free. Passed arguments belong to the call. Omitted trailing arguments are None: they
 * must be optional, like those that later versions of torch add. */
typedef struct rf__dispatch {
    const char *name, *overload;
    rf__type types[RF__MOST_DISPATCHED];
    rf__value values[RF__MOST_DISPATCHED];
    int32_t n_arguments, n_results;
    AtenTensorHandle results[8]; /* of the run, until they are freed or taken (then NULL) */
} rf__dispatch;

rf__dispatch rf__dispatch_of(const char *name, const char *overload);
void rf__pass_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor);
void rf__pass_integer(rf__dispatch *dispatch, int64_t integer);
void rf__pass_number(rf__dispatch *dispatch, double number);
void rf__pass_boolean(rf__dispatch *dispatch, bool boolean);
/* Optional arguments. A tensor of NULL is None. */
void rf__pass_optional_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor);
void rf__pass_optional_number(rf__dispatch *dispatch, double number);
void rf__pass_optional_boolean(rf__dispatch *dispatch, bool boolean);
void rf__pass_null(rf__dispatch *dispatch);
/* Passes a list; RF_ERR_INTERNAL: it could not be created. */
rf_status rf__pass_integers(rf__dispatch *dispatch, const int64_t *integers, int64_t count);

/* Runs it; the first `n_results` results are tensors, and the rest, if any, numbers. */
rf_status rf__dispatch_run(rf__dispatch *dispatch, int32_t n_results);
void rf__dispatch_free(rf__dispatch *dispatch);

/* out = left . right by aten::mm, or by aten::bmm if all three have items. Takes the handles in all cases. */
rf_status rf__matmul_into(AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle out, bool items);

/* Returns a new handle to elements of a tensor's storage, from `offset` elements after its first on. */
rf_status rf__tensor_view(AtenTensorHandle of, int64_t dim, const int64_t *sizes, const int64_t *strides,
                          int64_t offset, AtenTensorHandle *view);

#endif
