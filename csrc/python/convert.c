/* Between Python and C: statuses to exceptions, objects to arrays. */
#include "methods.h"

#include "status.h"

PyObject *rf__py_raise(rf_status status, const char *function) {
    PyObject *exception = NULL;
    PyObject *builtins = PyEval_GetBuiltins(); /* borrowed */
    if (builtins != NULL) exception = PyDict_GetItemString(builtins, rf_status_python(status));
    if (exception == NULL) exception = PyExc_RuntimeError;
    const char *detail = rf_last_error();
    PyErr_Format(exception, "%s: %s", function, *detail != '\0' ? detail : rf_status_text(status));
    return NULL;
}

PyArrayObject *rf__py_array(PyObject *object, int type, int dimensions, const char *function,
                            const char *argument) {
    PyArrayObject *array = NULL;
    PyArrayObject *given = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    if (given == NULL) return NULL;
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    if (descr == NULL) goto out;
    if (!PyArray_CanCastSafely(PyArray_TYPE(given), type)) {
        PyErr_Format(PyExc_TypeError, "%s: %s is of %S, which cannot be converted safely to %S", function,
                     argument, PyArray_DESCR(given), descr);
        goto out;
    }
    if (PyArray_NDIM(given) != dimensions) {
        PyErr_Format(PyExc_ValueError, "%s: %s has %d dimensions, needed is an array of %d", function,
                     argument, PyArray_NDIM(given), dimensions);
        goto out;
    }
    Py_INCREF(descr); /* PyArray_FromArray takes a reference */
    array = (PyArrayObject *)PyArray_FromArray(given, descr, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);
out:
    Py_XDECREF(descr);
    Py_DECREF(given);
    return array;
}
