/* recfuse._C: lowering and measurement of schedules of the embedding bag, for the tuner. Pointers are
 * addresses on a GPU, as integers: the caller must keep the tensors alive. */
#include "python/methods.h"

#include <stdlib.h>
#include <string.h>

#include "families/embedding_bag/embedding_bag.h"
#include "families/pin_rows/pin_rows.h"
#include "core/validate.h"

RF__PY_METHOD(embedding_bag_lower,
              "embedding_bag_lower(gpu: str, dim: int, stride: int, alignment: int, dtype: int, index_type: "
              "int, offset_type: int, pooling: int, weighted: bool, padded: bool, check: bool, lookups: int, "
              "bags: int, schedule: str, rows: int = lookups) -> (list[dict], str): the launches of a call "
              "on a known GPU, and its complete schedule") {
    rf_embedding_bag_schedule schedule, complete = {0};
    rf__gpu gpu;
    rf__launches launches;
    const char *name, *text;
    char complete_text[RF_SCHEDULE_TEXT_BYTES];
    long long dim, stride, lookups, bags, rows = -1;
    int alignment, dtype, index_type, offset_type, pooling, weighted, padded, check;
    static const float present = 0; /* never read: marks the presence of weights */
    PyObject *list = NULL;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "sLLiiiiipppLLs|L:embedding_bag_lower", &name, &dim, &stride, &alignment,
                          &dtype, &index_type, &offset_type, &pooling, &weighted, &padded, &check, &lookups,
                          &bags, &text, &rows))
        return NULL;
    if (dtype < RF_FLOAT32 || dtype > RF_BFLOAT16 || index_type < RF_INT32 || index_type > RF_INT64 ||
        offset_type < RF_INT32 || offset_type > RF_INT64 || pooling < RF_SUM || pooling > RF_MAX)
        return PyErr_Format(PyExc_ValueError,
                            "embedding_bag_lower: dtype is %d, index type %d, offset type %d and pooling "
                            "%d; expected numbers of their enums",
                            dtype, index_type, offset_type, pooling);
    const rf_embedding_bag_params params = {.dim = dim,
                                            .weight_stride = stride,
                                            .rows = rows >= 0 ? rows : lookups,
                                            .dtype = (rf_dtype)dtype,
                                            .index_type = (rf_int_type)index_type,
                                            .offset_type = (rf_int_type)offset_type,
                                            .pooling = (rf_pooling)pooling,
                                            .sample_weights = weighted ? &present : NULL,
                                            .padding_idx = padded ? 0 : -1,
                                            .check_bounds = check,
                                            .lookups = lookups,
                                            .bags = bags};
    rf__launches_init(&launches, "embedding_bag");
    RF_TRY(rf_embedding_bag_schedule_parse(text, &schedule));
    RF_TRY(rf__gpu_find(name, &gpu));
    RF_TRY(rf__embedding_bag_lower_described(&gpu, &params, &schedule, alignment, &launches, &complete));
    rf_embedding_bag_schedule_print(&complete, complete_text);
    list = PyList_New(0);
    if (list != NULL && rf__py_launches(&gpu, &launches, list) != 0) Py_CLEAR(list);
out:
    rf__launches_free(&launches);
    if (status == RF_OK) return list != NULL ? Py_BuildValue("(Ns)", list, complete_text) : NULL;
    return rf__py_result(NULL, status, "embedding_bag_lower");
}

/* Reads a batch into the fields of `batch` that it gives; false with an exception. */
static bool batch_read(PyObject *object, rf_embedding_bag_params *batch) {
    unsigned long long indices, offsets, sample_weights, output;
    long long lookups, bags;
    int index_type, offset_type, include_last_offset;
    RF__PY_REFUSE_IF(!PyTuple_Check(object), PyExc_TypeError,
                     "embedding_bag_measure: a batch has another type; expected a tuple");
    if (!PyArg_ParseTuple(object, "KLiKLipKK:embedding_bag_measure", &indices, &lookups, &index_type,
                          &offsets, &bags, &offset_type, &include_last_offset, &sample_weights, &output))
        return false;
    batch->indices = rf__py_pointer(indices);
    batch->lookups = lookups;
    batch->index_type = (rf_int_type)index_type;
    batch->offsets = rf__py_pointer(offsets);
    batch->bags = bags;
    batch->offset_type = (rf_int_type)offset_type;
    batch->include_last_offset = include_last_offset;
    batch->sample_weights = rf__py_pointer(sample_weights);
    batch->output = rf__py_pointer(output);
    return true;
out:
    return false;
}

/* Reads the batches and schedules of a measurement, which the caller frees. False: *status or an exception
 * has the reason. */
