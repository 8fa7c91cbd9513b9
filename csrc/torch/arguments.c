/* Tensors that a call takes, borrows and returns, and the arguments that several operators share. */
#include "torch/arguments.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/validate.h"

static const char *name_of(const rf__call *call, int argument) {
    return call->registered->signature.names[argument];
}

rf_status rf__call_device(rf__call *call, int argument) {
    return rf__tensor_device(call->values[argument].tensor, &call->device);
}

rf_status rf__call_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor) {
    return rf__tensor_read(name_of(call, argument), call->values[argument].tensor, dim, call->device, tensor);
}

rf_status rf__call_host_tensor(rf__call *call, int argument, int64_t dim, rf__tensor *tensor) {
    return rf__tensor_read(name_of(call, argument), call->values[argument].tensor, dim, rf__device_cpu(),
                           tensor);
}

static rf_status temporary_slot(rf__call *call, AtenTensorHandle **slot) {
    RF_FAIL_IF(call->n_temporaries == RF__MAX_TEMPORARIES, RF_ERR_INTERNAL,
               "a call has more than %d copies of arguments", RF__MAX_TEMPORARIES);
    *slot = &call->temporaries[call->n_temporaries++];
    return RF_OK;
}

rf_status rf__call_contiguous(rf__call *call, rf__tensor *tensor, int32_t dtype) {
    AtenTensorHandle *slot = NULL;
    if (tensor->dtype == dtype && rf__tensor_is_contiguous(tensor)) return RF_OK;
    RF_CHECK(temporary_slot(call, &slot));
    if (!rf__call_is_explained(call)) return rf__tensor_make_contiguous(tensor, dtype, slot);
    void *data = NULL; /* nothing reads elements */
    RF_CHECK(rf__tensor_reserve(tensor->dim, tensor->sizes, dtype, slot, &data));
    return rf__tensor_read(tensor->argument, *slot, tensor->dim, call->device, tensor);
}

rf_status rf__call_temporary(rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                             AtenTensorHandle *tensor, void **data) {
    AtenTensorHandle *slot = NULL;
    RF_CHECK(temporary_slot(call, &slot));
    RF_CHECK(rf__call_new(call, dim, sizes, dtype, slot, data));
    *tensor = *slot;
    return RF_OK;
}

rf_status rf__call_new(const rf__call *call, int64_t dim, const int64_t *sizes, int32_t dtype,
                       AtenTensorHandle *tensor, void **data) {
    return rf__call_is_explained(call) ? rf__tensor_reserve(dim, sizes, dtype, tensor, data)
                                       : rf__tensor_new(dim, sizes, dtype, call->device, tensor, data);
}

rf_status rf__call_output(rf__call *call, int output, int64_t dim, const int64_t *sizes, int32_t dtype,
                          void **data) {
    rf__value *value = &call->outputs[output];
    const rf_status status = rf__call_new(call, dim, sizes, dtype, &value->tensor, data);
    value->is_present = value->tensor != NULL;
    return status;
}

/* libtorch before 2.15 copies a returned string and never frees it: 48 bytes per call, which this library
 * must not free, because later versions do. No frequent operator returns a string. */
rf_status rf__call_output_text(rf__call *call, int output, const char *text) {
    rf__value *value = &call->outputs[output];
    RF_FAIL_IF(torch_new_string_handle(text, strlen(text), &value->string) != 0, RF_ERR_MEMORY,
               "no memory for a string");
    value->is_present = true;
    return RF_OK;
}

rf_status rf__call_integers(rf__call *call, int argument, const void **data, int64_t *count,
                            rf_int_type *type) {
    return rf__call_integers_of(call, name_of(call, argument), call->values[argument].tensor, data, count,
                                type);
}

/* `sizes` [dim]. */
static rf_status integers_read(rf__call *call, const char *argument, AtenTensorHandle handle, int64_t dim,
                               const void **data, int64_t *sizes, rf_int_type *type) {
    rf__tensor tensor;
    RF_CHECK(rf__tensor_read(argument, handle, dim, call->device, &tensor));
    *type = tensor.dtype == aoti_torch_dtype_int64() ? RF_INT64 : RF_INT32;
    RF_FAIL_IF(*type == RF_INT32 && tensor.dtype != aoti_torch_dtype_int32(), RF_ERR_TYPE,
               "%s is %s; expected int32 or int64", tensor.argument, rf__torch_dtype_name(tensor.dtype));
    RF_CHECK(rf__call_contiguous(call, &tensor, tensor.dtype));
    *data = tensor.data;
    memcpy(sizes, tensor.sizes, (size_t)dim * sizeof *sizes);
    return RF_OK;
}

rf_status rf__call_integers_of(rf__call *call, const char *argument, AtenTensorHandle handle,
                               const void **data, int64_t *count, rf_int_type *type) {
    return integers_read(call, argument, handle, 1, data, count, type);
}

rf_status rf__call_integer_rows(rf__call *call, int argument, const void **data, int64_t *rows,
                                int64_t *columns, rf_int_type *type) {
    int64_t sizes[2];
    RF_CHECK(
        integers_read(call, name_of(call, argument), call->values[argument].tensor, 2, data, sizes, type));
    *rows = sizes[0];
    *columns = sizes[1];
    return RF_OK;
}

