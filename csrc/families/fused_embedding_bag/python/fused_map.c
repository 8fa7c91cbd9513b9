/* Mappings: features are described once, and each batch is mapped by its offsets. */
#include "families/fused_embedding_bag/python/fused_call.h"

#include <stdlib.h>

enum { MAPPING_FIELDS = sizeof(rf__fused_mapping) / sizeof(int32_t) };

static const char described_name[] = "recfuse.described";

static void described_free(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, described_name)); }

RF__PY_METHOD(fused_embedding_bag_describe,
              "fused_embedding_bag_describe(call, schedules: int32 [features, 5], warps: int) -> the "
              "description that fused_embedding_bag_map takes; call: (buffers: list[(address, numel, "
              "dtype)], features: int64 "
              "[features, 7], output_dtype: int, output_stride: int)") {
    static const char function[] = "fused_embedding_bag_describe";
    rf__py_fused_call call = {0};
    PyObject *call_object, *schedules_object, *result = NULL;
    PyArrayObject *schedules = NULL;
    rf__fused_described *described = NULL;
    rf_status status = RF_OK;
    int warps;
    if (!PyArg_ParseTuple(arguments, "OOi:fused_embedding_bag_describe", &call_object, &schedules_object,
                          &warps))
        return NULL;
    if (rf__py_call_read(call_object, function, &call) != 0) goto out;
    schedules = rf__py_schedules(schedules_object, 2, &call, function);
    if (schedules == NULL) goto out;
    RF_TRY(rf__py_call_check(&call.params, warps));
    RF_TRY(rf__fused_describe(&call.params, PyArray_DATA(schedules), &described));
    result = PyCapsule_New(described, described_name, described_free);
    if (result == NULL) free(described);
out:
    Py_XDECREF(schedules);
    rf__py_call_free(&call);
    return rf__py_result(result, status, function);
}

/* Returns an array [rows, 8] in `memory` if that is not None, else a new one; a new reference. */
static PyArrayObject *rows_new(PyObject *memory, int64_t rows, const char *function) {
    if (memory == Py_None) return rf__py_new(NPY_INT32, (npy_intp)rows, MAPPING_FIELDS);
    PyArrayObject *array = (PyArrayObject *)PyObject_CallFunction(memory, "L", (long long)rows);
    if (array == NULL) return NULL;
    if (PyArray_Check(array) && PyArray_TYPE(array) == NPY_INT32 && PyArray_ISCARRAY(array) &&
        PyArray_NDIM(array) == 2 && PyArray_DIM(array, 0) == rows && PyArray_DIM(array, 1) == MAPPING_FIELDS)
        return array;
    PyErr_Format(PyExc_TypeError,
                 "%s: memory returns another object; expected a writable int32 array [%lld, %d]", function,
                 (long long)rows, (int)MAPPING_FIELDS);
    Py_DECREF(array);
    return NULL;
}

/* Reads offsets into `batch`; returns a new reference to their owner, or NULL with an exception. */
static PyArrayObject *offsets_read(PyObject *object, int64_t n_features, rf__fused_batch *batch,
                                   const char *function) {
    const bool wide = PyArray_Check(object) && PyArray_TYPE((PyArrayObject *)object) == NPY_INT64;
    PyArrayObject *offsets = rf__py_array(object, wide ? NPY_INT64 : NPY_INT32, 1, function, "offsets");
    if (offsets == NULL) return NULL;
    const int64_t count = PyArray_DIM(offsets, 0);
    if (n_features == 0 || count < 1 || (count - 1) % n_features != 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: offsets has %lld elements; expected features * bags + 1 with %lld features",
                     function, (long long)count, (long long)n_features);
        Py_DECREF(offsets);
        return NULL;
    }
    batch->bags = (count - 1) / n_features;
    batch->offsets = PyArray_DATA(offsets);
    batch->offset_type = wide ? RF_INT64 : RF_INT32;
    return offsets;
}

RF__PY_METHOD(fused_embedding_bag_map, "fused_embedding_bag_map(described, offsets: int32 or int64 [features "
                                       "* bags + 1], sms: int = 132, stage: bool = True, memory: makes the "
                                       "array that is written to, from its rows = None) -> int32 [rows, 8]") {
    static const char function[] = "fused_embedding_bag_map";
    PyObject *capsule, *offsets_object, *memory = Py_None;
    int sms = 132, stage = 1;
    if (!PyArg_ParseTuple(arguments, "OO|ipO:fused_embedding_bag_map", &capsule, &offsets_object, &sms,
                          &stage, &memory))
        return NULL;
    const rf__fused_described *described = PyCapsule_GetPointer(capsule, described_name);
    if (described == NULL) return NULL;
    rf__fused_batch batch = {.may_stage = stage};
    PyArrayObject *offsets = offsets_read(offsets_object, described->input.n_features, &batch, function);
    if (offsets == NULL) return NULL;
    PyArrayObject *result = NULL;
    rf__fused_cut *cut = NULL;
    int64_t rows = 0;
    rf_status status = RF_OK;
    RF__PY_UNLOCKED(status =
                        rf__fused_cut_new(&described->input, &batch, sms, RF__FUSED_BLOCKS, &cut, &rows));
    if (status == RF_OK) result = rows_new(memory, rows, function);
    if (result != NULL) RF__PY_UNLOCKED(rf__fused_cut_write(cut, PyArray_DATA(result)));
    rf__fused_cut_free(cut);
    Py_DECREF(offsets);
    return rf__py_result(result, status, function);
}

RF__PY_METHOD(fused_embedding_bag_rows,
              "fused_embedding_bag_rows(mapping: int32 [rows, 8]) -> int: the rows before those of staged "
              "tables, whose lists follow a head; all rows if no table is staged") {
    static const char function[] = "fused_embedding_bag_rows";
    PyObject *object, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O:fused_embedding_bag_rows", &object)) return NULL;
    PyArrayObject *mapping = rf__py_array(object, NPY_INT32, 2, function, "mapping");
    if (mapping == NULL) return NULL;
    if (PyArray_DIM(mapping, 0) > 0 && PyArray_DIM(mapping, 1) == MAPPING_FIELDS)
        result = PyLong_FromLongLong(rf__fused_rows(PyArray_DATA(mapping)));
    else
        PyErr_Format(PyExc_ValueError,
                     "%s: mapping has another shape; expected [rows, %d] with a row or more", function,
                     (int)MAPPING_FIELDS);
    Py_DECREF(mapping);
    return result;
}
