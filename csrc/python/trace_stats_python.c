/* recfuse._C: traces of row indices over NumPy arrays. */
#include "python/methods.h"

#include "core/status.h"
#include "core/tools/trace_stats.h"

RF__PY_METHOD(trace_curve,
              "trace_curve(ranks, counts: float64 [points], positions: float64 [n]) -> float64 [n]") {
    static const char function[] = "trace_curve";
    PyObject *objects[3];
    PyArrayObject *ranks = NULL, *counts = NULL, *positions = NULL, *values = NULL;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OOO:trace_curve", &objects[0], &objects[1], &objects[2])) return NULL;
    if ((ranks = rf__py_array(objects[0], NPY_DOUBLE, 1, function, "ranks")) == NULL ||
        (counts = rf__py_array(objects[1], NPY_DOUBLE, 1, function, "counts")) == NULL ||
        (positions = rf__py_array(objects[2], NPY_DOUBLE, 1, function, "positions")) == NULL)
        goto out;
    const npy_intp points = PyArray_DIM(ranks, 0), count = PyArray_DIM(positions, 0);
    RF__PY_REFUSE_IF(points != PyArray_DIM(counts, 0), PyExc_ValueError,
                     "trace_curve: %zd ranks and %zd counts are given; expected equal numbers",
                     (Py_ssize_t)points, (Py_ssize_t)PyArray_DIM(counts, 0));
    if ((values = rf__py_new(NPY_DOUBLE, count, -1)) == NULL) goto out;
    status = rf__trace_curve(PyArray_DATA(ranks), PyArray_DATA(counts), points, PyArray_DATA(positions),
                             count, PyArray_DATA(values));
out:
    Py_XDECREF(positions);
    Py_XDECREF(counts);
    Py_XDECREF(ranks);
    return rf__py_result(values, status, function);
}

RF__PY_METHOD(trace_times, "trace_times(counts: int64 [rows], length: float, burst: float, median: float, "
                           "sigma: float, seed: int) -> float64 [sum of counts]") {
    static const char function[] = "trace_times";
    PyObject *object;
    PyArrayObject *array = NULL, *times = NULL;
    rf__trace_bursts bursts;
    unsigned long long seed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OddddK:trace_times", &object, &bursts.length, &bursts.burst,
                          &bursts.median, &bursts.sigma, &seed))
        return NULL;
    bursts.seed = seed;
    if ((array = rf__py_array(object, NPY_INT64, 1, function, "counts")) == NULL) return NULL;
    const int64_t *counts = PyArray_DATA(array);
    const npy_intp n_rows = PyArray_DIM(array, 0);
    npy_intp total = 0;
    for (npy_intp row = 0; row < n_rows; row++) {
        RF__PY_REFUSE_IF(counts[row] < 0 || counts[row] > NPY_MAX_INTP / 16 - total, PyExc_ValueError,
                         "trace_times: counts[%zd] is %lld; expected >= 0, and a sum that memory holds",
                         (Py_ssize_t)row, (long long)counts[row]);
        total += (npy_intp)counts[row];
    }
    if ((times = rf__py_new(NPY_DOUBLE, total, -1)) == NULL) goto out;
    RF__PY_UNLOCKED(status = rf__trace_times(counts, n_rows, &bursts, PyArray_DATA(times)));
out:
    Py_DECREF(array);
    return rf__py_result(times, status, function);
}

RF__PY_METHOD(trace_reuse,
              "trace_reuse(rows: int64 [lookups], n_rows: int) -> (gaps, distances), int64 [lookups] each") {
    static const char function[] = "trace_reuse";
    PyObject *object, *both = NULL;
    PyArrayObject *gaps = NULL, *distances = NULL;
    long long n_rows;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OL:trace_reuse", &object, &n_rows)) return NULL;
    PyArrayObject *array = rf__py_array(object, NPY_INT64, 1, function, "rows");
    if (array == NULL) return NULL;
    const npy_intp lookups = PyArray_DIM(array, 0);
    RF__PY_REFUSE_IF(n_rows < 0, PyExc_ValueError, "trace_reuse: n_rows is %lld; expected >= 0", n_rows);
    gaps = rf__py_new(NPY_INT64, lookups, -1);
    distances = rf__py_new(NPY_INT64, lookups, -1);
    if (gaps == NULL || distances == NULL) goto out;
    RF__PY_UNLOCKED(status = rf__trace_reuse(PyArray_DATA(array), lookups, n_rows, PyArray_DATA(gaps),
                                             PyArray_DATA(distances)));
    if (status == RF_OK) both = PyTuple_Pack(2, gaps, distances);
out:
    Py_XDECREF(distances);
    Py_XDECREF(gaps);
    Py_DECREF(array);
    return rf__py_result(both, status, function);
}
