/* recfuse._C: random numbers that are the same on every platform, as NumPy arrays. */
#include "python/methods.h"
#include "core/tools/random.h"

RF__PY_METHOD(permutation,
              "permutation(count: int, seed: int) -> int64 [count], a permutation of 0 ... count - 1") {
    long long count;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "LK:permutation", &count, &seed)) return NULL;
    if (count < 0 || count > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "permutation: count is %lld; expected [0, 2^31)", count);
    PyArrayObject *order = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    if (order == NULL) return NULL;
    rf__random random = rf__random_stream(seed, RF__FOR_PERMUTATION, 0);
    rf__random_permutation(&random, PyArray_DATA(order), count);
    return (PyObject *)order;
}

RF__PY_METHOD(uniform, "uniform(count: int, bound: int, seed: int) -> int64 [count], each in [0, bound)") {
    long long count, bound;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "LLK:uniform", &count, &bound, &seed)) return NULL;
    if (count < 0 || bound < 1 || bound > INT32_MAX)
        return PyErr_Format(PyExc_ValueError,
                            "uniform: count is %lld and bound is %lld; expected >= 0 and [1, 2^31)", count,
                            bound);
    PyArrayObject *numbers = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    if (numbers == NULL) return NULL;
    int64_t *data = PyArray_DATA(numbers);
    rf__random random = rf__random_stream(seed, RF__FOR_UNIFORM, 0);
    for (long long i = 0; i < count; i++) data[i] = rf__random_below(&random, bound);
    return (PyObject *)numbers;
}
