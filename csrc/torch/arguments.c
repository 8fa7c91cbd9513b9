/* Arguments that several operators share. */
#include "torch/ops.h"

#include <pthread.h>
#include <string.h>

/* A forked child has none of its parent's threads, but torch's pool still counts on them: a parallel loop
 * there waits for ever, torch's own too. So such a child runs on the caller's thread. */
static bool forked;

static void note_fork(void) { forked = true; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

rf_status rf__torch_executor(rf_executor *executor) {
    rf_status status = RF_OK;
    uint32_t threads = 1;
    if (!forked) RF__TORCH_TRY(torch_get_num_threads(&threads));
    executor->threads = (int32_t)threads;
    executor->parallel_for = torch_parallel_for;
out:
    return status;
}

rf_status rf__bounds_check_parse(StringHandle string, bool *check) {
    rf_status status = RF_OK;
    const char *text = NULL;
    RF_TRY(rf__string_read("bounds_check", string, &text));
    *check = strcmp(text, "on") == 0;
    if (!*check && strcmp(text, "off") != 0) {
        return rf__fail(RF_ERR_VALUE, "bounds_check is \"%s\", must be \"on\" or \"off\"", text);
    }
out:
    return status;
}

rf_status rf__prefetch_distance_parse(int64_t value, int32_t *distance) {
    if (value < -1 || value > INT32_MAX) {
        return rf__fail(RF_ERR_VALUE,
                        "prefetch_distance is %lld, must be -1 (a good default), 0 (no "
                        "prefetching) or a number of lookups",
                        (long long)value);
    }
    *distance = (int32_t)value;
    return RF_OK;
}

rf_status rf__integers_read(const char *argument, AtenTensorHandle handle, const rf__place *place,
                            AtenTensorHandle *copy, rf__tensor *integers, rf_int_type *type) {
    rf_status status = RF_OK;
    RF_TRY(rf__tensor_read(argument, handle, 1, place, integers));
    RF_TRY(rf__tensor_int_type(integers, type));
    RF_TRY(rf__tensor_make_contiguous(integers, integers->dtype, copy));
out:
    return status;
}

rf_status rf__sample_weights_read(AtenTensorHandle handle, int64_t lookups, const rf__place *place,
                                  AtenTensorHandle *copy, const float **weights) {
    rf_status status = RF_OK;
    rf__tensor tensor;
    rf_dtype dtype;
    *weights = NULL;
    if (handle == NULL) return RF_OK;
    RF_TRY(rf__tensor_read("per_sample_weights", handle, 1, place, &tensor));
    RF_TRY(rf__tensor_dtype(&tensor, &dtype));
    if (tensor.sizes[0] != lookups) {
        return rf__fail(RF_ERR_VALUE,
                        "per_sample_weights has %lld elements, must have one for each of the "
                        "%lld indices",
                        (long long)tensor.sizes[0], (long long)lookups);
    }
    RF_TRY(rf__tensor_make_contiguous(&tensor, aoti_torch_dtype_float32(), copy));
    *weights = tensor.data;
out:
    return status;
}
