/* recfuse._C: programs of embedding columns. */
#include "python/methods.h"

#include <string.h>

/* An array [n, fields] of int64. */
static PyArrayObject *fields_read(PyObject *object, npy_intp fields, const char *function,
                                  const char *argument) {
    PyArrayObject *array = rf__py_array(object, NPY_INT64, 2, function, argument);
    if (array == NULL || PyArray_DIM(array, 1) == fields) return array;
    PyErr_Format(PyExc_ValueError, "%s: %s has %zd columns; expected %zd", function, argument,
                 (Py_ssize_t)PyArray_DIM(array, 1), (Py_ssize_t)fields);
    Py_DECREF(array);
    return NULL;
}

RF__PY_METHOD(embedding_columns_program,
              "embedding_columns_program(columns: int64 [n, 17], sources: int64 [n, 5], steps: int64 [n, 3], "
              "boundaries: float32 [n], vocabulary: int64 [n]) -> int64 [words]; fields as in "
              "recfuse/embedding_columns.h") {
    static const char function[] = "embedding_columns_program";
    enum { COLUMNS, SOURCES, STEPS, BOUNDARIES, VOCABULARY, COUNT };
#define FIELDS(type) (npy_intp)(sizeof(type) / sizeof(int64_t))
    PyObject *objects[COUNT];
    PyArrayObject *arrays[COUNT] = {NULL}, *result = NULL;
    int64_t *program = NULL, words = 0;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OOOOO:embedding_columns_program", &objects[COLUMNS], &objects[SOURCES],
                          &objects[STEPS], &objects[BOUNDARIES], &objects[VOCABULARY]))
        return NULL;
    arrays[COLUMNS] = fields_read(objects[COLUMNS], FIELDS(rf_column), function, "columns");
    if (arrays[COLUMNS] == NULL) goto out;
    arrays[SOURCES] = fields_read(objects[SOURCES], FIELDS(rf_column_source), function, "sources");
    if (arrays[SOURCES] == NULL) goto out;
    arrays[STEPS] = fields_read(objects[STEPS], FIELDS(rf_column_step), function, "steps");
    if (arrays[STEPS] == NULL) goto out;
    arrays[BOUNDARIES] = rf__py_array(objects[BOUNDARIES], NPY_FLOAT, 1, function, "boundaries");
    if (arrays[BOUNDARIES] == NULL) goto out;
    arrays[VOCABULARY] = rf__py_array(objects[VOCABULARY], NPY_INT64, 1, function, "vocabulary");
    if (arrays[VOCABULARY] == NULL) goto out;
#undef FIELDS
    const rf_columns columns = {.columns = PyArray_DATA(arrays[COLUMNS]),
                                .n_columns = PyArray_DIM(arrays[COLUMNS], 0),
                                .sources = PyArray_DATA(arrays[SOURCES]),
                                .n_sources = PyArray_DIM(arrays[SOURCES], 0),
                                .steps = PyArray_DATA(arrays[STEPS]),
                                .n_steps = PyArray_DIM(arrays[STEPS], 0),
                                .boundaries = PyArray_DATA(arrays[BOUNDARIES]),
                                .n_boundaries = PyArray_DIM(arrays[BOUNDARIES], 0),
                                .vocabulary = PyArray_DATA(arrays[VOCABULARY]),
                                .n_vocabulary = PyArray_DIM(arrays[VOCABULARY], 0)};
    RF__PY_UNLOCKED(status = rf_embedding_columns_program(&columns, &program, &words));
    if (status != RF_OK) goto out;
    result = rf__py_new(NPY_INT64, (npy_intp)words, -1);
    if (result != NULL) memcpy(PyArray_DATA(result), program, (size_t)words * sizeof *program);
out:
    rf_embedding_columns_program_free(program);
    for (int i = 0; i < COUNT; i++) Py_XDECREF(arrays[i]);
    return rf__py_result(result, status, function);
}
