/* recfuse._C: whether torch.Tensor objects have their memory. The at::Tensor of such an object is one word of it, at an offset
 * that depends on torch's version: python/recfuse/_storage.py finds it. */
#include "python/methods.h"

#include <stdio.h>

#include "base/tensors/tensors.h"

RF__PY_METHOD(tensor_cell) {
    PyObject *tensor;
    unsigned long long implementation;
    Py_ssize_t size, at = 0;
    if (!PyArg_ParseTuple(arguments, "OKn:tensor_cell", &tensor, &implementation, &size)) return NULL;
    const unsigned long long *words = (const unsigned long long *)tensor;
    while ((at + 1) * (Py_ssize_t)sizeof *words <= size && words[at] != implementation) at++;
    const bool found = (at + 1) * (Py_ssize_t)sizeof *words <= size;
    return PyLong_FromSsize_t(found ? at * (Py_ssize_t)sizeof *words : -1);
}

RF__PY_METHOD(check_storages) {
    PyObject *type, *tensors;
    Py_ssize_t cell;
    const char *where, *name;
    char argument[64];
    if (!PyArg_ParseTuple(arguments, "O!nssO!:check_storages", &PyType_Type, &type, &cell, &where, &name,
                          &PyTuple_Type, &tensors))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (!PyObject_TypeCheck(tensor, (PyTypeObject *)type)) continue;
        rf_status status = rf__tensor_storage_check(name, (char *)tensor + cell);
        if (status == RF_OK) continue;
        snprintf(argument, sizeof argument, "%s[%zd]", name, i);
        if (PyTuple_Size(tensors) > 1) status = rf__tensor_storage_check(argument, (char *)tensor + cell);
        return rf__py_result(NULL, status, where);
    }
    Py_RETURN_NONE;
}