rf_status rf__call_text(rf__call *call, int argument, const char **text) {
    const StringHandle string = call->values[argument].string;
    size_t length = 0;
    RF__TORCH_CHECK(torch_string_c_str(string, text));
    RF__TORCH_CHECK(torch_string_length(string, &length));
    RF_FAIL_IF(strlen(*text) != length, RF_ERR_VALUE,
               "%s is \"%s\" with a zero byte after it; expected no zero byte", name_of(call, argument),
               *text);
    return RF_OK;
}

rf_status rf__call_choice(rf__call *call, int argument, const char *const *choices, int *chosen) {
    const char *text = NULL;
    char allowed[256] = "";
    size_t length = 0;
    RF_CHECK(rf__call_text(call, argument, &text));
    for (int i = 0; choices[i] != NULL; i++) {
        *chosen = i;
        if (strcmp(text, choices[i]) == 0) return RF_OK;
    }
    for (int i = 0; choices[i] != NULL; i++)
        length += (size_t)snprintf(allowed + length, sizeof allowed - length, "%s\"%s\"",
                                   i == 0                   ? ""
                                   : choices[i + 1] == NULL ? " or "
                                                            : ", ",
                                   choices[i]);
    return rf__fail(RF_ERR_VALUE, "%s is \"%s\"; expected %s", name_of(call, argument), text, allowed);
}

rf_status rf__call_bounds_check(rf__call *call, int argument, bool *check) {
    static const char *const choices[] = {"on", "off", NULL};
    int chosen = 0;
    const rf_status status = rf__call_choice(call, argument, choices, &chosen);
    *check = chosen == 0;
    return status;
}

rf_status rf__dtype_read(const rf__tensor *tensor, bool first, const char *like, rf_dtype *dtype) {
    if (!first && tensor->dtype == rf__torch_dtype(*dtype)) return RF_OK;
    RF_FAIL_IF(!first, RF_ERR_TYPE, "%s is %s; expected %s as %s", tensor->argument,
               rf__torch_dtype_name(tensor->dtype), rf__torch_dtype_name(rf__torch_dtype(*dtype)), like);
    for (*dtype = RF_FLOAT32; *dtype <= RF_FLOAT64; ++*dtype)
        if (tensor->dtype == rf__torch_dtype(*dtype)) return RF_OK;
    return rf__fail(RF_ERR_TYPE, "%s is %s; expected float16, bfloat16, float32 or float64", tensor->argument,
                    rf__torch_dtype_name(tensor->dtype));
}

rf_status rf__call_prefetch_distance(rf__call *call, int argument, int32_t *distance) {
    const int64_t value = call->values[argument].integer;
    RF_FAIL_IF(
        value < -1 || value > INT32_MAX, RF_ERR_VALUE,
        "prefetch_distance is %lld; expected -1 (a good default), 0 (no prefetching) or a number of lookups",
        (long long)value);
    *distance = (int32_t)value;
    return RF_OK;
}

rf_status rf__call_sample_weights(rf__call *call, int argument, int64_t lookups, const float **weights) {
    rf__tensor tensor;
    rf_dtype dtype;
    *weights = NULL;
    if (!call->values[argument].is_present) return RF_OK;
    RF_CHECK(rf__call_tensor(call, argument, 1, &tensor));
    RF_CHECK(rf__tensor_dtype(&tensor, &dtype));
    RF_FAIL_IF(tensor.sizes[0] != lookups, RF_ERR_VALUE,
               "%s has %lld elements; expected a weight for each of the %lld indices", tensor.argument,
               (long long)tensor.sizes[0], (long long)lookups);
    RF_CHECK(rf__call_contiguous(call, &tensor, aoti_torch_dtype_float32()));
    *weights = tensor.data;
    return RF_OK;
}

rf_status rf__call_offsets_complete(rf__call *call, int64_t bags, int64_t lookups, const void **offsets,
                                    rf_int_type *type) {
    if (rf__call_is_explained(call)) return RF_OK; /* the type stays, as on a GPU; nothing reads offsets */
    int64_t *complete = malloc((size_t)(bags + 1) * sizeof *complete);
    RF_FAIL_IF(complete == NULL, RF_ERR_MEMORY, "no memory for %lld offsets", (long long)bags);
    call->offsets = complete;
    rf__offsets_copy(*offsets, *type, 1, bags, 0, complete);
    complete[bags] = lookups;
    *offsets = complete;
    *type = RF_INT64;
    return RF_OK;
}

/* A forked child has none of its parent's threads, but torch's pool still counts on them: a parallel loop in
 * the child waits forever, also torch's own. So such a child runs on the caller's thread. */
static bool forked;

static void note_fork(void) { forked = true; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

rf_status rf__call_executor(rf_executor *executor) {
    uint32_t threads = 1;
    if (!forked) RF__TORCH_CHECK(torch_get_num_threads(&threads));
    executor->threads = (int32_t)threads;
    executor->parallel_for = torch_parallel_for;
    return RF_OK;
}
