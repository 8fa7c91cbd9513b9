/* recfuse._C: tensors of a batch, read into a list of inputs that an operator takes by its number. */
#include "python/methods.h"

#include "families/embedding_columns/tensors/columns_tensors.h"

/* The objects that are tensors. */
typedef struct tensor_form {
    PyObject *type; /* torch.Tensor, of which an object must be, not of a class that follows from it */
    Py_ssize_t cell; /* of tensor_cell */
} tensor_form;

static bool is_tensor(const tensor_form *form, PyObject *object) {
    return (PyObject *)Py_TYPE(object) == form->type;
}

static void *handle_of(const tensor_form *form, PyObject *object) { return (char *)object + form->cell; }

/* Returns true if the values in memory are those of the tensor. Imaginary parts of conjugates have the
 * opposite sign in memory; such a view has gaps. */
static bool is_plain(PyObject *object, bool has_gaps) {
    if (!has_gaps) return true;
    PyObject *negated = PyObject_CallMethod(object, "is_neg", NULL);
    const bool plain = negated == Py_False;
    Py_XDECREF(negated);
    return plain;
}

static bool dense_read(const tensor_form *form, PyObject *object, rf__columns_inputs *inputs, int64_t at) {
    const rf_column_input *input = &inputs->rows[at];
    return rf__columns_dense_read(inputs, at, handle_of(form, object)) == RF_OK &&
           is_plain(object, input->value_stride != 1 || input->sample_stride != input->width);
}

/* Reads (values, offsets) or (values, offsets, weights or None). Without values, weights without elements are
 * weights. */
static bool jagged_read(const tensor_form *form, PyObject *entry, rf__columns_inputs *inputs, int64_t at,
                        bool *is_weighted) {
    const Py_ssize_t count = PyTuple_Size(entry);
    void *handles[3] = {NULL};
    for (Py_ssize_t i = 0; i < count && count <= 3; i++) {
        PyObject *object = PyTuple_GetItem(entry, i);
        if (i == 2 && object == Py_None) continue;
        if (!is_tensor(form, object)) return false;
        handles[i] = handle_of(form, object);
    }
    if (count < 2 || count > 3 ||
        rf__columns_jagged_read(inputs, at, handles[0], handles[1], handles[2]) != RF_OK)
        return false;
    const rf_column_input *input = &inputs->rows[at];
    *is_weighted = handles[2] != NULL && (input->weights != NULL || input->lookups == 0);
    const bool one = input->lookups == 1; /* a single column is contiguous for any stride */
    return is_plain(PyTuple_GetItem(entry, 0), one) &&
           (handles[2] == NULL || is_plain(PyTuple_GetItem(entry, 2), one));
}

/* Reads entries, dense ones first; `forms` [entries][4]: type, width, features and whether weighted, of each
 * input; `widths` [entries]. `single`: jagged entries have one feature. */
static bool entries_read(const tensor_form *form, PyObject *entries, bool single, rf__columns_inputs *inputs,
                         int64_t *forms, int64_t *widths) {
    int64_t dense = 0, jagged = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(entries); i++)
        jagged += is_tensor(form, PyTuple_GetItem(entries, i));
    for (Py_ssize_t i = 0; i < PyTuple_Size(entries); i++) {
        PyObject *entry = PyTuple_GetItem(entries, i);
        const bool is_dense = is_tensor(form, entry);
        const int64_t at = is_dense ? dense++ : jagged++;
        const rf_column_input *input = &inputs->rows[at];
        bool is_weighted = false;
        if (!is_dense && !PyTuple_CheckExact(entry)) return false;
        if (!(is_dense ? dense_read(form, entry, inputs, at)
                       : jagged_read(form, entry, inputs, at, &is_weighted)))
            return false;
        if (single && !is_dense && inputs->batch > 0 && input->features != 1) return false;
        forms[4 * at] = input->type;
        forms[4 * at + 1] = widths[i] = input->width;
        forms[4 * at + 2] = input->features;
        forms[4 * at + 3] = is_weighted;
    }
    return true;
}

static void inputs_free(PyObject *capsule) {
    rf__columns_inputs_remove(PyCapsule_GetPointer(capsule, RF__COLUMNS_INPUTS_CAPSULE));
}

RF__PY_METHOD(
    embedding_columns_inputs,
    "embedding_columns_inputs(type: torch.Tensor, cell: of tensor_cell, entries: tuple of tensors and of "
    "(values, offsets[, weights]), batch: int, -1: of the first, with jagged entries of one feature) -> "
    "(owner: a capsule, while which lives the operator finds the inputs by their number; number: int; forms: "
    "int64 [inputs, 4], type, width, features and whether weighted, dense ones first; widths: int64 "
    "[entries], 0: jagged; batch; on_gpu: int; device: int), or None: an entry is no plain tensor or pair of "
    "them, does not fit the others, or has no memory. The caller keeps the tensors") {
    PyObject *entries, *owner = NULL, *result = NULL;
    PyArrayObject *forms = NULL, *widths = NULL;
    rf__columns_inputs *inputs = NULL;
    tensor_form form;
    long long batch;
    if (!PyArg_ParseTuple(arguments, "OnO!L:embedding_columns_inputs", &form.type, &form.cell, &PyTuple_Type,
                          &entries, &batch))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(entries);
    forms = rf__py_new(NPY_INT64, (npy_intp)count, 4);
    widths = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    inputs = rf__columns_inputs_new(count);
    if (inputs == NULL) PyErr_NoMemory();
    if (forms == NULL || widths == NULL || inputs == NULL) goto out;
    inputs->batch = batch;
    if (!entries_read(&form, entries, batch < 0, inputs, PyArray_DATA(forms), PyArray_DATA(widths))) {
        PyErr_Clear();
        goto out;
    }
    owner = PyCapsule_New(inputs, RF__COLUMNS_INPUTS_CAPSULE, inputs_free);
    if (owner == NULL) goto out;
    result =
        Py_BuildValue("OLOOLii", owner, (long long)rf__columns_inputs_add(inputs), (PyObject *)forms,
                      (PyObject *)widths, (long long)inputs->batch, (int)inputs->on_gpu, (int)inputs->device);
out:
    if (owner == NULL) rf__columns_inputs_remove(inputs);
    Py_XDECREF(owner);
    Py_XDECREF(forms);
    Py_XDECREF(widths);
    if (result != NULL || PyErr_Occurred()) return result;
    Py_RETURN_NONE;
}
