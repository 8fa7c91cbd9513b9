/* recfuse._C: compiling and measuring schedules of the embedding bag, for the tuner. Pointers are addresses
 * on a GPU, as integers: whoever calls keeps the tensors alive. */
#include "python/methods.h"

#include <stdlib.h>
#include <string.h>

#include "base/bag_lookups.h"
#include "cuda/embedding_bag/embedding_bag.h"
#include "cuda/fused_embedding_bag/partition/device.h"
#include "cuda/pin_rows/pin_rows.h"
#include "base/status.h"

RF__PY_METHOD(embedding_bag_compile) {
    rf_embedding_bag_params params = {0};
    rf_embedding_bag_schedule schedule, complete;
    rf_kernel_info info;
    const char *arch, *text;
    char complete_text[RF_SCHEDULE_TEXT_BYTES];
    long long dim, stride, lookups, bags, rows = -1, l2_bytes = 0;
    int sms = 0, alignment, dtype, index_type, offset_type, pooling, weighted, padded, check;
    static const float present = 0; /* never read: says that there are weights */
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "sLLiiiiipppLLs|LiL:embedding_bag_compile", &arch, &dim, &stride,
                          &alignment, &dtype, &index_type, &offset_type, &pooling, &weighted, &padded, &check,
                          &lookups, &bags, &text, &rows, &sms, &l2_bytes)) {
        return NULL;
    }
    if (dtype < RF_FLOAT32 || dtype > RF_BFLOAT16 || index_type < RF_INT32 || index_type > RF_INT64 ||
        offset_type < RF_INT32 || offset_type > RF_INT64 || pooling < RF_SUM || pooling > RF_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "embedding_bag_compile: unknown dtype %d, index type %d, offset type %d or "
                     "pooling %d",
                     dtype, index_type, offset_type, pooling);
        return NULL;
    }
    params.dim = dim;
    params.weight_stride = stride;
    params.rows = rows >= 0 ? rows : lookups;
    params.dtype = (rf_dtype)dtype;
    params.index_type = (rf_int_type)index_type;
    params.offset_type = (rf_int_type)offset_type;
    params.pooling = (rf_pooling)pooling;
    params.sample_weights = weighted ? &present : NULL;
    params.padding_idx = padded ? 0 : -1;
    params.check_bounds = check;
    params.lookups = lookups;
    params.bags = bags;
    status = rf_embedding_bag_schedule_parse(text, &schedule);
    if (status == RF_OK) {
        Py_BEGIN_ALLOW_THREADS status = rf__embedding_bag_compile_for(&params, &schedule, alignment, arch,
                                                                      sms, l2_bytes, &info, &complete);
        Py_END_ALLOW_THREADS
    }
    if (status != RF_OK) return rf__py_raise(status, "embedding_bag_compile");
    rf_embedding_bag_schedule_print(&complete, complete_text);
    return rf__py_kernel(
        &info, Py_BuildValue("{s:s,s:i}", "schedule", complete_text, "shared_bytes", info.shared_bytes));
}

RF__PY_METHOD(small_kernels_compile) {
    const char *arch;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "s:small_kernels_compile", &arch)) return NULL;
    Py_BEGIN_ALLOW_THREADS status = rf__pin_rows_compile(arch);
    if (status == RF_OK) status = rf__bag_lookups_compile(arch);
    if (status == RF_OK) status = rf__fused_map_compile(arch);
    Py_END_ALLOW_THREADS if (status != RF_OK) return rf__py_raise(status, "small_kernels_compile");
    Py_RETURN_NONE;
}

