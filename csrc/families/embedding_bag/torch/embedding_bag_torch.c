/* recfuse::embedding_bag on CPU and GPU: tensors -> rf_embedding_bag_params. */
#include "torch/arguments.h"
#include "torch/operators.h"

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

static rf_status pooling_read(rf__call *call, rf_pooling *pooling) {
#define TEXT(name, text) text,
    static const char *const modes[] = {RF_POOLING_LIST(TEXT) NULL};
#undef TEXT
    int mode = 0;
    const rf_status status = rf__call_choice(call, MODE, modes, &mode);
    *pooling = (rf_pooling)mode;
    return status;
}

/* Rows may have gaps, as in a slice of a wider table; other layouts are copied. */
static rf_status weight_read(rf__call *call, rf__tensor *weight, rf_embedding_bag_params *params) {
    RF_CHECK(rf__call_tensor(call, WEIGHT, 2, weight));
    RF_CHECK(rf__tensor_dtype(weight, &params->dtype));
    params->rows = weight->sizes[0];
    params->dim = weight->sizes[1];
    const bool unit_columns = params->dim <= 1 || weight->strides[1] == 1;
    if (!unit_columns || (params->rows > 1 && weight->strides[0] < params->dim))
        RF_CHECK(rf__call_contiguous(call, weight, weight->dtype));
    params->weight_stride = params->rows > 1 ? weight->strides[0] : params->dim;
    params->weight = weight->data;
    return RF_OK;
}

/* Without offsets indices is [bags, n], and bags are its rows. */
static rf_status lookups_read(rf__call *call, rf_embedding_bag_params *params) {
    int64_t n_offsets = 0, columns = 0;
    if (!call->values[OFFSETS].is_present) {
        RF_FAIL_IF(params->include_last_offset, RF_ERR_VALUE,
                   "include_last_offset is True without offsets; expected False");
        RF_CHECK(rf__call_integer_rows(call, INDICES, &params->indices, &params->bags, &columns,
                                       &params->index_type));
        params->lookups = params->bags * columns;
        params->offset_type = params->index_type;
        return RF_OK;
    }
    RF_CHECK(rf__call_integers(call, INDICES, &params->indices, &params->lookups, &params->index_type));
    RF_CHECK(rf__call_integers(call, OFFSETS, &params->offsets, &n_offsets, &params->offset_type));
    RF_FAIL_IF(params->include_last_offset && n_offsets == 0, RF_ERR_VALUE,
               "offsets is empty; expected at least one element with include_last_offset");
    params->bags = n_offsets - params->include_last_offset;
    return RF_OK;
}

/* Reads the schedule, with its distance from prefetch_distance if present: 0 is a plain loop. */
static rf_status schedule_read(rf__call *call, rf_embedding_bag_params *params,
                               rf_embedding_bag_schedule *schedule) {
    enum { MOST_DISTANCE = 64 };
    const char *text = NULL;
    RF_CHECK(rf__call_prefetch_distance(call, PREFETCH_DISTANCE, &params->prefetch_distance));
    RF_CHECK(rf__call_text(call, SCHEDULE, &text));
    RF_CHECK(rf_embedding_bag_schedule_parse(text, schedule));
    if (params->prefetch_distance > 0) {
        schedule->distance =
            params->prefetch_distance < MOST_DISTANCE ? params->prefetch_distance : MOST_DISTANCE;
    } else if (params->prefetch_distance == 0) {
        schedule->station = RF_STATION_NONE;
        schedule->distance = 1;
    } else if (schedule->distance > 0) {
        params->prefetch_distance = schedule->distance;
    }
    return RF_OK;
}

static rf_status output_make(rf__call *call, const rf__tensor *weight, rf_embedding_bag_params *params) {
    const int64_t sizes[2] = {params->bags, params->dim};
    params->output_stride = params->dim;
    return rf__call_output(call, 0, 2, sizes, weight->dtype, &params->output);
}

static rf_status pool(const rf__call *call, const rf_embedding_bag_params *params,
                      const rf_embedding_bag_schedule *schedule) {
    rf_executor executor;
    rf_cuda_stream stream;
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_embedding_bag_cpu(params, &executor);
    }
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_embedding_bag_cuda(params, schedule, &stream);
}

static rf_status run(rf__call *call) {
    const rf__value *values = call->values;
    rf_embedding_bag_params params = {.include_last_offset = values[INCLUDE_LAST_OFFSET].boolean,
                                      .padding_idx = values[PADDING_IDX].integer};
    rf_embedding_bag_schedule schedule;
    rf__tensor weight;
    RF_CHECK(rf__call_device(call, WEIGHT));
    RF_CHECK(weight_read(call, &weight, &params));
    RF_CHECK(lookups_read(call, &params));
    RF_CHECK(pooling_read(call, &params.pooling));
    RF_CHECK(rf__call_bounds_check(call, BOUNDS_CHECK, &params.check_bounds));
    RF_CHECK(schedule_read(call, &params, &schedule));
    RF_CHECK(rf__call_sample_weights(call, SAMPLE_WEIGHTS, params.lookups, &params.sample_weights));
    RF_CHECK(output_make(call, &weight, &params));
    return pool(call, &params, &schedule);
}

/* A plain call on the CPU, outside of autograd: a sum or mean by the defaults of the rest. */
static rf_status plain_run(rf__call *call) {
    enum { POOLING = 3, LAST, PADDING };
    const rf__value *values = call->values;
    rf_embedding_bag_params params = {.include_last_offset = values[LAST].boolean,
                                      .padding_idx = values[PADDING].integer,
                                      .pooling = (rf_pooling)values[POOLING].integer,
                                      .check_bounds = true,
                                      .prefetch_distance = -1};
    rf__tensor weight;
    RF_FAIL_IF(values[POOLING].integer != RF_SUM && values[POOLING].integer != RF_MEAN, RF_ERR_VALUE,
               "pooling is %lld; expected 0 (sum) or 1 (mean)", (long long)values[POOLING].integer);
    RF_CHECK(rf__call_device(call, WEIGHT));
    RF_CHECK(weight_read(call, &weight, &params));
    RF_CHECK(lookups_read(call, &params));
    RF_CHECK(output_make(call, &weight, &params));
    return pool(call, &params, NULL);
}

const rf__operator rf__torch_embedding_bag = {
    "(Tensor weight, Tensor indices, Tensor? offsets, str mode=\"mean\", "
    "Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1, "
    "bool scale_grad_by_freq=False, bool sparse=False, int prefetch_distance=-1, "
    "str bounds_check=\"on\", str schedule=\"\") -> Tensor",
    RF__CPU | RF__CUDA, run};
const rf__operator rf__torch__embedding_bag = {
    "(Tensor weight, Tensor indices, Tensor offsets, int pooling, bool include_last_offset, int "
    "padding_idx) -> Tensor",
    RF__CPU, plain_run};
