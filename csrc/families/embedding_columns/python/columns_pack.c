/* recfuse._C: the inputs of embedding_columns_addresses, brought into one buffer. */
#include "python/methods.h"

#include "families/embedding_columns/tensors/columns_inputs.h"

#include <string.h>

/* Parts of the buffer: for each type of dense inputs their values [values, batch], then for each type of jagged ones all
 * their values, then these groups' offsets. Groups are in the order in which their types appear. */
enum { TYPES = 3, ALIGNMENT = 64 };

typedef struct group {
    int64_t inputs, values; /* dense: of a sample; jagged: of all samples */
    int64_t at, offsets_at; /* bytes */
    bool wide; /* offsets are int64 */
} group;

typedef struct packing {
    const rf_column_input *inputs;
    int64_t count, batch;
    group dense[TYPES], jagged[TYPES]; /* by type */
    int order[2][TYPES], n_groups[2]; /* types of dense, of jagged ones */
    int64_t bytes;
} packing;

static int64_t value_bytes(rf_column_type type) { return type == RF_COLUMN_INT64 ? 8 : 4; }

static int64_t offset_of(const rf_column_input *input, int64_t at) {
    return input->offset_type == RF_INT64 ? ((const int64_t *)input->offsets)[at]
                                          : ((const int32_t *)input->offsets)[at];
}

/* Values up to the last offset; all of them where that is no position among them. */
static int64_t used_values(const rf_column_input *input, int64_t batch) {
    const int64_t end = offset_of(input, batch);
    return end >= 0 && end < input->lookups ? end : input->lookups;
}

