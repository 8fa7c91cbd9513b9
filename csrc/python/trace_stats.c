/* recfuse._C: traces of row ids over NumPy arrays. */
#include "python/methods.h"

#include "base/status.h"
#include "tools/trace_stats.h"

RF__PY_METHOD(trace_curve) {
    PyObject *objects[3], *values = NULL;
    PyArrayObject *ranks = NULL, *counts = NULL, *positions = NULL;
    if (!PyArg_ParseTuple(arguments, "OOO:trace_curve", &objects[0], &objects[1], &objects[2])) return NULL;
    if ((ranks = rf__py_array(objects[0], NPY_DOUBLE, 1, "trace_curve", "ranks")) == NULL) goto out;
    if ((counts = rf__py_array(objects[1], NPY_DOUBLE, 1, "trace_curve", "counts")) == NULL) goto out;
    if ((positions = rf__py_array(objects[2], NPY_DOUBLE, 1, "trace_curve", "positions")) == NULL) goto out;
    if (PyArray_DIM(ranks, 0) != PyArray_DIM(counts, 0)) {
        PyErr_Format(PyExc_ValueError, "trace_curve: %zd ranks and %zd counts, needed are as many",
                     (Py_ssize_t)PyArray_DIM(ranks, 0), (Py_ssize_t)PyArray_DIM(counts, 0));
        goto out;
    }
    npy_intp count = PyArray_DIM(positions, 0);
    values = PyArray_SimpleNew(1, &count, NPY_DOUBLE);
    if (values == NULL) goto out;
    const rf_status status =
        rf__trace_curve(PyArray_DATA(ranks), PyArray_DATA(counts), PyArray_DIM(ranks, 0),
                        PyArray_DATA(positions), count, PyArray_DATA((PyArrayObject *)values));
    values = rf__py_result(values, status, "trace_curve");
out:
    Py_XDECREF(positions);
    Py_XDECREF(counts);
    Py_XDECREF(ranks);
    return values;
}

RF__PY_METHOD(trace_times) {
    PyObject *object, *times = NULL;
    PyArrayObject *array = NULL;
    double length, burst, median, sigma;
    unsigned long long seed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OddddK:trace_times", &object, &length, &burst, &median, &sigma, &seed))
        return NULL;
    array = rf__py_array(object, NPY_INT64, 1, "trace_times", "counts");
    if (array == NULL) goto out;
    const int64_t *counts = PyArray_DATA(array);
    const npy_intp n_rows = PyArray_DIM(array, 0);
    npy_intp total = 0;
    for (npy_intp row = 0; row < n_rows; row++) {
        if (counts[row] < 0 || counts[row] > NPY_MAX_INTP / 16 - total) {
            PyErr_Format(PyExc_ValueError,
                         "trace_times: counts[%zd] is %lld, allowed is >= 0, and a sum that memory holds",
                         (Py_ssize_t)row, (long long)counts[row]);
            goto out;
        }
        total += (npy_intp)counts[row];
    }
    times = PyArray_SimpleNew(1, &total, NPY_DOUBLE);
    if (times == NULL) goto out;
    double *data = PyArray_DATA((PyArrayObject *)times);
    Py_BEGIN_ALLOW_THREADS status = rf__trace_times(counts, n_rows, length, burst, median, sigma, seed, data);
    Py_END_ALLOW_THREADS times = rf__py_result(times, status, "trace_times");
out:
    Py_XDECREF(array);
    return times;
}

RF__PY_METHOD(trace_reuse) {
    PyObject *object, *gaps = NULL, *distances = NULL, *both = NULL;
    long long n_rows;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OL:trace_reuse", &object, &n_rows)) return NULL;
    PyArrayObject *array = rf__py_array(object, NPY_INT64, 1, "trace_reuse", "rows");
    if (array == NULL) goto out;
    if (n_rows < 0) {
        PyErr_Format(PyExc_ValueError, "trace_reuse: n_rows is %lld, allowed is >= 0", n_rows);
        goto out;
    }
    npy_intp lookups = PyArray_DIM(array, 0);
    gaps = PyArray_SimpleNew(1, &lookups, NPY_INT64);
    distances = PyArray_SimpleNew(1, &lookups, NPY_INT64);
    if (gaps == NULL || distances == NULL) goto out;
    const int64_t *rows = PyArray_DATA(array);
    int64_t *gap_data = PyArray_DATA((PyArrayObject *)gaps);
    int64_t *distance_data = PyArray_DATA((PyArrayObject *)distances);
    Py_BEGIN_ALLOW_THREADS status = rf__trace_reuse(rows, lookups, n_rows, gap_data, distance_data);
    Py_END_ALLOW_THREADS if (status != RF_OK) {
        rf__py_raise(status, "trace_reuse");
        goto out;
    }
    both = PyTuple_Pack(2, gaps, distances);
out:
    Py_XDECREF(distances);
    Py_XDECREF(gaps);
    Py_XDECREF(array);
    return both;
}
