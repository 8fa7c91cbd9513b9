/* The functions of recfuse._C: one list, which module.c makes its method table from. Only files in
 * this folder and in families' folders python/ know CPython and NumPy. They keep to the limited API of both.
 *
 * module.c defines RF__IMPORT_NUMPY before it includes this, and calls import_array1 in its exec slot. */
#ifndef RECFUSE_PYTHON_METHODS_H
#define RECFUSE_PYTHON_METHODS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#ifndef NPY_TARGET_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#endif
#define PY_ARRAY_UNIQUE_SYMBOL rf__numpy_api
#ifndef RF__IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "gpu/launches/launches.h"
#include "recfuse.h"

/* The functions that belong to no family: rf__py_<name> with its docstring, rf__py_<name>_text. All take
 * positional arguments (METH_VARARGS). */
#define RF__PYTHON_OWN_FUNCTIONS(X) \
    X(workload_lengths)             \
    X(workload_indices)             \
    X(batch_sizes)                  \
    X(permutation)                  \
    X(uniform)                      \
    X(trace_curve)                  \
    X(trace_times)                  \
    X(trace_reuse)                  \
    X(codes)                        \
    X(records)                      \
    X(tensor_cell)                  \
    X(check_storages)               \
    X(join_offsets)                 \
    X(jit_status)                   \
    X(gpus)                         \
    X(gpu)                          \
    X(explain_begin)                \
    X(explain_end)                  \
    X(explain_lowers)               \
    X(explain_gpu)                  \
    X(kernel_compile)               \
    X(occupancy)

/* The docstring and the head of a function of the list. */
#define RF__PY_METHOD(name, text)             \
    const char rf__py_##name##_text[] = text; \
    PyObject *rf__py_##name(__attribute__((unused)) PyObject *module, PyObject *arguments)

#define RF__PYTHON_FUNCTION(name)             \
    extern const char rf__py_##name##_text[]; \
    PyObject *rf__py_##name(PyObject *module, PyObject *arguments);
RF__PYTHON_OWN_FUNCTIONS(RF__PYTHON_FUNCTION)
#include "families.h"

/* If the condition is true, raises and jumps to the label `out`. */
#define RF__PY_REFUSE_IF(condition, exception, ...) \
    do {                                            \
        if (condition) {                            \
            PyErr_Format(exception, __VA_ARGS__);   \
            goto out;                               \
        }                                           \
    } while (0)
/* Runs a statement while other threads may run Python. */
#define RF__PY_UNLOCKED(statement)        \
    do {                                  \
        Py_BEGIN_ALLOW_THREADS statement; \
        Py_END_ALLOW_THREADS              \
    } while (0)
/* Returns `result` (NULL: an exception is set) if `status` is RF_OK; otherwise drops it, and raises the
 * exception of `status` with the text "<function>: <detail>". An object or an array. */
PyObject *rf__py_result(void *result, rf_status status, const char *function);

/* Returns `object` as a C-contiguous array of the type and number of dimensions, converted by NumPy's safe
 * casts only; a new reference, or NULL with TypeError or ValueError. */
PyArrayObject *rf__py_array(PyObject *object, int type, int dimensions, const char *function,
                            const char *argument);

/* Returns a new array [rows, columns], or [rows] if `columns` is -1; NULL with an exception. */
PyArrayObject *rf__py_new(int type, npy_intp rows, npy_intp columns);

/* Converts an address on a GPU, or 0. */
static inline void *rf__py_pointer(unsigned long long address) { return (void *)(uintptr_t)address; }

/* Returns a dict of `info` and `details`, and steals the reference to `details`; NULL with an exception, also if
 * `details` is NULL. */
PyObject *rf__py_kernel(const rf__kernel_info *info, PyObject *details);

/* Appends a dict of each launch to a list; -1 with an exception. */
int rf__py_launches(const rf__gpu *gpu, const rf__launches *launches, PyObject *list);

#endif
