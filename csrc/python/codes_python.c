/* recfuse._C: the texts of codes and the fields of records, so that Python does not number them again. */
#include "python/methods.h"

/* The lists that belong to no family. */
#define CORE_CODES(X)             \
    X(dtype, RF_DTYPE_LIST)       \
    X(int_type, RF_INT_TYPE_LIST) \
    X(pooling, RF_POOLING_LIST)

#define TEXT(name, text, ...) text,
#define FIELD(type, name) #name,
#define RF__CODES(name, list) static const char *const name##_texts[] = {list(TEXT) NULL};
#define RF__RECORD(name, list) static const char *const name##_texts[] = {list(FIELD) NULL};
CORE_CODES(RF__CODES)
#include "families.h"

typedef struct text_list {
    const char *name;
    const char *const *texts; /* up to NULL */
} text_list;

#define ENTRY(name, list) {#name, name##_texts},
static const text_list codes[] = {
#define RF__CODES ENTRY
    CORE_CODES(ENTRY)
#include "families.h"
};
static const text_list records[] = {
#define RF__RECORD ENTRY
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

/* A new dict of tuples; NULL with an exception. */
static PyObject *lists_dict(const text_list *lists, size_t count) {
    PyObject *texts_by_list = PyDict_New();
    for (size_t i = 0; texts_by_list != NULL && i < count; i++) {
        PyObject *texts = texts_tuple(lists[i].texts);
        if (texts == NULL || PyDict_SetItemString(texts_by_list, lists[i].name, texts) != 0)
            Py_CLEAR(texts_by_list);
        Py_XDECREF(texts);
    }
    return texts_by_list;
}

RF__PY_METHOD(codes,
              "codes() -> dict[str, tuple[str, ...]]: the texts of the codes of each list; a code is a "
              "position in its tuple") {
    if (!PyArg_ParseTuple(arguments, ":codes")) return NULL;
    return lists_dict(codes, sizeof codes / sizeof codes[0]);
}

RF__PY_METHOD(records,
              "records() -> dict[str, tuple[str, ...]]: the fields of each struct whose arrays are arrays of "
              "integers, in their order") {
    if (!PyArg_ParseTuple(arguments, ":records")) return NULL;
    return lists_dict(records, sizeof records / sizeof records[0]);
}
