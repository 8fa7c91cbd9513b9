/* Mapping, compiling and timing fused embedding bags. Addresses come as integers: whoever calls keeps the tensors
 * alive. */
#include "methods.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/fused.h"
#include "cuda/fused_measure.h"
#include "validate.h"

/* What a `call` says; `features` and `buffers` are freed by call_free. */
typedef struct fused_call {
    rf_fused_embedding_bag_params params;
    PyArrayObject *features;
    rf_buffer *buffers;
} fused_call;

static void call_free(fused_call *call) {
    Py_XDECREF(call->features);
    free(call->buffers);
}

static int buffers_read(PyObject *list, fused_call *call) {
    const Py_ssize_t count = PyList_Size(list);
    if (count < 0) return -1;
    call->buffers = calloc((size_t)count + 1, sizeof *call->buffers);
    if (call->buffers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long data;
        long long numel;
        int dtype;
        PyObject *one = PyList_GetItem(list, i);
        if (!PyTuple_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "call: a buffer must be a tuple (address, numel, dtype)");
            return -1;
        }
        if (!PyArg_ParseTuple(one, "KLi:call", &data, &numel, &dtype)) return -1;
        if (dtype < RF_FLOAT32 || dtype > RF_BFLOAT16) {
            PyErr_Format(PyExc_ValueError, "call: unknown dtype %d", dtype);
            return -1;
        }
        call->buffers[i].data = rf__py_pointer(data);
        call->buffers[i].numel = numel;
        call->buffers[i].dtype = (rf_dtype)dtype;
    }
    call->params.buffers = call->buffers;
    call->params.n_buffers = count;
    return 0;
}

/* Fills `call`, whose memory is zero. */
static int call_read(PyObject *object, const char *function, fused_call *call) {
    enum { FIELDS = sizeof(rf_feature) / sizeof(int64_t) };
    PyObject *buffers, *features;
    long long output_stride;
    int output_dtype;
    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: call must be a tuple", function);
        return -1;
    }
    if (!PyArg_ParseTuple(object, "O!OiL:call", &PyList_Type, &buffers, &features, &output_dtype,
                          &output_stride))
        return -1;
    if (buffers_read(buffers, call) != 0) return -1;
    call->features = rf__py_array(features, NPY_INT64, 2, function, "features");
    if (call->features == NULL) return -1;
    if (PyArray_DIM(call->features, 1) != FIELDS || output_dtype < RF_FLOAT32 || output_dtype > RF_BFLOAT16) {
        PyErr_Format(PyExc_ValueError, "%s: features must have %d columns, and output_dtype be 0 to 2",
                     function, FIELDS);
        return -1;
    }
    call->params.features = PyArray_DATA(call->features);
    call->params.n_features = PyArray_DIM(call->features, 0);
    call->params.output_dtype = (rf_dtype)output_dtype;
    call->params.output_stride = output_stride;
    static _Alignas(16) char aligned[16]; /* never touched: stands for an output where there is none yet */
    call->params.output = aligned;
    call->params.output_dim = 0;
    for (int64_t f = 0; f < call->params.n_features; f++) {
        if (call->params.features[f].buffer < 0 ||
            call->params.features[f].buffer >= call->params.n_buffers) {
            PyErr_Format(PyExc_ValueError, "%s: a feature is in a buffer that is not there", function);
            return -1;
        }
        if (__builtin_add_overflow(call->params.output_dim, call->params.features[f].dim,
                                   &call->params.output_dim)) {
            PyErr_Format(PyExc_ValueError, "%s: the sum of all dims does not fit int64", function);
            return -1;
        }
    }
    call->params.check_bounds = true;
    call->params.prefetch_distance = -1;
    return 0;
}

