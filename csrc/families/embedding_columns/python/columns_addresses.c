/* recfuse._C: where the tensors of a dict lie, read through DLPack's C exchange API. */
#include "python/methods.h"

#include "families/embedding_columns/tensors/columns_inputs.h"
#include "core/tensors.h"

/* What is used of that API, which torch.Tensor has as a capsule; the layouts are those of DLPack, major version 1. */
typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_index;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;
typedef struct dl_exchange {
    uint32_t major, minor;
    void *previous;
    void (*unused[3])(void);
    int (*tensor_of)(void *object, dl_tensor *tensor); /* borrows; -1: an exception is set */
} dl_exchange;
enum { DL_MAJOR = 1, DL_CPU = 1, DL_INTEGER = 0, DL_FLOAT = 2 };

/* A reading under way. Whatever is no plain tensor, or does not fit the others, ends it: callers then look at the batch
 * tensor by tensor, and find what is wrong. */
typedef struct reading {
    const dl_exchange *exchange;
    PyObject *type; /* torch.Tensor */
    Py_ssize_t cell; /* of tensor_cell */
    int64_t batch; /* -1: not known yet */
    int32_t device_type, device_index;
    bool any; /* tensor was read */
} reading;

/* Whether a tensor's storage has all of its elements. */
static bool has_memory(const reading *of, PyObject *object, const dl_tensor *tensor) {
    int64_t bytes, first, last = 0;
    if (!rf__tensor_storage((char *)object + of->cell, &bytes, &first)) return false;
    for (int32_t d = 0; d < tensor->ndim; d++) last += (tensor->shape[d] - 1) * tensor->strides[d];
    return (first + last + 1) * (tensor->bits / 8) <= bytes;
}

/* Whether a tensor is of that very type, on the device of the others, and has its memory. */
static bool tensor_read(reading *of, PyObject *object, dl_tensor *tensor) {
    if ((PyObject *)Py_TYPE(object) != of->type || of->exchange->tensor_of(object, tensor) != 0) return false;
    if (!of->any) {
        of->device_type = tensor->device_type;
        of->device_index = tensor->device_index;
        of->any = true;
    }
    if (tensor->device_type != of->device_type || tensor->device_index != of->device_index ||
        tensor->lanes != 1 || tensor->ndim < 1 || tensor->ndim > 2 || tensor->strides == NULL)
        return false;
    const bool empty = tensor->shape[0] == 0 || (tensor->ndim == 2 && tensor->shape[1] == 0);
    if (empty) return true;
    if (tensor->data == NULL || !has_memory(of, object, tensor)) return false;
    tensor->data = (char *)tensor->data + tensor->byte_offset;
    return true;
}

static bool type_read(const dl_tensor *tensor, rf_column_type *type) {
    if (tensor->code == DL_FLOAT && tensor->bits == 32)
        *type = RF_COLUMN_FLOAT32;
    else if (tensor->code == DL_INTEGER && (tensor->bits == 32 || tensor->bits == 64))
        *type = tensor->bits == 32 ? RF_COLUMN_INT32 : RF_COLUMN_INT64;
    else
        return false;
    return true;
}

/* Whether the numbers in memory are a tensor's values: the imaginary parts of conjugates lie there with the other sign. Such
 * views are never as dense as their memory. */
static bool is_plain(PyObject *object, const dl_tensor *tensor) {
    const int64_t width = tensor->ndim == 2 ? tensor->shape[1] : 1;
    if (tensor->strides[tensor->ndim - 1] == 1 && (tensor->ndim == 1 || tensor->strides[0] == width))
        return true;
    PyObject *negated = PyObject_CallMethod(object, "is_neg", NULL);
    const bool plain = negated == Py_False;
    Py_XDECREF(negated);
    return plain;
}

static bool batch_is(reading *of, int64_t batch) {
    if (of->batch < 0) of->batch = batch;
    return of->batch == batch;
}

static bool dense_read(reading *of, PyObject *object, rf_column_input *input) {
    dl_tensor tensor;
    if (!tensor_read(of, object, &tensor) || !type_read(&tensor, &input->type) ||
        !batch_is(of, tensor.shape[0]) || !is_plain(object, &tensor))
        return false;
    input->values = tensor.data;
    input->width = tensor.ndim == 2 ? tensor.shape[1] : 1;
    input->sample_stride = tensor.strides[0];
    input->value_stride = tensor.ndim == 2 ? tensor.strides[1] : 1;
    return input->width > 0;
}

static bool is_line(const dl_tensor *tensor) { return tensor->ndim == 1 && tensor->strides[0] == 1; }

