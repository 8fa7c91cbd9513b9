/* Between Python and C: statuses to exceptions, objects to arrays, kernels to dicts. */
#include "python/methods.h"

#include "core/status.h"

PyObject *rf__py_result(void *result, rf_status status, const char *function) {
    if (status == RF_OK) return result;
    Py_XDECREF((PyObject *)result);
    PyObject *errors = PyImport_ImportModule("recfuse.errors"), *classes = NULL, *exception = NULL;
    if (errors != NULL) classes = PyObject_GetAttrString(errors, "BY_NAME");
    if (classes != NULL) exception = PyMapping_GetItemString(classes, rf_status_python(status));
    const char *detail = rf_last_error();
    if (exception != NULL)
        PyErr_Format(exception, "%s: %s", function, *detail != '\0' ? detail : rf_status_text(status));
    Py_XDECREF(exception);
    Py_XDECREF(classes);
    Py_XDECREF(errors);
    return NULL;
}

PyArrayObject *rf__py_new(int type, npy_intp rows, npy_intp columns) {
    npy_intp shape[2] = {rows, columns};
    return (PyArrayObject *)PyArray_SimpleNew(columns < 0 ? 1 : 2, shape, type);
}

PyArrayObject *rf__py_array(PyObject *object, int type, int dimensions, const char *function,
                            const char *argument) {
    PyArrayObject *array = NULL;
    PyArrayObject *input = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    if (input == NULL) return NULL;
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    if (descr == NULL) goto out;
    RF__PY_REFUSE_IF(!PyArray_CanCastSafely(PyArray_TYPE(input), type), PyExc_TypeError,
                     "%s: %s is of %S, which cannot be converted safely to %S", function, argument,
                     PyArray_DESCR(input), descr);
    RF__PY_REFUSE_IF(PyArray_NDIM(input) != dimensions, PyExc_ValueError,
                     "%s: %s has %d dimensions; expected an array of %d", function, argument,
                     PyArray_NDIM(input), dimensions);
    Py_INCREF(descr); /* PyArray_FromArray takes a reference */
    array = (PyArrayObject *)PyArray_FromArray(input, descr, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);
out:
    Py_XDECREF(descr);
    Py_DECREF(input);
    return array;
}

PyObject *rf__py_kernel(const rf__kernel_info *info, PyObject *details) {
    PyObject *kernel = Py_BuildValue("{s:i,s:i,s:i,s:L,s:d,s:O,s:N}", "registers", info->registers,
                                     "spill_bytes", info->spill_bytes, "stack_bytes", info->stack_bytes,
                                     "cubin_bytes", (long long)info->cubin_bytes, "seconds", info->seconds,
                                     "cached", info->cached ? Py_True : Py_False, "path",
                                     PyUnicode_DecodeFSDefault(info->path)); /* need not be valid text */
    if (kernel != NULL && (details == NULL || PyDict_Update(kernel, details) != 0)) Py_CLEAR(kernel);
    Py_XDECREF(details);
    return kernel;
}
