/* recfuse._C: the texts of codes, so that Python does not number them again. */
#include "python/methods.h"

/* The lists that belong to no family. */
#define OWN_CODES(X)              \
    X(dtype, RF_DTYPE_LIST)       \
    X(int_type, RF_INT_TYPE_LIST) \
    X(pooling, RF_POOLING_LIST)

#define TEXT(name, text, ...) text,
#define RF__CODES(name, list) static const char *const name##_texts[] = {list(TEXT) NULL};
OWN_CODES(RF__CODES)
#include "families.h"

static const struct {
    const char *name;
    const char *const *texts; /* up to NULL; a code is a position */
} tables[] = {
#define RF__CODES(name, list) {#name, name##_texts},
    OWN_CODES(RF__CODES)
#include "families.h"
};

/* A new tuple of str; NULL with an exception. */
static PyObject *texts_tuple(const char *const *texts) {
    Py_ssize_t count = 0;
    while (texts[count] != NULL) count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *text = PyUnicode_FromString(texts[i]);
        if (text == NULL || PyTuple_SetItem(tuple, i, text) != 0) Py_CLEAR(tuple);
    }
    return tuple;
}

RF__PY_METHOD(codes,
              "codes() -> dict[str, tuple[str, ...]]: the texts of the codes of each list; a code is a "
              "position in its tuple") {
    if (!PyArg_ParseTuple(arguments, ":codes")) return NULL;
    PyObject *all = PyDict_New();
    for (size_t i = 0; all != NULL && i < sizeof tables / sizeof tables[0]; i++) {
        PyObject *texts = texts_tuple(tables[i].texts);
        if (texts == NULL || PyDict_SetItemString(all, tables[i].name, texts) != 0) Py_CLEAR(all);
        Py_XDECREF(texts);
    }
    return all;
}
