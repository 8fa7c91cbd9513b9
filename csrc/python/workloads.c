/* recfuse._C: batches of heterogeneous models over NumPy arrays. */
#include "python/methods.h"
#include "tools/workloads.h"

#include "base/status.h"

static const rf__workload_group *as_groups(PyObject *object, const char *function, PyArrayObject **array) {
    const npy_intp fields = sizeof(rf__workload_group) / sizeof(double);
    *array = rf__py_array(object, NPY_DOUBLE, 2, function, "groups");
    if (*array == NULL) return NULL;
    if (PyArray_DIM(*array, 1) != fields) {
        PyErr_Format(PyExc_ValueError, "%s: groups has %zd columns, needed are %zd", function,
                     (Py_ssize_t)PyArray_DIM(*array, 1), (Py_ssize_t)fields);
        return NULL;
    }
    return PyArray_DATA(*array);
}

RF__PY_METHOD(workload_lengths) {
    PyObject *object, *lengths = NULL;
    PyArrayObject *array = NULL;
    long long batch;
    unsigned long long seed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OLK:workload_lengths", &object, &batch, &seed)) return NULL;
    const rf__workload_group *groups = as_groups(object, "workload_lengths", &array);
    if (groups == NULL) goto out;
    if (batch < 0) {
        PyErr_Format(PyExc_ValueError, "workload_lengths: batch is %lld, allowed is >= 0", batch);
        goto out;
    }
    npy_intp shape[2] = {PyArray_DIM(array, 0), (npy_intp)batch};
    lengths = PyArray_SimpleNew(2, shape, NPY_INT32);
    if (lengths == NULL) goto out;
    int32_t *data = PyArray_DATA((PyArrayObject *)lengths);
    Py_BEGIN_ALLOW_THREADS status = rf__workload_lengths(groups, shape[0], batch, seed, data);
    Py_END_ALLOW_THREADS lengths = rf__py_result(lengths, status, "workload_lengths");
out:
    Py_XDECREF(array);
    return lengths;
}

RF__PY_METHOD(workload_indices) {
    PyObject *group_object, *length_object, *indices = NULL;
    PyArrayObject *group_array = NULL, *length_array = NULL;
    double skew;
    unsigned long long model_seed, seed;
    int wide;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OOdKKp:workload_indices", &group_object, &length_object, &skew,
                          &model_seed, &seed, &wide)) {
        return NULL;
    }
    const rf__workload_group *groups = as_groups(group_object, "workload_indices", &group_array);
    if (groups == NULL) goto out;
    length_array = rf__py_array(length_object, NPY_INT32, 2, "workload_indices", "lengths");
    if (length_array == NULL) goto out;
    const npy_intp n_groups = PyArray_DIM(group_array, 0), batch = PyArray_DIM(length_array, 1);
    if (PyArray_DIM(length_array, 0) != n_groups) {
        PyErr_Format(PyExc_ValueError, "workload_indices: lengths has %zd rows, there are %zd groups",
                     (Py_ssize_t)PyArray_DIM(length_array, 0), (Py_ssize_t)n_groups);
        goto out;
    }
    const int32_t *lengths = PyArray_DATA(length_array);
    double total = 0; /* in double: a sum that no array can hold must not wrap */
    for (npy_intp i = 0; i < n_groups * batch; i++) total += groups[i / batch].features * lengths[i];
    if (!(total >= 0 && total < 0x1p40)) {
        PyErr_Format(PyExc_ValueError,
                     "workload_indices: lengths do not add up to a number of lookups in [0, 2^40)");
        goto out;
    }
    npy_intp lookups = (npy_intp)total;
    indices = PyArray_SimpleNew(1, &lookups, wide ? NPY_INT64 : NPY_INT32);
    if (indices == NULL) goto out;
    void *data = PyArray_DATA((PyArrayObject *)indices);
    Py_BEGIN_ALLOW_THREADS status = rf__workload_indices(groups, n_groups, batch, lengths, skew, model_seed,
                                                         seed, wide ? RF_INT64 : RF_INT32, lookups, data);
    Py_END_ALLOW_THREADS indices = rf__py_result(indices, status, "workload_indices");
out:
    Py_XDECREF(length_array);
    Py_XDECREF(group_array);
    return indices;
}

RF__PY_METHOD(batch_sizes) {
    double median, spread;
    long long maximum, count;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "ddLKL:batch_sizes", &median, &spread, &maximum, &seed, &count))
        return NULL;
    if (count < 0)
        return PyErr_Format(PyExc_ValueError, "batch_sizes: count is %lld, allowed is >= 0", count);
    npy_intp length = (npy_intp)count;
    PyObject *sizes = PyArray_SimpleNew(1, &length, NPY_INT64);
    if (sizes == NULL) return NULL;
    const rf_status status =
        rf__workload_batch_sizes(median, spread, maximum, seed, count, PyArray_DATA((PyArrayObject *)sizes));
    if (status != RF_OK) {
        Py_DECREF(sizes);
        return rf__py_raise(status, "batch_sizes");
    }
    return sizes;
}
