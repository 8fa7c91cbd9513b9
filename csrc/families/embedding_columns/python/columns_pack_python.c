/* recfuse._C: the inputs of a batch, packed into one buffer. */
#include "python/methods.h"

#include <stdlib.h>

#include "families/embedding_columns/tensors/columns_pack.h"

static PyObject *parts_of(const rf__columns_packing *packing) {
    PyObject *parts = PyList_New(packing->n_parts);
    for (int32_t i = 0; parts != NULL && i < packing->n_parts; i++) {
        const rf__columns_part *part = &packing->parts[i];
        PyObject *item = Py_BuildValue("iiLLL", (int)part->list, (int)part->type, (long long)part->rows,
                                       (long long)part->columns, (long long)part->at);
        if (item == NULL)
            Py_CLEAR(parts);
        else
            PyList_SetItem(parts, i, item);
    }
    return parts;
}

RF__PY_METHOD(embedding_columns_pack,
              "embedding_columns_pack(owner: of embedding_columns_inputs, on the CPU; groups: int32 "
              "[inputs], of inputs that become one, dense ones first; n_groups: int; memory: address or 0, "
              "capacity: its bytes) -> (bytes needed, parts: list[(field of Inputs, type, rows, columns or "
              "-1, byte)]), which are there if there is memory") {
    static const char function[] = "embedding_columns_pack";
    PyObject *capsule, *groups, *parts = NULL, *result = NULL;
    PyArrayObject *group_of = NULL;
    rf_status status = RF_OK;
    long long capacity;
    unsigned long long memory;
    rf__columns_packing packing = {0};
    if (!PyArg_ParseTuple(arguments, "OOiKL:embedding_columns_pack", &capsule, &groups, &packing.n_groups,
                          &memory, &capacity))
        return NULL;
    packing.inputs = PyCapsule_GetPointer(capsule, RF__COLUMNS_INPUTS_CAPSULE);
    if (packing.inputs == NULL) return NULL;
    group_of = rf__py_array(groups, NPY_INT32, 1, function, "groups");
    if (group_of == NULL) return NULL;
    RF__PY_REFUSE_IF(PyArray_DIM(group_of, 0) != packing.inputs->count || packing.n_groups < 0,
                     PyExc_ValueError, "%s: groups has %lld elements; expected %lld, as inputs", function,
                     (long long)PyArray_DIM(group_of, 0), (long long)packing.inputs->count);
    packing.group_of = PyArray_DATA(group_of);
    RF__PY_UNLOCKED(status = rf__columns_pack_plan(&packing));
    if (status != RF_OK) goto out;
    RF__PY_REFUSE_IF(memory != 0 && packing.bytes > capacity, PyExc_ValueError,
                     "%s: the batch needs %lld bytes; expected the %lld of the buffer at most", function,
                     (long long)packing.bytes, capacity);
    if (memory != 0) RF__PY_UNLOCKED(rf__columns_pack(&packing, rf__py_pointer(memory)));
    parts = parts_of(&packing);
    if (parts != NULL) result = Py_BuildValue("LN", (long long)packing.bytes, parts);
out:
    free(packing.groups);
    free(packing.parts);
    Py_DECREF(group_of);
    return rf__py_result(result, status, function);
}
