/* A fused call as described by Python, except for its batch. Addresses are integers: the caller must keep the
 * tensors alive. */
#ifndef RECFUSE_PYTHON_FUSED_CALL_H
#define RECFUSE_PYTHON_FUSED_CALL_H

#include "python/methods.h"

#include "families/fused_embedding_bag/fused_kernel.h"
#include "families/fused_embedding_bag/partition/partition.h"
#include "families/fused_embedding_bag/schedule/fused_schedule.h"

/* The contents of a `call`; call_free frees `features` and `buffers`. */
typedef struct rf__py_fused_call {
    rf_fused_embedding_bag_params params;
    PyArrayObject *features;
    rf_buffer *buffers;
} rf__py_fused_call;

/* Fills `call`, whose memory is zero; -1 with an exception. The caller frees it also then. */
int rf__py_call_read(PyObject *object, const char *function, rf__py_fused_call *call);
void rf__py_call_free(rf__py_fused_call *call);

/* int32 [sets, features, 5], or without the first dimension; a new reference. */
PyArrayObject *rf__py_schedules(PyObject *object, int dimensions, const rf__py_fused_call *call,
                                const char *function);

/* Of a call without indices and offsets. */
rf_status rf__py_call_check(const rf_fused_embedding_bag_params *params, int32_t warps);

#endif
