/* Lowering and timing fused embedding bags. */
#include "families/fused_embedding_bag/python/fused_call.h"

#include <stdlib.h>

#include "families/fused_embedding_bag/fused.h"
#include "families/fused_embedding_bag/check_fused.h"

RF__PY_METHOD(fused_embedding_bag_candidates, "fused_embedding_bag_candidates(call, feature: int) -> list of "
                                              "tuples of 5 ints: schedules worth a try for a feature") {
    enum { MOST_CANDIDATES = 128 };
    static const char function[] = "fused_embedding_bag_candidates";
    rf__py_fused_call call = {0};
    rf__fused_geometry shape;
    rf_fused_schedule candidates[MOST_CANDIDATES];
    PyObject *call_object, *list = NULL;
    rf_status status = RF_OK;
    long long feature;
    int32_t count = 0;
    if (!PyArg_ParseTuple(arguments, "OL:fused_embedding_bag_candidates", &call_object, &feature))
        return NULL;
    if (rf__py_call_read(call_object, function, &call) != 0) goto out;
    RF__PY_REFUSE_IF(feature < 0 || feature >= call.params.n_features, PyExc_IndexError,
                     "%s: feature is %lld; expected 0 to %lld", function, feature,
                     (long long)call.params.n_features - 1);
    if (call.params.features[feature].dim != 0) {
        RF_TRY(rf__check_fused_features(&call.params));
        RF_TRY(rf__fused_geometry_of(&call.params, feature, &shape));
        count = rf__fused_candidates(&shape, candidates, MOST_CANDIDATES);
    }
    list = PyList_New(count);
    for (int32_t i = 0; list != NULL && i < count; i++) {
        const rf_fused_schedule *schedule = &candidates[i];
        PyObject *tuple = Py_BuildValue("(iiiii)", schedule->kind, schedule->threads, schedule->distance,
                                        schedule->split, schedule->expected);
        if (tuple == NULL || PyList_SetItem(list, i, tuple) != 0) Py_CLEAR(list);
    }
out:
    rf__py_call_free(&call);
    return rf__py_result(list, status, function);
}

/* Lowers batches of problem->params, by the classes of sets of schedules [sets, features, 5]. */
static rf_status lower(const rf__gpu *gpu, PyArrayObject *schedules, rf__fused_classes *classes,
                       rf__fused_feature *features, rf__fused_problem *problem, rf__launches *launches) {
    const rf_fused_embedding_bag_params *params = problem->params;
    rf__fused_traffic traffic;
    RF_CHECK(
        rf__fused_features(params, PyArray_DATA(schedules), PyArray_DIM(schedules, 0), classes, features));
    RF_CHECK(rf__fused_class_list_of(classes, &problem->classes));
    rf__fused_traffic_of(params, NULL, &traffic);
    problem->traffic = &traffic;
    for (int64_t f = 0; f < params->n_features; f++)
        problem->wide_rows |= params->features[f].rows > UINT32_MAX;
    return rf__fused_lower_any(gpu, problem, launches);
}

RF__PY_METHOD(fused_embedding_bag_lower,
              "fused_embedding_bag_lower(gpu: str, call, index_type: int, offset_type: int, weighted: bool, "
              "check: bool, schedules: int32 [sets, features, 5], warps: int, timed: bool, mapped: the "
              "mapping is the caller's = False, huge: batches of 2 ** 30 lookups and more = False) -> "
              "(list[dict], int): launches on a known GPU whose kernels have the schedules of all sets, and "
              "the number of their classes") {
    static const char function[] = "fused_embedding_bag_lower";
    rf__py_fused_call call = {0};
    const char *name;
    PyObject *call_object, *schedules_object, *list = NULL;
    PyArrayObject *schedules = NULL;
    rf__fused_classes *classes = NULL;
    rf__fused_feature *features = NULL;
    rf__gpu gpu;
    rf__launches launches;
    int index_type, offset_type, weighted, check, warps, timed, mapped = 0, huge = 0;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "sOiippOip|pp:fused_embedding_bag_lower", &name, &call_object,
                          &index_type, &offset_type, &weighted, &check, &schedules_object, &warps, &timed,
                          &mapped, &huge))
        return NULL;
    rf__launches_init(&launches, "fused_embedding_bag");
    if (rf__py_call_read(call_object, function, &call) != 0) goto out;
    schedules = rf__py_schedules(schedules_object, 3, &call, function);
    if (schedules == NULL) goto out;
    const int64_t sets = PyArray_DIM(schedules, 0);
    RF__PY_REFUSE_IF(sets == 0, PyExc_ValueError, "%s: schedules has no set", function);
    call.params.index_type = (rf_int_type)index_type;
    call.params.offset_type = (rf_int_type)offset_type;
    call.params.sample_weights = weighted ? call.params.output : NULL; /* not looked at */
    call.params.check_bounds = check;
    RF_TRY(rf__gpu_find(name, &gpu));
    RF_TRY(rf__py_call_check(&call.params, warps));
    classes = calloc(1, sizeof *classes);
    features = calloc((size_t)(sets * call.params.n_features) + 1, sizeof *features);
    if (classes == NULL || features == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    if (huge) call.params.lookups = INT32_MAX;
    RF_TRY(lower(&gpu, schedules, classes, features,
                 &(rf__fused_problem){
                     .params = &call.params, .warps = warps, .callers_mapping = mapped, .cycles = timed},
                 &launches));
    list = PyList_New(0);
    if (list != NULL && rf__py_launches(&gpu, &launches, list) != 0) Py_CLEAR(list);
out:;
    PyObject *result =
        list != NULL && status == RF_OK ? Py_BuildValue("(Ni)", list, (int)classes->count) : NULL;
    rf__launches_free(&launches);
    free(features);
    free(classes);
    Py_XDECREF(schedules);
    rf__py_call_free(&call);
    return rf__py_result(result, status, function);
}

