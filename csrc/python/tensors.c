/* recfuse._C: whether torch.Tensor objects have their memory. The at::Tensor of such an object is one word of
 * it, at an offset that depends on torch's version: python/recfuse/_storage.py finds it. */
#include "python/methods.h"

#include <stdio.h>

#include "core/validate.h"
#include "core/tensors.h"

RF__PY_METHOD(tensor_cell,
              "tensor_cell(tensor: torch.Tensor, implementation: its _cdata, size: bytes of the object) -> "
              "int, the first byte of the object's word that is `implementation`; -1: there is none") {
    PyObject *tensor;
    unsigned long long implementation;
    Py_ssize_t size, at = 0;
    if (!PyArg_ParseTuple(arguments, "OKn:tensor_cell", &tensor, &implementation, &size)) return NULL;
    const unsigned long long *words = (const unsigned long long *)tensor;
    while ((at + 1) * (Py_ssize_t)sizeof *words <= size && words[at] != implementation) at++;
    const bool read_integers = (at + 1) * (Py_ssize_t)sizeof *words <= size;
    return PyLong_FromSsize_t(read_integers ? at * (Py_ssize_t)sizeof *words : -1);
}

RF__PY_METHOD(
    check_storages,
    "check_storages(type: torch.Tensor, cell: of tensor_cell, where: str, name: str, tensors: tuple): raises "
    "ValueError where the storage of a tensor is too small for it; objects of other types pass") {
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

/* Returns true if an object of exactly that type is a tensor of integers. */
static bool integers_read(PyObject *type, Py_ssize_t cell, PyObject *object, int64_t dim,
                          rf__integers *integers) {
    return (PyObject *)Py_TYPE(object) == type && rf__tensor_integers((char *)object + cell, dim, integers);
}

/* Returns the number of lookups of a table; -1: its tensor does not have integers. */
static int64_t lookups_of(PyObject *type, Py_ssize_t cell, PyObject *indices, Py_ssize_t table) {
    PyObject *object =
        PyList_CheckExact(indices) ? PyList_GetItem(indices, table) : PyTuple_GetItem(indices, table);
    rf__integers read_integers;
    return integers_read(type, cell, object, 1, &read_integers) ? read_integers.sizes[0] : -1;
}

/* Writes the offsets of a table with `first` added to each. False: they do not begin with 0. */
static bool offsets_join(const rf__integers *offsets, int64_t table, int64_t first, int64_t *joined) {
    const int64_t bags = offsets->sizes[1], size = offsets->type == RF_INT64 ? 8 : 4;
    if (bags == 0) return true;
    const char *row = (const char *)offsets->data + table * offsets->strides[0] * size;
    rf__offsets_copy(row, offsets->type, offsets->strides[1], bags, first, joined);
    return joined[0] == first;
}

RF__PY_METHOD(join_offsets,
              "join_offsets(type: torch.Tensor, cell: of tensor_cell, offsets: torch.Tensor [tables, bags], "
              "indices: torch.Tensor [tables, n] or a list or tuple of a tensor [n] a table, joined: int64 "
              "torch.Tensor [tables * bags + 1], which is written) -> bool: whether the indices table after "
              "table have the offsets `joined`; False: a tensor is no plain one of integers on the CPU, has "
              "no memory, or another shape, or offsets of a table do not begin with 0") {
    PyObject *type, *offsets, *indices, *joined;
    Py_ssize_t cell;
    rf__integers from, index_rows, to;
    if (!PyArg_ParseTuple(arguments, "OnOOO:join_offsets", &type, &cell, &offsets, &indices, &joined))
        return NULL;
    const bool is_list = PyList_CheckExact(indices) || PyTuple_CheckExact(indices);
    if (!integers_read(type, cell, offsets, 2, &from) || !integers_read(type, cell, joined, 1, &to) ||
        (!is_list && !integers_read(type, cell, indices, 2, &index_rows)))
        Py_RETURN_FALSE;
    const int64_t tables = from.sizes[0], bags = from.sizes[1];
    if ((is_list ? PyObject_Size(indices) : index_rows.sizes[0]) != tables || to.type != RF_INT64 ||
        to.strides[0] != 1 || to.sizes[0] != tables * bags + 1)
        Py_RETURN_FALSE;
    int64_t first = 0, *out = to.data;
    for (int64_t table = 0; table < tables; table++) {
        const int64_t lookups = is_list ? lookups_of(type, cell, indices, table) : index_rows.sizes[1];
        if (lookups < 0 || !offsets_join(&from, table, first, out + table * bags)) Py_RETURN_FALSE;
        first += lookups;
    }
    out[tables * bags] = first;
    Py_RETURN_TRUE;
}
