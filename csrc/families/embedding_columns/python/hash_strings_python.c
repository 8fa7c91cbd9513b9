/* recfuse._C: the hashes of strings in buffers, in NumPy's arrays, or as objects. */
#include "python/methods.h"

#include <stdlib.h>
#include <string.h>

#include "families/embedding_columns/python/padded_strings.h"
#include "core/tools/threads.h"

RF__PY_METHOD(hash_strings,
              "hash_strings(bytes: int, n_bytes: int, offsets: int, offset_type: int, count: int, seed: int, "
              "threads: int) -> int64 [count]; bytes and offsets are addresses") {
    unsigned long long bytes, offsets, seed;
    long long n_bytes, count, threads;
    int offset_type;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "KLKiLKL:hash_strings", &bytes, &n_bytes, &offsets, &offset_type, &count,
                          &seed, &threads))
        return NULL;
    PyArrayObject *hashes = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    if (hashes == NULL) return NULL;
    const rf_executor executor = rf__threads_executor(threads);
    int64_t *to = PyArray_DATA(hashes);
    RF__PY_UNLOCKED(status = rf_hash_strings_cpu(rf__py_pointer(bytes), n_bytes, rf__py_pointer(offsets),
                                                 (rf_int_type)offset_type, count, seed, to, &executor));
    return rf__py_result(hashes, status, "hash_strings");
}

RF__PY_METHOD(hash_padded_strings, "hash_padded_strings(strings: S or U [count], contiguous and native, "
                                   "seed: int, threads: int) -> int64 [count]") {
    PyObject *object;
    PyArrayObject *hashes = NULL;
    unsigned long long seed;
    long long threads;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OKL:hash_padded_strings", &object, &seed, &threads)) return NULL;
    PyArrayObject *array = (PyArrayObject *)object;
    RF__PY_REFUSE_IF(!PyArray_Check(object) || !PyArray_ISCARRAY_RO(array) || PyArray_NDIM(array) != 1 ||
                         (PyArray_TYPE(array) != NPY_STRING && PyArray_TYPE(array) != NPY_UNICODE),
                     PyExc_TypeError,
                     "hash_strings: the array has another form; expected a contiguous array [count] of S or "
                     "U in this machine's byte order");
    const npy_intp count = PyArray_DIM(array, 0);
    const bool code_points = PyArray_TYPE(array) == NPY_UNICODE;
    const rf__padded_strings strings = {PyArray_DATA(array), count,
                                        PyArray_ITEMSIZE(array) / (code_points ? 4 : 1), code_points};
    if ((hashes = rf__py_new(NPY_INT64, count, -1)) == NULL) goto out;
    const rf_executor executor = rf__threads_executor(threads);
    int64_t *to = PyArray_DATA(hashes);
    RF__PY_UNLOCKED(status = rf__hash_padded_strings(&strings, seed, to, &executor));
out:
    return rf__py_result(hashes, status, "hash_strings");
}

/* Strings one after another. */
typedef struct text {
    char *bytes;
    size_t n_bytes, capacity;
} text;

static bool text_add(text *joined, const char *bytes, size_t n_bytes) {
    if (n_bytes >= joined->capacity - joined->n_bytes) { /* bytes is never NULL */
        const size_t capacity = 2 * joined->capacity + n_bytes + 4096;
        char *grown = realloc(joined->bytes, capacity);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        joined->bytes = grown;
        joined->capacity = capacity;
    }
    memcpy(joined->bytes + joined->n_bytes, bytes, n_bytes);
    joined->n_bytes += n_bytes;
    return true;
}

static bool is_missing(PyObject *object) {
    if (object == Py_None) return true;
    if (!PyFloat_Check(object)) return false;
    const double value = PyFloat_AsDouble(object);
    return value != value;
}

/* Adds strings[at], which is not missing; false with an exception. */
static bool object_add(text *joined, PyObject *object, Py_ssize_t at) {
    const char *bytes = NULL;
    Py_ssize_t n_bytes = 0;
    if (PyUnicode_Check(object)) {
        bytes = PyUnicode_AsUTF8AndSize(object, &n_bytes);
        RF__PY_REFUSE_IF(bytes == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError), PyExc_ValueError,
                         "hash_strings: strings[%zd] has a surrogate, which is no character", at);
        if (bytes == NULL) goto out;
    } else {
        RF__PY_REFUSE_IF(!PyBytes_Check(object), PyExc_TypeError,
                         "hash_strings: strings[%zd] is of %S; expected a str, bytes or None", at,
                         (PyObject *)Py_TYPE(object));
        bytes = PyBytes_AsString(object);
        n_bytes = PyBytes_Size(object);
    }
    return text_add(joined, bytes, (size_t)n_bytes);
out:
    return false;
}

/* The strings are copied first: without the lock other threads may change the list. */
RF__PY_METHOD(
    hash_string_objects,
    "hash_string_objects(strings: list of str, bytes, None or NaN, seed: int, threads: int) -> (hashes: "
    "int64 [present], offsets: int64 [strings + 1]), of which string i has one hash or none") {
    PyObject *list, *both = NULL;
    PyArrayObject *hashes = NULL, *present = NULL;
    text joined = {0};
    int64_t *offsets = NULL;
    unsigned long long seed;
    long long threads;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "O!KL:hash_string_objects", &PyList_Type, &list, &seed, &threads))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    offsets = malloc(((size_t)count + 1) * sizeof *offsets);
    RF__PY_REFUSE_IF(offsets == NULL, PyExc_MemoryError, "hash_strings: no memory for %zd offsets", count);
    if ((present = rf__py_new(NPY_INT64, count + 1, -1)) == NULL) goto out;
    int64_t *positions = PyArray_DATA(present);
    positions[0] = offsets[0] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyList_GetItem(list, i);
        if (object == NULL) goto out;
        positions[i + 1] = positions[i];
        if (is_missing(object)) continue;
        if (!object_add(&joined, object, i)) goto out;
        offsets[++positions[i + 1]] = (int64_t)joined.n_bytes;
    }
    const int64_t strings = positions[count];
    if ((hashes = rf__py_new(NPY_INT64, (npy_intp)strings, -1)) == NULL) goto out;
    const rf_executor executor = rf__threads_executor(threads);
    int64_t *to = PyArray_DATA(hashes);
    RF__PY_UNLOCKED(status = rf_hash_strings_cpu(joined.bytes, (int64_t)joined.n_bytes, offsets, RF_INT64,
                                                 strings, seed, to, &executor));
    if (status == RF_OK) both = PyTuple_Pack(2, hashes, present);
out:
    free(offsets);
    free(joined.bytes);
    Py_XDECREF(present);
    Py_XDECREF(hashes);
    return rf__py_result(both, status, "hash_strings");
}