/* int32 [sets, features, 6], or without the first dimension; a new reference. */
static PyArrayObject *schedules_read(PyObject *object, int dimensions, const fused_call *call,
                                     const char *function) {
    enum { FIELDS = sizeof(rf_fused_schedule) / sizeof(int32_t) };
    PyArrayObject *array = rf__py_array(object, NPY_INT32, dimensions, function, "schedules");
    if (array == NULL) return NULL;
    if (PyArray_DIM(array, dimensions - 1) != FIELDS ||
        PyArray_DIM(array, dimensions - 2) != call->params.n_features) {
        PyErr_Format(PyExc_ValueError, "%s: schedules must be [..., %lld, %d], a row a feature", function,
                     (long long)call->params.n_features, FIELDS);
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

static void mapping_capsule_free(PyObject *capsule) {
    rf_fused_mapping_free(PyCapsule_GetPointer(capsule, NULL));
}

/* An array [rows, 8] that owns the mapping; *mapping is then NULL. */
static PyObject *mapping_array(int32_t **mapping, int64_t rows) {
    npy_intp shape[2] = {(npy_intp)rows, 8};
    PyObject *array = PyArray_SimpleNewFromData(2, shape, NPY_INT32, *mapping);
    PyObject *owner = array != NULL ? PyCapsule_New(*mapping, NULL, mapping_capsule_free) : NULL;
    if (owner == NULL) {
        Py_XDECREF(array);
        return NULL;
    }
    *mapping = NULL;
    if (PyArray_SetBaseObject((PyArrayObject *)array, owner) == 0) return array; /* takes the reference */
    Py_DECREF(array);
    return NULL;
}

PyObject *rf__py_fused_embedding_bag_map(PyObject *module, PyObject *arguments) {
    (void)module;
    static const char function[] = "fused_embedding_bag_map";
    fused_call call = {0};
    rf_fused_plan plan = {0};
    PyObject *call_object, *offsets_object, *schedules_object, *result = NULL;
    PyArrayObject *offsets = NULL, *schedules = NULL;
    int32_t *mapping = NULL;
    int64_t rows = 0;
    int warps, sms = 132, stage = 1;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "OOOi|ip:fused_embedding_bag_map", &call_object, &offsets_object,
                          &schedules_object, &warps, &sms, &stage)) {
        return NULL;
    }
    if (call_read(call_object, function, &call) != 0) goto out;
    schedules = schedules_read(schedules_object, 2, &call, function);
    if (schedules == NULL) goto out;
    const bool wide =
        PyArray_Check(offsets_object) && PyArray_TYPE((PyArrayObject *)offsets_object) == NPY_INT64;
    offsets = rf__py_array(offsets_object, wide ? NPY_INT64 : NPY_INT32, 1, function, "offsets");
    if (offsets == NULL) goto out;
    const int64_t count = PyArray_DIM(offsets, 0), n_features = call.params.n_features;
    if (n_features == 0 || count < 1 || (count - 1) % n_features != 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: offsets has %lld elements, must have features * bags + 1 with %lld "
                     "features",
                     function, (long long)count, (long long)n_features);
        goto out;
    }
    call.params.bags = (count - 1) / n_features;
    call.params.offsets = PyArray_DATA(offsets);
    call.params.offset_type = wide ? RF_INT64 : RF_INT32;
    plan.schedules = PyArray_DATA(schedules);
    plan.warps = warps;
    Py_BEGIN_ALLOW_THREADS status =
        rf_fused_embedding_bag_map(&call.params, &plan, sms, stage, &mapping, &rows);
    Py_END_ALLOW_THREADS if (status != RF_OK) {
        rf__py_raise(status, function);
        goto out;
    }
    result = mapping_array(&mapping, rows);
out:
    rf_fused_mapping_free(mapping);
    Py_XDECREF(offsets);
    Py_XDECREF(schedules);
    call_free(&call);
    return result;
}

PyObject *rf__py_fused_embedding_bag_candidates(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { MOST = 128 };
    fused_call call = {0};
    rf__fused_geometry shape;
    rf_fused_schedule found[MOST];
    PyObject *call_object, *list = NULL;
    long long feature;
    if (!PyArg_ParseTuple(arguments, "OL:fused_embedding_bag_candidates", &call_object, &feature))
        return NULL;
    if (call_read(call_object, "fused_embedding_bag_candidates", &call) != 0) goto out;
    if (feature < 0 || feature >= call.params.n_features) {
        PyErr_Format(PyExc_IndexError, "fused_embedding_bag_candidates: feature is %lld, must be 0 to %lld",
                     feature, (long long)call.params.n_features - 1);
        goto out;
    }
    int32_t count = 0;
    if (call.params.features[feature].dim != 0) {
        rf_status status = rf__check_fused_features(&call.params);
        if (status == RF_OK) status = rf__fused_geometry_of(&call.params, feature, &shape);
        if (status != RF_OK) {
            rf__py_raise(status, "fused_embedding_bag_candidates");
            goto out;
        }
        count = rf__fused_candidates(&shape, found, MOST);
    }
    list = PyList_New(count);
    for (int32_t i = 0; list != NULL && i < count; i++) {
        const rf_fused_schedule *one = &found[i];
        PyObject *tuple = Py_BuildValue("(iiiiii)", one->kind, one->threads, one->distance, one->station,
                                        one->split, one->expected);
        if (tuple == NULL || PyList_SetItem(list, i, tuple) != 0) Py_CLEAR(list);
    }
out:
    call_free(&call);
    return list;
}

/* Of a call that is to be compiled for: there are no indices and offsets yet. */
static rf_status check_kinds(const rf_fused_embedding_bag_params *params, int32_t warps) {
    rf_fused_embedding_bag_params call = *params;
    rf_status status = RF_OK;
    call.offsets = params->output;
    RF_TRY(rf__check_fused_call(&call));
    RF_TRY(rf__check_fused_features(&call));
    RF_TRY(rf__check_fused_warps(warps));
out:
    return status;
}