static bool lists_read(PyObject *batches, PyObject *schedules, const rf_embedding_bag_params *table,
                       rf_embedding_bag_measurement *measurement, rf_status *status) {
    measurement->n_batches = PyList_Size(batches);
    measurement->n_schedules = PyList_Size(schedules);
    rf_embedding_bag_params *params_list = calloc((size_t)measurement->n_batches + 1, sizeof *params_list);
    measurement->batches = params_list;
    rf_embedding_bag_schedule *schedule_list =
        calloc((size_t)measurement->n_schedules + 1, sizeof *schedule_list);
    measurement->schedules = schedule_list;
    if (params_list == NULL || schedule_list == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t b = 0; b < measurement->n_batches; b++) {
        params_list[b] = *table;
        if (!batch_read(PyList_GetItem(batches, (Py_ssize_t)b), &params_list[b])) return false;
    }
    for (int64_t s = 0; s < measurement->n_schedules; s++) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(schedules, (Py_ssize_t)s), &length);
        if (text == NULL) return false;
        if (strlen(text) != (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "embedding_bag_measure: a schedule has a zero byte");
            return false;
        }
        *status = rf_embedding_bag_schedule_parse(text, &schedule_list[s]);
        if (*status != RF_OK) return false;
    }
    return true;
}

/* Pins rows again before each batch; the context has the rows. */
static rf_status pin(void *context, const rf_embedding_bag_params *batch, const rf_cuda_stream *stream) {
    rf_pin_rows_params params = *(const rf_pin_rows_params *)context;
    const rf__row_format row = rf__row_format_of(batch->dtype, batch->dim, batch->weight_stride);
    params.weight = batch->weight;
    params.rows = batch->rows;
    params.row_bytes = row.bytes;
    params.row_pitch = row.pitch;
    return rf_pin_rows_cuda(&params, true, stream);
}

RF__PY_METHOD(
    embedding_bag_measure,
    "embedding_bag_measure(device: int, stream: int, table: (weight, rows, dim, stride, dtype), batches: "
    "list[(indices, lookups, index_type, offsets, bags, offset_type, include_last_offset, sample_weights, "
    "output)], pooling: int, padding_idx: int, check: bool, schedules: list[str], rounds: int, pinned: "
    "(rows, count, index_type = int64) | None) -> float64 [schedules, rounds], seconds a batch") {
    PyObject *batches, *schedules, *pinned;
    PyArrayObject *seconds = NULL;
    unsigned long long stream_address, weight, pinned_rows = 0;
    long long rows, dim, stride, padding_idx, rounds, n_pinned = 0;
    int device, dtype, pooling, check, pinned_type = RF_INT64;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "iK(KLLLi)O!iLpO!LO:embedding_bag_measure", &device, &stream_address,
                          &weight, &rows, &dim, &stride, &dtype, &PyList_Type, &batches, &pooling,
                          &padding_idx, &check, &PyList_Type, &schedules, &rounds, &pinned))
        return NULL;
    if (pinned != Py_None) {
        if (!PyTuple_Check(pinned))
            return PyErr_Format(PyExc_TypeError,
                                "embedding_bag_measure: pinned has another type; expected a tuple or None");
        if (!PyArg_ParseTuple(pinned, "KL|i:embedding_bag_measure", &pinned_rows, &n_pinned, &pinned_type))
            return NULL;
    }
    const rf_embedding_bag_params table = {.weight = rf__py_pointer(weight),
                                           .rows = rows,
                                           .dim = dim,
                                           .weight_stride = stride,
                                           .dtype = (rf_dtype)dtype,
                                           .pooling = (rf_pooling)pooling,
                                           .padding_idx = padding_idx,
                                           .check_bounds = check,
                                           .output_stride = dim};
    rf_pin_rows_params rows_to_pin = {.hot_rows = rf__py_pointer(pinned_rows),
                                      .n_hot_rows = n_pinned,
                                      .index_type = (rf_int_type)pinned_type};
    rf_embedding_bag_measurement measurement = {
        .prepare = pinned_rows != 0 ? pin : NULL, .context = &rows_to_pin, .rounds = rounds};
    const rf_cuda_stream stream = {device, rf__py_pointer(stream_address)};
    if (!lists_read(batches, schedules, &table, &measurement, &status)) goto out;
    seconds = rf__py_new(NPY_DOUBLE, (npy_intp)measurement.n_schedules, (npy_intp)(rounds > 0 ? rounds : 0));
    if (seconds == NULL) goto out;
    measurement.seconds = PyArray_DATA(seconds);
    RF__PY_UNLOCKED(status = rf_embedding_bag_measure(&measurement, &stream));
out:
    free((void *)measurement.schedules);
    free((void *)measurement.batches);
    return rf__py_result(seconds, status, "embedding_bag_measure");
}
