/* Calls of torch's operators by their names, from C. */
#ifndef RECFUSE_TORCH_DISPATCH_H
#define RECFUSE_TORCH_DISPATCH_H

#include "torch/values.h"

enum { RF__MOST_DISPATCHED = 24, RF__DISPATCH_STACK = 64 };

/* One call: rf__dispatch_of, an rf__pass_... for each argument in the schema's order, rf__dispatch_run, rf__dispatch_free
 * in any case. What is passed belongs to the call. Arguments that are left out at the end are None: they must be optional,
 * as those are that later versions of torch add. */
typedef struct rf__dispatch {
    const char *name, *overload;
    rf__type types[RF__MOST_DISPATCHED];
    rf__value values[RF__MOST_DISPATCHED];
    int32_t n_arguments, n_results;
    AtenTensorHandle results[8]; /* of the run, until they are freed or taken (NULL then) */
} rf__dispatch;

rf__dispatch rf__dispatch_of(const char *name, const char *overload);
void rf__pass_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor);
void rf__pass_integer(rf__dispatch *dispatch, int64_t integer);
void rf__pass_number(rf__dispatch *dispatch, double number);
void rf__pass_boolean(rf__dispatch *dispatch, bool boolean);
/* Optional ones. A tensor of NULL is None. */
void rf__pass_optional_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor);
void rf__pass_optional_number(rf__dispatch *dispatch, double number);
void rf__pass_optional_boolean(rf__dispatch *dispatch, bool boolean);
void rf__pass_none(rf__dispatch *dispatch);
/* A list; RF_ERR_INTERNAL: none could be made. */
rf_status rf__pass_integers(rf__dispatch *dispatch, const int64_t *integers, int64_t count);

/* Runs it; the first `n_results` results are tensors, and the rest, if any, numbers. */
rf_status rf__dispatch_run(rf__dispatch *dispatch, int32_t n_results);
void rf__dispatch_free(rf__dispatch *dispatch);

/* out = left . right by aten::mm, or aten::bmm where all three have items. Takes the handles, whatever comes of it. */
rf_status rf__matmul_into(AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle out, bool items);

/* A new handle to elements of a tensor's storage, `offset` elements behind its first. */
rf_status rf__tensor_view(AtenTensorHandle of, int64_t dim, const int64_t *sizes, const int64_t *strides,
                          int64_t offset, AtenTensorHandle *view);

#endif