/* Reads a batch into the fields of `batch` that it gives; false with an exception. */
static bool batch_read(PyObject *object, rf_fused_embedding_bag_params *batch, const void **host_offsets) {
    unsigned long long indices, offsets, sample_weights, output, on_host;
    long long lookups, bags;
    int index_type, offset_type;
    RF__PY_REFUSE_IF(!PyTuple_Check(object), PyExc_TypeError,
                     "fused_embedding_bag_measure: a batch has another type; expected a tuple");
    if (!PyArg_ParseTuple(object, "KLiKLiKKK:fused_embedding_bag_measure", &indices, &lookups, &index_type,
                          &offsets, &bags, &offset_type, &sample_weights, &output, &on_host))
        return false;
    batch->indices = rf__py_pointer(indices);
    batch->lookups = lookups;
    batch->index_type = (rf_int_type)index_type;
    batch->offsets = rf__py_pointer(offsets);
    batch->bags = bags;
    batch->offset_type = (rf_int_type)offset_type;
    batch->sample_weights = rf__py_pointer(sample_weights);
    batch->output = rf__py_pointer(output);
    *host_offsets = rf__py_pointer(on_host);
    return true;
out:
    return false;
}

RF__PY_METHOD(fused_embedding_bag_measure,
              "fused_embedding_bag_measure(device: int, stream: int, call, batches: list[(indices, lookups, "
              "index_type, offsets, bags, offset_type, sample_weights, output, host_offsets)], schedules: "
              "int32 [sets, features, 5], warps: int, rounds: int, timed: bool) -> float64: [sets, rounds], "
              "seconds a batch; or where timed [sets, features], clock cycles of the blocks of a feature") {
    static const char function[] = "fused_embedding_bag_measure";
    rf__py_fused_call call = {0};
    rf__fused_measurement measurement = {0};
    rf_cuda_stream stream = {0};
    PyObject *call_object, *list, *schedules_object;
    PyArrayObject *schedules = NULL, *result = NULL;
    rf_fused_embedding_bag_params *batches = NULL;
    const void **host_offsets = NULL;
    unsigned long long stream_address;
    long long rounds;
    int timed;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "iKOO!OiLp:fused_embedding_bag_measure", &stream.device, &stream_address,
                          &call_object, &PyList_Type, &list, &schedules_object, &measurement.warps, &rounds,
                          &timed))
        return NULL;
    if (rf__py_call_read(call_object, function, &call) != 0) goto out;
    schedules = rf__py_schedules(schedules_object, 3, &call, function);
    if (schedules == NULL) goto out;
    measurement.n_batches = PyList_Size(list);
    batches = calloc((size_t)measurement.n_batches + 1, sizeof *batches);
    host_offsets = calloc((size_t)measurement.n_batches + 1, sizeof *host_offsets);
    if (batches == NULL || host_offsets == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (int64_t b = 0; b < measurement.n_batches; b++) {
        batches[b] = call.params;
        if (!batch_read(PyList_GetItem(list, (Py_ssize_t)b), &batches[b], &host_offsets[b])) goto out;
    }
    measurement.batches = batches;
    measurement.host_offsets = host_offsets;
    measurement.schedules = PyArray_DATA(schedules);
    measurement.n_sets = PyArray_DIM(schedules, 0);
    measurement.rounds = rounds > 0 ? rounds : 0;
    stream.stream = rf__py_pointer(stream_address);
    result = rf__py_new(NPY_DOUBLE, (npy_intp)measurement.n_sets,
                        (npy_intp)(timed ? call.params.n_features : measurement.rounds));
    if (result == NULL) goto out;
    RF__PY_UNLOCKED(status = rf__fused_measure(&measurement, timed, PyArray_DATA(result), &stream));
out:
    free(host_offsets);
    free(batches);
    Py_XDECREF(schedules);
    rf__py_call_free(&call);
    return rf__py_result(result, status, function);
}