PyObject *rf__py_fused_embedding_bag_compile(PyObject *module, PyObject *arguments) {
    (void)module;
    static const char function[] = "fused_embedding_bag_compile";
    fused_call call = {0};
    const char *arch;
    PyObject *call_object, *schedules_object, *result = NULL;
    PyArrayObject *schedules = NULL;
    rf__fused_classes *classes = NULL;
    rf__fused_feature *features = NULL;
    rf_kernel_info info;
    int index_type, offset_type, weighted, check, warps, timed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "sOiippOip:fused_embedding_bag_compile", &arch, &call_object,
                          &index_type, &offset_type, &weighted, &check, &schedules_object, &warps, &timed)) {
        return NULL;
    }
    if (call_read(call_object, function, &call) != 0) goto out;
    schedules = schedules_read(schedules_object, 3, &call, function);
    if (schedules == NULL) goto out;
    const int64_t sets = PyArray_DIM(schedules, 0);
    if (sets == 0) {
        PyErr_Format(PyExc_ValueError, "%s: schedules has no set", function);
        goto out;
    }
    call.params.index_type = (rf_int_type)index_type;
    call.params.offset_type = (rf_int_type)offset_type;
    call.params.sample_weights = weighted ? call.params.output : NULL; /* not looked at */
    status = check_kinds(&call.params, warps);
    if (status != RF_OK) {
        rf__py_raise(status, function);
        goto out;
    }
    classes = calloc(1, sizeof *classes);
    features = calloc((size_t)(sets * call.params.n_features) + 1, sizeof *features);
    if (classes == NULL || features == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    rf__fused_variant variant = {.index_type = index_type,
                                 .offset_type = offset_type,
                                 .output_dtype = (int32_t)call.params.output_dtype,
                                 .weighted = weighted,
                                 .check = check,
                                 .timed = timed};
    Py_BEGIN_ALLOW_THREADS status =
        rf__fused_features(&call.params, PyArray_DATA(schedules), sets, classes, features);
    if (status == RF_OK) {
        rf__fused_occupancy(NULL, warps, &variant, classes);
        status = rf__fused_kernel_compile(arch, &variant, classes, &info);
    }
    Py_END_ALLOW_THREADS if (status != RF_OK) {
        rf__py_raise(status, function);
        goto out;
    }
    result = rf__py_kernel(&info, Py_BuildValue("{s:i}", "classes", classes->count));
out:
    free(features);
    free(classes);
    Py_XDECREF(schedules);
    call_free(&call);
    return result;
}

PyObject *rf__py_fused_embedding_bag_measure(PyObject *module, PyObject *arguments) {
    (void)module;
    static const char function[] = "fused_embedding_bag_measure";
    fused_call call = {0};
    rf__fused_measurement work = {0};
    rf_cuda_stream stream = {0};
    PyObject *call_object, *list, *schedules_object, *result = NULL;
    PyArrayObject *schedules = NULL;
    rf_fused_embedding_bag_params *batches = NULL;
    const void **host_offsets = NULL;
    unsigned long long stream_address;
    long long rounds;
    int timed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "iKOO!OiLp:fused_embedding_bag_measure", &stream.device, &stream_address,
                          &call_object, &PyList_Type, &list, &schedules_object, &work.warps, &rounds,
                          &timed)) {
        return NULL;
    }
    if (call_read(call_object, function, &call) != 0) goto out;
    schedules = schedules_read(schedules_object, 3, &call, function);
    if (schedules == NULL) goto out;
    work.n_batches = PyList_Size(list);
    batches = calloc((size_t)work.n_batches + 1, sizeof *batches);
    host_offsets = calloc((size_t)work.n_batches + 1, sizeof *host_offsets);
    if (batches == NULL || host_offsets == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (int64_t b = 0; b < work.n_batches; b++) {
        rf_embedding_bag_params read;
        if (rf__py_batch(PyList_GetItem(list, (Py_ssize_t)b), &read, &host_offsets[b]) != 0) goto out;
        batches[b] = call.params;
        batches[b].indices = read.indices;
        batches[b].lookups = read.lookups;
        batches[b].index_type = read.index_type;
        batches[b].offsets = read.offsets;
        batches[b].bags = read.bags;
        batches[b].offset_type = read.offset_type;
        batches[b].sample_weights = read.sample_weights;
        batches[b].output = read.output;
    }
    work.batches = batches;
    work.host_offsets = host_offsets;
    work.schedules = PyArray_DATA(schedules);
    work.n_sets = PyArray_DIM(schedules, 0);
    work.rounds = rounds > 0 ? rounds : 0;
    stream.stream = rf__py_pointer(stream_address);
    npy_intp shape[2] = {(npy_intp)work.n_sets,
                         timed ? (npy_intp)call.params.n_features : (npy_intp)work.rounds};
    result = PyArray_SimpleNew(2, shape, NPY_DOUBLE);
    if (result == NULL) goto out;
    double *values = PyArray_DATA((PyArrayObject *)result);
    Py_BEGIN_ALLOW_THREADS status = rf__fused_measure(&work, timed, values, &stream);
    Py_END_ALLOW_THREADS if (status != RF_OK) {
        Py_CLEAR(result);
        rf__py_raise(status, function);
    }
out:
    free(host_offsets);
    free(batches);
    Py_XDECREF(schedules);
    call_free(&call);
    return result;
}
