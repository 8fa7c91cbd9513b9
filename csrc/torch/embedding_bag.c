/* recfuse::embedding_bag on CPU and GPU: tensors -> rf_embedding_bag_params. */
#include "torch/ops.h"

#include <string.h>

/* Positions in the schema. */
enum {
    WEIGHT,
    INDICES,
    OFFSETS,
    MODE,
    SAMPLE_WEIGHTS,
    INCLUDE_LAST_OFFSET,
    PADDING_IDX,
    SCALE_GRAD_BY_FREQ,
    SPARSE,
    PREFETCH_DISTANCE,
    BOUNDS_CHECK,
    SCHEDULE
};

static rf_status pooling_parse(StringHandle string, rf_pooling *pooling) {
    static const char *const names[] = {[RF_SUM] = "sum", [RF_MEAN] = "mean", [RF_MAX] = "max"};
    rf_status status = RF_OK;
    const char *text = NULL;
    RF_TRY(rf__string_read("mode", string, &text));
    for (rf_pooling known = RF_SUM; known <= RF_MAX; known++) {
        if (strcmp(text, names[known]) == 0) {
            *pooling = known;
            return RF_OK;
        }
    }
    return rf__fail(RF_ERR_VALUE, "mode is \"%s\", must be \"sum\", \"mean\" or \"max\"", text);
out:
    return status;
}

/* Rows may lie apart, as in a slice of a wider table; anything else is copied. */
static rf_status weight_read(AtenTensorHandle handle, const rf__place *place, rf__tensor *weight,
                             AtenTensorHandle *copy, rf_embedding_bag_params *params) {
    rf_status status = RF_OK;
    RF_TRY(rf__tensor_read("weight", handle, 2, place, weight));
    RF_TRY(rf__tensor_dtype(weight, &params->dtype));
    params->rows = weight->sizes[0];
    params->dim = weight->sizes[1];
    const bool unit_columns = params->dim <= 1 || weight->strides[1] == 1;
    if (!unit_columns || (params->rows > 1 && weight->strides[0] < params->dim)) {
        RF_TRY(rf__tensor_make_contiguous(weight, weight->dtype, copy));
    }
    params->weight_stride = params->rows > 1 ? weight->strides[0] : params->dim;
    params->weight = weight->data;
out:
    return status;
}

/* The schedule, and the distance in it where prefetch_distance is given: 0 is a plain loop. */
static rf_status schedule_read(StringHandle string, int64_t prefetch_distance,
                               rf_embedding_bag_params *params, rf_embedding_bag_schedule *schedule) {
    rf_status status = RF_OK;
    const char *text = NULL;
    RF_TRY(rf__prefetch_distance_parse(prefetch_distance, &params->prefetch_distance));
    RF_TRY(rf__string_read("schedule", string, &text));
    RF_TRY(rf_embedding_bag_schedule_parse(text, schedule));
    if (params->prefetch_distance > 0) {
        enum { MOST = 64 };
        schedule->distance = params->prefetch_distance < MOST ? params->prefetch_distance : MOST;
    } else if (params->prefetch_distance == 0) {
        schedule->station = RF_STATION_NONE;
        schedule->distance = 1;
    } else if (schedule->distance > 0) {
        params->prefetch_distance = schedule->distance;
    }
out:
    return status;
}

rf_status rf__torch_embedding_bag(const rf__value *values, AtenTensorHandle *output) {
    rf_status status = RF_OK;
    rf_embedding_bag_params params = {0};
    rf_embedding_bag_schedule schedule;
    rf__place place;
    rf__tensor weight, indices, offsets;
    AtenTensorHandle copies[4] = {NULL, NULL, NULL, NULL};
    RF_TRY(rf__tensor_place(values[WEIGHT].tensor, &place));
    RF_TRY(weight_read(values[WEIGHT].tensor, &place, &weight, &copies[0], &params));

    RF_TRY(rf__integers_read("indices", values[INDICES].tensor, &place, &copies[1], &indices,
                             &params.index_type));
    params.indices = indices.data;
    params.lookups = indices.sizes[0];

    RF_TRY(rf__integers_read("offsets", values[OFFSETS].tensor, &place, &copies[2], &offsets,
                             &params.offset_type));
    params.offsets = offsets.data;
    params.include_last_offset = values[INCLUDE_LAST_OFFSET].boolean;
    if (params.include_last_offset && offsets.sizes[0] == 0) {
        status = rf__fail(RF_ERR_VALUE, "offsets is empty, must have at least one element with "
                                        "include_last_offset");
        goto out;
    }
    params.bags = offsets.sizes[0] - params.include_last_offset;

    RF_TRY(pooling_parse(values[MODE].string, &params.pooling));
    RF_TRY(rf__bounds_check_parse(values[BOUNDS_CHECK].string, &params.check_bounds));
    RF_TRY(schedule_read(values[SCHEDULE].string, values[PREFETCH_DISTANCE].integer, &params, &schedule));
    RF_TRY(rf__sample_weights_read(values[SAMPLE_WEIGHTS].tensor, params.lookups, &place, &copies[3],
                                   &params.sample_weights));
    params.padding_idx = values[PADDING_IDX].integer;
    params.output_stride = params.dim;
    RF_TRY(rf__tensor_new(params.bags, params.dim, weight.dtype, &place, output, &params.output));
    if (rf__place_is_cpu(&place)) {
        rf_executor executor;
        RF_TRY(rf__torch_executor(&executor));
        RF_TRY(rf_embedding_bag_cpu(&params, &executor));
    } else {
        rf_cuda_stream stream;
        RF_TRY(rf__torch_stream(&place, &stream));
        RF_TRY(rf_embedding_bag_cuda(&params, &schedule, &stream));
    }
out:
    for (int i = 3; i >= 0; i--) rf__tensor_free(copies[i]);
    return status;
}