/* Of a pair (values, offsets). */
static bool jagged_read(reading *of, PyObject *pair, rf_column_input *input) {
    dl_tensor values, offsets;
    if (PyTuple_Size(pair) != 2 || !tensor_read(of, PyTuple_GetItem(pair, 0), &values) ||
        !tensor_read(of, PyTuple_GetItem(pair, 1), &offsets) || !type_read(&values, &input->type) ||
        !is_line(&values) || !is_line(&offsets) || offsets.shape[0] == 0 ||
        !batch_is(of, offsets.shape[0] - 1) || offsets.code != DL_INTEGER ||
        (offsets.bits != 32 && offsets.bits != 64))
        return false;
    input->values = values.data;
    input->features = of->batch > 0 ? 1 : INT32_MAX; /* of no samples: as many as are asked for */
    input->lookups = values.shape[0];
    input->offsets = offsets.data;
    input->offset_type = offsets.bits == 32 ? RF_INT32 : RF_INT64;
    return true;
}

/* The entries by name, in a tuple that keeps them; how many are dense. NULL without an exception: one is not there, or is
 * neither a tensor nor a pair of them. */
static PyObject *entries_of(const reading *of, PyObject *batch, PyObject *names, Py_ssize_t *n_dense) {
    const Py_ssize_t count = PyTuple_Size(names);
    PyObject *entries = PyTuple_New(count);
    *n_dense = 0;
    for (Py_ssize_t i = 0; entries != NULL && i < count; i++) {
        PyObject *entry = PyDict_GetItemWithError(batch, PyTuple_GetItem(names, i));
        const bool dense = entry != NULL && (PyObject *)Py_TYPE(entry) == of->type;
        if (entry == NULL || (!dense && !PyTuple_CheckExact(entry))) {
            Py_DECREF(entries);
            return NULL;
        }
        Py_INCREF(entry);
        PyTuple_SetItem(entries, i, entry);
        *n_dense += dense;
    }
    return entries;
}

static void inputs_free(PyObject *capsule) {
    rf__columns_inputs_remove(PyCapsule_GetPointer(capsule, RF__PY_COLUMNS_INPUTS));
}

/* Reads the entries; false: one is no plain tensor or pair of them. `forms`: type and width of each input; `widths`: of each
 * entry. */
static bool entries_read(reading *of, PyObject *entries, Py_ssize_t jagged, rf_column_input *rows,
                         int64_t *forms, int64_t *widths) {
    Py_ssize_t dense = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(entries); i++) {
        PyObject *entry = PyTuple_GetItem(entries, i);
        const bool is_pair = PyTuple_CheckExact(entry);
        const Py_ssize_t at = is_pair ? jagged++ : dense++;
        if (!(is_pair ? jagged_read(of, entry, &rows[at]) : dense_read(of, entry, &rows[at]))) return false;
        forms[2 * at] = rows[at].type;
        forms[2 * at + 1] = widths[i] = rows[at].width;
    }
    return true;
}

RF__PY_METHOD(embedding_columns_addresses) {
    PyObject *batch, *names, *capsule, *owner = NULL, *entries = NULL, *result = NULL;
    PyArrayObject *forms = NULL, *widths = NULL;
    rf__columns_inputs *inputs = NULL;
    reading of = {.batch = -1};
    if (!PyArg_ParseTuple(arguments, "O!O!OnO:embedding_columns_addresses", &PyDict_Type, &batch,
                          &PyTuple_Type, &names, &of.type, &of.cell, &capsule))
        return NULL;
    of.exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (of.exchange == NULL) return NULL;
    if (of.exchange->major != DL_MAJOR || of.exchange->tensor_of == NULL)
        Py_RETURN_NONE; /* layouts that are not known */
    const Py_ssize_t count = PyTuple_Size(names);
    Py_ssize_t n_dense = 0;
    entries = entries_of(&of, batch, names, &n_dense);
    if (entries == NULL) goto out;
    forms = rf__py_new(NPY_INT64, (npy_intp)count, 2);
    widths = rf__py_new(NPY_INT64, (npy_intp)count, -1);
    inputs = rf__columns_inputs_new(count);
    if (inputs == NULL) PyErr_NoMemory();
    if (forms == NULL || widths == NULL || inputs == NULL) goto out;
    if (!entries_read(&of, entries, n_dense, inputs->rows, PyArray_DATA(forms), PyArray_DATA(widths))) {
        PyErr_Clear(); /* that of a tensor without memory, say */
        goto out;
    }
    inputs->batch = of.batch;
    inputs->on_gpu = of.device_type != DL_CPU;
    inputs->device = of.device_index;
    owner = PyCapsule_New(inputs, RF__PY_COLUMNS_INPUTS, inputs_free);
    if (owner == NULL) goto out;
    result = Py_BuildValue("OLOOOLii", owner, (long long)rf__columns_inputs_add(inputs), (PyObject *)forms,
                           (PyObject *)widths, entries, (long long)of.batch, (int)of.device_type,
                           (int)of.device_index);
out:
    if (owner == NULL) rf__columns_inputs_remove(inputs);
    Py_XDECREF(owner);
    Py_XDECREF(entries);
    Py_XDECREF(forms);
    Py_XDECREF(widths);
    if (result != NULL || PyErr_Occurred()) return result;
    Py_RETURN_NONE;
}
