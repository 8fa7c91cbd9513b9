/* recfuse._C: batches of heterogeneous models over NumPy arrays. */
#include "python/methods.h"
#include "core/tools/workloads.h"

#include "core/status.h"

static const rf__workload_group *as_groups(PyObject *object, const char *function, PyArrayObject **array) {
    const npy_intp fields = sizeof(rf__workload_group) / sizeof(double);
    *array = rf__py_array(object, NPY_DOUBLE, 2, function, "groups");
    if (*array == NULL) return NULL;
    if (PyArray_DIM(*array, 1) == fields) return PyArray_DATA(*array);
    PyErr_Format(PyExc_ValueError, "%s: groups has %zd columns; expected %zd", function,
                 (Py_ssize_t)PyArray_DIM(*array, 1), (Py_ssize_t)fields);
    return NULL;
}

RF__PY_METHOD(workload_lengths,
              "workload_lengths(groups: float64 [G, 6], batch: int, seed: int) -> int32 [G, batch]") {
    static const char function[] = "workload_lengths";
    PyObject *object;
    PyArrayObject *array = NULL, *lengths = NULL;
    long long batch;
    unsigned long long seed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OLK:workload_lengths", &object, &batch, &seed)) return NULL;
    const rf__workload_group *groups = as_groups(object, function, &array);
    if (groups == NULL) goto out;
    RF__PY_REFUSE_IF(batch < 0, PyExc_ValueError, "workload_lengths: batch is %lld; expected >= 0", batch);
    const npy_intp n_groups = PyArray_DIM(array, 0);
    if ((lengths = rf__py_new(NPY_INT32, n_groups, (npy_intp)batch)) == NULL) goto out;
    RF__PY_UNLOCKED(status = rf__workload_lengths(groups, n_groups, batch, seed, PyArray_DATA(lengths)));
out:
    Py_XDECREF(array);
    return rf__py_result(lengths, status, function);
}

RF__PY_METHOD(workload_indices,
              "workload_indices(groups: float64 [G, 6], lengths: int32 [G, batch], skew: float, model_seed: "
              "int, seed: int, wide: bool) -> int64 [lookups] where wide, else int32") {
    static const char function[] = "workload_indices";
    PyObject *group_object, *length_object;
    PyArrayObject *group_array = NULL, *length_array = NULL, *indices = NULL;
    double skew;
    unsigned long long model_seed, seed;
    int wide;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OOdKKp:workload_indices", &group_object, &length_object, &skew,
                          &model_seed, &seed, &wide))
        return NULL;
    const rf__workload_group *groups = as_groups(group_object, function, &group_array);
    if (groups == NULL) goto out;
    length_array = rf__py_array(length_object, NPY_INT32, 2, function, "lengths");
    if (length_array == NULL) goto out;
    const npy_intp n_groups = PyArray_DIM(group_array, 0), batch = PyArray_DIM(length_array, 1);
    RF__PY_REFUSE_IF(PyArray_DIM(length_array, 0) != n_groups, PyExc_ValueError,
                     "workload_indices: lengths has %zd rows; expected %zd, as groups has",
                     (Py_ssize_t)PyArray_DIM(length_array, 0), (Py_ssize_t)n_groups);
    const int32_t *lengths = PyArray_DATA(length_array);
    double total = 0; /* in double: a sum that no array can hold must not wrap */
    for (npy_intp i = 0; i < n_groups * batch; i++) total += groups[i / batch].features * lengths[i];
    RF__PY_REFUSE_IF(!(total >= 0 && total < 0x1p40), PyExc_ValueError,
                     "%s: lengths do not add up to a number of lookups in [0, 2^40)", function);
    const npy_intp lookups = (npy_intp)total;
    if ((indices = rf__py_new(wide ? NPY_INT64 : NPY_INT32, lookups, -1)) == NULL) goto out;
    const rf__workload_draw draw = {.skew = skew,
                                    .model_seed = model_seed,
                                    .seed = seed,
                                    .index_type = wide ? RF_INT64 : RF_INT32,
                                    .lookups = lookups,
                                    .indices = PyArray_DATA(indices)};
    RF__PY_UNLOCKED(status = rf__workload_indices(groups, n_groups, batch, lengths, &draw));
out:
    Py_XDECREF(length_array);
    Py_XDECREF(group_array);
    return rf__py_result(indices, status, function);
}

RF__PY_METHOD(
    batch_sizes,
    "batch_sizes(median: float, spread: float, maximum: int, seed: int, count: int) -> int64 [count]") {
    double median, spread;
    long long maximum, count;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "ddLKL:batch_sizes", &median, &spread, &maximum, &seed, &count))
        return NULL;
    if (count < 0) return PyErr_Format(PyExc_ValueError, "batch_sizes: count is %lld; expected >= 0", count);
    PyArrayObject *sizes = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    if (sizes == NULL) return NULL;
    const rf_status status =
        rf__workload_batch_sizes(median, spread, maximum, seed, count, PyArray_DATA(sizes));
    return rf__py_result(sizes, status, "batch_sizes");
}