static int64_t room_take(packing *of, int64_t bytes) {
    const int64_t at = of->bytes;
    of->bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

static void plan(packing *of) {
    for (int64_t i = 0; i < of->count; i++) {
        const rf_column_input *input = &of->inputs[i];
        const bool is_jagged = input->width == 0;
        group *own = is_jagged ? &of->jagged[input->type] : &of->dense[input->type];
        if (own->inputs++ == 0) of->order[is_jagged][of->n_groups[is_jagged]++] = (int)input->type;
        own->values += is_jagged ? used_values(input, of->batch) : input->width;
        own->wide = own->wide || (is_jagged && input->offset_type == RF_INT64);
    }
    for (int g = 0; g < of->n_groups[0]; g++) {
        group *own = &of->dense[of->order[0][g]];
        own->at = room_take(of, own->values * of->batch * value_bytes((rf_column_type)of->order[0][g]));
    }
    for (int g = 0; g < of->n_groups[1]; g++) {
        group *own = &of->jagged[of->order[1][g]];
        own->at = room_take(of, own->values * value_bytes((rf_column_type)of->order[1][g]));
        own->wide = own->wide || (own->inputs > 1 && own->values > INT32_MAX);
    }
    for (int g = 0; g < of->n_groups[1]; g++) {
        group *own = &of->jagged[of->order[1][g]];
        own->offsets_at = room_take(of, (own->inputs * of->batch + 1) * (own->wide ? 8 : 4));
    }
}

/* Each value of all samples, one value after another. */
static void dense_copy(const packing *of, const rf_column_input *input, char *to) {
    const int64_t size = value_bytes(input->type);
    for (int64_t v = 0; v < input->width; v++, to += of->batch * size) {
        const char *from = (const char *)input->values + v * input->value_stride * size;
        if (input->sample_stride == 1) {
            if (of->batch > 0) memcpy(to, from, (size_t)(of->batch * size));
            continue;
        }
        for (int64_t s = 0; s < of->batch; s++)
            memcpy(to + s * size, from + s * input->sample_stride * size, (size_t)size);
    }
}

static void offset_put(char *offsets, bool wide, int64_t at, int64_t value) {
    if (wide)
        ((int64_t *)offsets)[at] = value;
    else
        ((int32_t *)offsets)[at] = (int32_t)value;
}

/* Offsets are any numbers of a caller's: a sum that does not fit is wrong as well. */
static int64_t wrapping_sum(int64_t left, int64_t right) {
    return (int64_t)((uint64_t)left + (uint64_t)right);
}

/* Offsets of the `number`-th input of a group, whose values begin at `base`. Ones that do not begin with 0, or end behind the
 * values, become negative, which the operator reports; a group's only ones stay as they are. */
static void offsets_copy(const packing *of, const group *own, const rf_column_input *input, int64_t number,
                         int64_t base, char *to) {
    const int64_t end = offset_of(input, of->batch);
    const bool right = offset_of(input, 0) == 0 && end >= 0 && end <= input->lookups;
    const int64_t start = own->inputs == 1 ? 0 : right ? base : -own->values - 1;
    if (number == 0) offset_put(to, own->wide, 0, own->inputs == 1 ? offset_of(input, 0) : 0);
    for (int64_t s = 1; s <= of->batch; s++)
        offset_put(to, own->wide, number * of->batch + s, wrapping_sum(offset_of(input, s), start));
}

static void copy(const packing *of, char *memory) {
    int64_t dense[TYPES] = {0}, jagged[TYPES] = {0}, numbers[TYPES] = {0}; /* what of each group is there */
    for (int64_t i = 0; i < of->count; i++) {
        const rf_column_input *input = &of->inputs[i];
        const int64_t size = value_bytes(input->type);
        if (input->width > 0) {
            const group *own = &of->dense[input->type];
            dense_copy(of, input, memory + own->at + dense[input->type] * of->batch * size);
            dense[input->type] += input->width;
            continue;
        }
        const group *own = &of->jagged[input->type];
        const int64_t base = jagged[input->type],
                      left = own->values - base; /* offsets may change meanwhile */
        const int64_t wanted = used_values(input, of->batch), used = wanted < left ? wanted : left;
        if (used > 0) memcpy(memory + own->at + base * size, input->values, (size_t)(used * size));
        offsets_copy(of, own, input, numbers[input->type]++, base, memory + own->offsets_at);
        jagged[input->type] += used;
    }
}

/* (field of Inputs, type of values or -1: offsets, wide, rows, columns or -1, byte). */
static int part_add(PyObject *parts, int field, int type, bool wide, int64_t rows, int64_t columns,
                    int64_t at) {
    PyObject *part =
        Py_BuildValue("iiiLLL", field, type, (int)wide, (long long)rows, (long long)columns, (long long)at);
    const int failed = part == NULL || PyList_Append(parts, part) != 0;
    Py_XDECREF(part);
    return failed ? -1 : 0;
}

static PyObject *parts_of(const packing *of) {
    enum { DENSE, VALUES, OFFSETS };
    PyObject *parts = PyList_New(0);
    int failed = parts == NULL;
    for (int g = 0; g < of->n_groups[0] && !failed; g++) {
        const group *own = &of->dense[of->order[0][g]];
        failed = part_add(parts, DENSE, of->order[0][g], true, own->values, of->batch, own->at);
    }
    for (int g = 0; g < of->n_groups[1] && !failed; g++) {
        const group *own = &of->jagged[of->order[1][g]];
        failed = part_add(parts, VALUES, of->order[1][g], true, own->values, -1, own->at);
    }
    for (int g = 0; g < of->n_groups[1] && !failed; g++) {
        const group *own = &of->jagged[of->order[1][g]];
        failed = part_add(parts, OFFSETS, -1, own->wide, own->inputs * of->batch + 1, -1, own->offsets_at);
    }
    if (!failed) return parts;
    Py_XDECREF(parts);
    return NULL;
}

RF__PY_METHOD(embedding_columns_pack) {
    PyObject *capsule, *result = NULL;
    long long capacity;
    unsigned long long memory;
    if (!PyArg_ParseTuple(arguments, "OKL:embedding_columns_pack", &capsule, &memory, &capacity)) return NULL;
    const rf__columns_inputs *inputs = PyCapsule_GetPointer(capsule, RF__PY_COLUMNS_INPUTS);
    if (inputs == NULL) return NULL;
    packing of = {.inputs = inputs->rows, .count = inputs->count, .batch = inputs->batch};
    RF__PY_REFUSE_IF(inputs->on_gpu, PyExc_ValueError,
                     "embedding_columns_pack: inputs are on a GPU, must be on the %s", "CPU");
    RF__PY_UNLOCKED(plan(&of));
    RF__PY_REFUSE_IF(memory != 0 && of.bytes > capacity, PyExc_ValueError,
                     "embedding_columns_pack: the batch needs %lld bytes, there are %lld",
                     (long long)of.bytes, capacity);
    if (memory != 0) RF__PY_UNLOCKED(copy(&of, rf__py_pointer(memory)));
    PyObject *parts = parts_of(&of);
    if (parts != NULL) result = Py_BuildValue("LN", (long long)of.bytes, parts);
out:
    return result;
}