/* The batches and schedules of a measurement; what it points to is freed with measurement_free. */
static int lists_read(PyObject *batches, PyObject *schedules, const rf_embedding_bag_params *table,
                      rf_embedding_bag_measurement *work) {
    work->n_batches = PyList_Size(batches);
    work->n_schedules = PyList_Size(schedules);
    if (work->n_batches < 0 || work->n_schedules < 0) return -1;
    rf_embedding_bag_params *read = calloc((size_t)work->n_batches + 1, sizeof *read);
    work->batches = read;
    rf_embedding_bag_schedule *parsed = calloc((size_t)work->n_schedules + 1, sizeof *parsed);
    work->schedules = parsed;
    if (read == NULL || parsed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t b = 0; b < work->n_batches; b++) {
        read[b] = *table;
        if (rf__py_batch(PyList_GetItem(batches, (Py_ssize_t)b), &read[b], NULL) != 0) return -1;
    }
    for (int64_t s = 0; s < work->n_schedules; s++) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(schedules, (Py_ssize_t)s), &length);
        if (text == NULL) return -1;
        if (strlen(text) != (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "embedding_bag_measure: a schedule has a zero byte");
            return -1;
        }
        const rf_status status = rf_embedding_bag_schedule_parse(text, &parsed[s]);
        if (status != RF_OK) {
            rf__py_raise(status, "embedding_bag_measure");
            return -1;
        }
    }
    return 0;
}

/* Pins rows anew before each batch; the context has the rows. */
static rf_status pin(void *context, const rf_embedding_bag_params *batch, const rf_cuda_stream *stream) {
    rf_pin_rows_params params = *(const rf_pin_rows_params *)context;
    const int64_t bytes = batch->dtype == RF_FLOAT32 ? 4 : 2;
    params.weight = batch->weight;
    params.rows = batch->rows;
    params.row_bytes = batch->dim * bytes;
    params.row_pitch = batch->weight_stride * bytes;
    return rf_pin_rows_cuda(&params, true, stream);
}

RF__PY_METHOD(embedding_bag_measure) {
    rf_embedding_bag_params table = {0};
    rf_embedding_bag_measurement work = {0};
    rf_cuda_stream stream = {0};
    PyObject *batches, *schedules, *pinned, *seconds = NULL;
    unsigned long long stream_address, weight, pinned_rows = 0;
    long long rows, dim, stride, padding_idx, rounds, n_pinned = 0;
    int device, dtype, pooling, check, pinned_type = RF_INT64;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "iK(KLLLi)O!iLpO!LO:embedding_bag_measure", &device, &stream_address,
                          &weight, &rows, &dim, &stride, &dtype, &PyList_Type, &batches, &pooling,
                          &padding_idx, &check, &PyList_Type, &schedules, &rounds, &pinned)) {
        return NULL;
    }
    if (pinned != Py_None) {
        if (!PyTuple_Check(pinned))
            return PyErr_Format(PyExc_TypeError, "embedding_bag_measure: pinned must be a tuple or None");
        if (!PyArg_ParseTuple(pinned, "KL|i:embedding_bag_measure", &pinned_rows, &n_pinned, &pinned_type))
            return NULL;
    }
    table.weight = rf__py_pointer(weight);
    table.rows = rows;
    table.dim = dim;
    table.weight_stride = stride;
    table.dtype = (rf_dtype)dtype;
    table.pooling = (rf_pooling)pooling;
    table.padding_idx = padding_idx;
    table.check_bounds = check;
    table.output_stride = dim;
    rf_pin_rows_params rows_to_pin = {.hot_rows = rf__py_pointer(pinned_rows),
                                      .n_hot_rows = n_pinned,
                                      .index_type = (rf_int_type)pinned_type};
    if (pinned_rows != 0) work.prepare = pin;
    work.context = &rows_to_pin;
    work.rounds = rounds;
    stream.device = device;
    stream.stream = rf__py_pointer(stream_address);
    if (lists_read(batches, schedules, &table, &work) != 0) goto out;
    npy_intp shape[2] = {(npy_intp)work.n_schedules, (npy_intp)(rounds > 0 ? rounds : 0)};
    seconds = PyArray_SimpleNew(2, shape, NPY_DOUBLE);
    if (seconds == NULL) goto out;
    work.seconds = PyArray_DATA((PyArrayObject *)seconds);
    Py_BEGIN_ALLOW_THREADS status = rf_embedding_bag_measure(&work, &stream);
    Py_END_ALLOW_THREADS seconds = rf__py_result(seconds, status, "embedding_bag_measure");
out:
    free((void *)work.schedules);
    free((void *)work.batches);
    return seconds;
}
