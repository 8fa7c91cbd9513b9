/* rf_pin_rows_cuda and rf_unpin_all_cuda: which rows of a table leave L2 last. */
#include "families/pin_rows/pin_rows.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#include "families/pin_rows/pin_rows_args.h"

static const rf__kernel_source source = {"families/pin_rows/pin_rows.cu", "rf_pin_rows"};

typedef struct pin_rows_variant {
    int32_t index_type, pins;
} pin_rows_variant;

enum { BLOCK = 256 };

static rf_status describe(const void *key, rf__kernel_options *options) {
    const pin_rows_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_INDEX=%s -DRF_KEEP=%d",
             rf__kernel_integer(variant->index_type), (int)variant->pins);
    return RF_OK;
}

rf_status rf__pin_rows_lower(const rf_pin_rows_params *params, bool pins, rf__launches *launches) {
    launches->owner = params->weight; /* errors are those of the table's own calls */
    launches->shape = (uint64_t)params->rows;
    launches->checks = true;
    if (params->n_hot_rows == 0 || params->row_bytes == 0) return RF_OK;
    const pin_rows_variant variant = {(int32_t)params->index_type, pins};
    /* A row that begins inside a line reaches into one more. */
    const bool aligned = ((uintptr_t)params->weight | (uint64_t)params->row_pitch) % RF_PIN_LINE_BYTES == 0;
    const int64_t lines = (params->row_bytes + RF_PIN_LINE_BYTES - 1) / RF_PIN_LINE_BYTES + !aligned;
    int64_t blocks = 0;
    RF_FAIL_IF(
        __builtin_mul_overflow(params->n_hot_rows, lines, &blocks) || blocks > (int64_t)INT32_MAX * BLOCK,
        RF_ERR_VALUE, "recfuse.pin_rows: %" PRId64 " rows of %" PRId64 " bytes are more than any L2 holds",
        params->n_hot_rows, params->row_bytes);
    const rf_pin_rows_args args = {.weight = params->weight,
                                   .hot_rows = params->hot_rows,
                                   .rows = params->rows,
                                   .row_bytes = params->row_bytes,
                                   .row_pitch = params->row_pitch,
                                   .n_hot_rows = params->n_hot_rows,
                                   .lines = lines};
    const int64_t index = params->index_type == RF_INT64 ? 8 : 4;
    const rf__kernel_launch launch = {.source = &source,
                                      .describe = describe,
                                      .grid = {(uint32_t)((blocks + BLOCK - 1) / BLOCK)},
                                      .block = {BLOCK},
                                      .read_bytes = params->n_hot_rows * (params->row_bytes + index)};
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    rf__launches_bind_errors(launches, offsetof(rf_pin_rows_args, errors));
    return RF_OK;
}

rf_status rf_pin_rows_cuda(const rf_pin_rows_params *params, bool pins, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    int64_t bytes = 0;
    RF_FAIL_IF(
        params->rows < 0 || params->row_bytes < 0 || params->row_pitch < 0 || params->n_hot_rows < 0 ||
            __builtin_mul_overflow(params->rows, params->row_pitch, &bytes) ||
            (params->weight == NULL && params->rows > 0 && params->row_bytes > 0) ||
            (params->hot_rows == NULL && params->n_hot_rows > 0),
        RF_ERR_VALUE,
        "recfuse.pin_rows: found %" PRId64 " rows of %" PRId64 " bytes, %" PRId64 " bytes apart, and %" PRId64
        " hot rows; expected sizes of 0 or more that fit int64 together, and pointers that are not NULL",
        params->rows, params->row_bytes, params->row_pitch, params->n_hot_rows);
    RF_FAIL_IF(params->index_type != RF_INT32 && params->index_type != RF_INT64, RF_ERR_TYPE,
               "recfuse.pin_rows: index_type is %d; expected RF_INT32 or RF_INT64", (int)params->index_type);
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches launches;
    rf__launches_init(&launches, "pin_rows");
    return rf__launches_finish(rf__pin_rows_lower(params, pins, &launches), device, &launches, NULL,
                               stream->stream);
}

rf_status rf_unpin_all_cuda(int32_t device_ordinal) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(device_ordinal, &device));
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(RF__CUDA_CALL(device->driver->cuCtxResetPersistingL2Cache()));
}
