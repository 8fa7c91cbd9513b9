/* Reads a fused call, as Python describes it. */
#include "families/fused_embedding_bag/python/fused_call.h"

#include <stdlib.h>

#include "families/fused_embedding_bag/check_fused.h"

void rf__py_call_free(rf__py_fused_call *call) {
    Py_XDECREF(call->features);
    free(call->buffers);
}

static int buffers_read(PyObject *list, rf__py_fused_call *call) {
    const Py_ssize_t count = PyList_Size(list);
    call->buffers = calloc((size_t)count + 1, sizeof *call->buffers);
    if (call->buffers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long data, parameters = 0;
        long long numel, pitch = 0, parameters_pitch = 0;
        int dtype;
        PyObject *tuple = PyList_GetItem(list, i);
        RF__PY_REFUSE_IF(!PyTuple_Check(tuple), PyExc_TypeError,
                         "call: a buffer has another form; expected a tuple (address, numel, dtype) or, of "
                         "codes, (address, numel, dtype, address of parameters, pitch, their pitch)");
        if (!PyArg_ParseTuple(tuple, "KLi|KLL:call", &data, &numel, &dtype, &parameters, &pitch,
                              &parameters_pitch))
            return -1;
        RF__PY_REFUSE_IF((dtype < RF_FLOAT32 || dtype > RF_BFLOAT16) && !rf_is_quantized(dtype),
                         PyExc_ValueError, "call: dtype is %d; expected 0 to 2, 4 or 5", dtype);
        call->buffers[i] =
            (rf_buffer){.data = rf__py_pointer(data), .numel = numel, .dtype = (rf_dtype)dtype};
        if (!rf_is_quantized(dtype)) continue;
        call->buffers[i].parameters_dtype = RF_FLOAT16;
        call->buffers[i].parameters = rf__py_pointer(parameters);
        call->buffers[i].pitch = pitch;
        call->buffers[i].parameters_pitch = parameters_pitch;
    }
    call->params.buffers = call->buffers;
    call->params.n_buffers = count;
    return 0;
out:
    return -1;
}

int rf__py_call_read(PyObject *object, const char *function, rf__py_fused_call *call) {
    enum { FIELDS = sizeof(rf_feature) / sizeof(int64_t) };
    PyObject *buffers, *features;
    rf_fused_embedding_bag_params *params = &call->params;
    long long output_stride;
    int output_dtype;
    RF__PY_REFUSE_IF(!PyTuple_Check(object), PyExc_TypeError, "%s: call has another type; expected a tuple",
                     function);
    if (!PyArg_ParseTuple(object, "O!OiL:call", &PyList_Type, &buffers, &features, &output_dtype,
                          &output_stride))
        return -1;
    if (buffers_read(buffers, call) != 0) return -1;
    call->features = rf__py_array(features, NPY_INT64, 2, function, "features");
    if (call->features == NULL) return -1;
    RF__PY_REFUSE_IF(PyArray_DIM(call->features, 1) != FIELDS || output_dtype < RF_FLOAT32 ||
                         output_dtype > RF_BFLOAT16,
                     PyExc_ValueError,
                     "%s: features or output_dtype has another form; expected %d columns of features, and "
                     "output_dtype 0 to 2",
                     function, FIELDS);
    params->features = PyArray_DATA(call->features);
    params->n_features = PyArray_DIM(call->features, 0);
    params->output_dtype = (rf_dtype)output_dtype;
    params->output_stride = output_stride;
    static _Alignas(16) char aligned[16]; /* never accessed: replaces an output that does not exist yet */
    params->output = aligned;
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        RF__PY_REFUSE_IF(feature->buffer < 0 || feature->buffer >= params->n_buffers, PyExc_ValueError,
                         "%s: a feature is in a buffer that is not there", function);
        RF__PY_REFUSE_IF(__builtin_add_overflow(params->output_dim, feature->dim, &params->output_dim),
                         PyExc_ValueError, "%s: the sum of all dims does not fit int64", function);
    }
    params->check_bounds = true;
    params->prefetch_distance = -1;
    return 0;
out:
    return -1;
}

PyArrayObject *rf__py_schedules(PyObject *object, int dimensions, const rf__py_fused_call *call,
                                const char *function) {
    enum { FIELDS = sizeof(rf_fused_schedule) / sizeof(int32_t) };
    PyArrayObject *array = rf__py_array(object, NPY_INT32, dimensions, function, "schedules");
    if (array == NULL || (PyArray_DIM(array, dimensions - 1) == FIELDS &&
                          PyArray_DIM(array, dimensions - 2) == call->params.n_features))
        return array;
    PyErr_Format(PyExc_ValueError,
                 "%s: schedules has another shape; expected [..., %lld, %d], a row a feature", function,
                 (long long)call->params.n_features, FIELDS);
    Py_DECREF(array);
    return NULL;
}

rf_status rf__py_call_check(const rf_fused_embedding_bag_params *params, int32_t warps) {
    rf_fused_embedding_bag_params call = *params;
    call.offsets = params->output;
    RF_CHECK(rf__check_fused_call(&call));
    RF_CHECK(rf__check_fused_features(&call));
    return rf__check_fused_warps(warps);
}
