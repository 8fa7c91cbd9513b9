/* recfuse::fused_embedding on CPU and GPU: tensors -> rf_fused_embedding_params. */
#include <stdlib.h>

#include "families/fused_embedding/check_fused_embedding.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "torch/operators.h"

enum {
    WEIGHTS,
    FEATURES,
    INDICES,
    OFFSETS,
    OUTPUT_DIM,
    SIZES,
    FILL,
    LAYOUT,
    LENGTH,
    DTYPE,
    SPARSE, /* only of the gradients */
    BOUNDS_CHECK
};

/* Tables are whole rows of their weights, whose gradients have their shape. */
static rf_status rows_check(const rf_fused_embedding_bag_params *bags, const int64_t *columns) {
    for (int64_t i = 0; i < bags->n_buffers; i++)
        RF_FAIL_IF(columns[i] < 0, RF_ERR_VALUE, "weights[%lld] has 1 dimension; expected 2", (long long)i);
    for (int64_t f = 0; f < bags->n_features; f++) {
        const rf_feature *feature = &bags->features[f];
        if (feature->buffer < 0 || feature->buffer >= bags->n_buffers) continue; /* checked later */
        const int64_t dim = columns[feature->buffer];
        RF_FAIL_IF(feature->dim != dim || !rf__is_multiple(feature->weight_offset, dim), RF_ERR_VALUE,
                   "features[%lld] has %lld columns and begins at element %lld; expected whole rows of "
                   "weights[%lld], which has %lld columns",
                   (long long)f, (long long)feature->dim, (long long)feature->weight_offset,
                   (long long)feature->buffer, (long long)dim);
    }
    return RF_OK;
}

/* Weights with their columns, features, indices and offsets, as those of the bags. */
static rf_status lookups_read(rf__call *call, const int64_t **columns, rf_fused_embedding_params *params) {
    rf_fused_embedding_bag_params bags = {0};
    RF_CHECK(rf__call_device(call, INDICES));
    RF_CHECK(rf__fused_features_read(call, FEATURES, &bags.features, &bags.n_features));
    RF_CHECK(rf__fused_weights_read(call, WEIGHTS, columns, &bags));
    RF_CHECK(rf__fused_lookups_read(call, INDICES, OFFSETS, -1, &bags));
    RF_CHECK(rows_check(&bags, *columns));
    *params = (rf_fused_embedding_params){.buffers = bags.buffers,
                                          .n_buffers = bags.n_buffers,
                                          .features = bags.features,
                                          .n_features = bags.n_features,
                                          .indices = bags.indices,
                                          .lookups = bags.lookups,
                                          .offsets = bags.offsets,
                                          .bags = bags.bags,
                                          .index_type = bags.index_type,
                                          .offset_type = bags.offset_type,
                                          .output_dtype = bags.output_dtype};
    return RF_OK;
}

/* Reads sizes, and sets the first rows of the features after those of their weights. `rows` of a jagged call
 * number the rows of all weights, so that a backward pass can select those of one weight. A weight without
 * columns has no number. */
static rf_status numbers_read(rf__call *call, const int64_t *columns, bool with_rows,
                              rf_fused_embedding_params *params) {
    size_t n_sizes = 0;
    if (call->values[SIZES].is_present) RF__TORCH_CHECK(torch_list_size(call->values[SIZES].list, &n_sizes));
    RF_FAIL_IF(n_sizes != 0 && n_sizes != (size_t)params->n_features, RF_ERR_VALUE,
               "sizes has %zu elements; expected %lld, as many as features, or 0", n_sizes,
               (long long)params->n_features);
    int64_t *numbers = calloc((size_t)(2 * params->n_features + params->n_buffers) + 1, sizeof *numbers);
    RF_FAIL_IF(numbers == NULL, RF_ERR_MEMORY, "no memory for %lld features", (long long)params->n_features);
    call->offsets = numbers; /* freed with the call */
    int64_t *first_rows = numbers + params->n_features, *of_buffer = first_rows + params->n_features;
    for (size_t i = 0; i < n_sizes; i++) {
        rf__value item = {0};
        RF__TORCH_CHECK(torch_list_get_item(call->values[SIZES].list, i, &item.bits));
        numbers[i] = item.integer;
    }
    if (n_sizes > 0) params->sizes = numbers;
    if (!with_rows) return RF_OK;
    const bool numbers_all = params->layout == RF_HISTORY_JAGGED && n_sizes == 0;
    for (int64_t i = 1; i < params->n_buffers && numbers_all; i++) {
        const int64_t dim = columns[i - 1]; /* a weight without a feature may have another dim */
        of_buffer[i] = of_buffer[i - 1] + (dim > 0 ? params->buffers[i - 1].numel / dim : 0);
    }
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        if (feature->buffer < 0 || feature->buffer >= params->n_buffers) continue; /* checked later */
        first_rows[f] =
            of_buffer[feature->buffer] + (feature->dim > 0 ? feature->weight_offset / feature->dim : 0);
    }
    params->first_rows = first_rows;
    return RF_OK;
}

/* fill: [output_dim] of any float type, converted to that of the output. */
static rf_status fill_read(rf__call *call, rf_fused_embedding_params *params) {
    rf__tensor fill;
    if (!call->values[FILL].is_present) return RF_OK;
    RF_CHECK(rf__call_tensor(call, FILL, 1, &fill));
    RF_FAIL_IF(fill.sizes[0] != params->output_dim, RF_ERR_VALUE,
               "fill has %lld elements; expected %lld, the columns of all features", (long long)fill.sizes[0],
               (long long)params->output_dim);
    RF_CHECK(rf__call_contiguous(call, &fill, rf__torch_dtype(params->output_dtype)));
    params->fill = fill.data;
    return RF_OK;
}

static rf_status options_read(rf__call *call, rf_fused_embedding_params *params) {
#define RF__TEXT(name, text) text,
    static const char *const layouts[] = {RF_HISTORY_LAYOUT_LIST(RF__TEXT) NULL};
#undef RF__TEXT
    int layout = 0;
    const int64_t dtype = call->values[DTYPE].integer;
    RF_CHECK(rf__call_choice(call, LAYOUT, layouts, &layout));
    RF_FAIL_IF(dtype < -1 || dtype > RF_BFLOAT16, RF_ERR_TYPE,
               "dtype is %lld; expected -1 (of the weights), 0 (float32), 1 (float16) or 2 (bfloat16)",
               (long long)dtype);
    if (dtype >= 0) params->output_dtype = (rf_dtype)dtype;
    params->layout = (rf_history_layout)layout;
    params->length = call->values[LENGTH].integer;
    params->output_dim = call->values[OUTPUT_DIM].integer;
    return rf__call_bounds_check(call, BOUNDS_CHECK, &params->check_bounds);
}

static rf_status output_make(rf__call *call, rf_fused_embedding_params *params, bool with_rows) {
    const int32_t dtype = rf__torch_dtype(params->output_dtype);
    const int64_t slots = rf__history_slots(params);
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED;
    const int64_t flat[1] = {params->output_dim}, matrix[2] = {slots, params->output_dim};
    const int64_t padded[3] = {params->bags, params->length, params->output_dim};
    const int64_t rows[1] = {is_jagged ? slots : slots * params->n_features};
    if (params->sizes != NULL) {
        RF_CHECK(rf__call_output(call, 0, 1, flat, dtype, &params->output));
    } else if (params->layout == RF_HISTORY_PADDED) {
        RF_CHECK(rf__call_output(call, 0, 3, padded, dtype, &params->output));
    } else {
        RF_CHECK(rf__call_output(call, 0, 2, matrix, dtype, &params->output));
    }
    if (!with_rows) return RF_OK;
    return rf__call_output(call, 1, 1, rows, aoti_torch_dtype_int64(), (void **)&params->rows);
}

static rf_status look_up(rf__call *call, bool with_rows) {
    rf_fused_embedding_params params;
    rf_executor executor;
    rf_cuda_stream stream;
    const int64_t *columns = NULL;
    RF_CHECK(lookups_read(call, &columns, &params));
    RF_CHECK(options_read(call, &params));
    RF_CHECK(numbers_read(call, columns, with_rows, &params));
    RF_CHECK(fill_read(call, &params));
    RF_CHECK(rf__check_fused_embedding(&params));
    RF_CHECK(output_make(call, &params, with_rows));
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_fused_embedding_cpu(&params, &executor);
    }
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_fused_embedding_cuda(&params, &stream);
}

static rf_status run(rf__call *call) { return look_up(call, false); }
static rf_status run_rows(rf__call *call) { return look_up(call, true); }

#define ARGUMENTS                                                                                     \
    "(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim, "         \
    "SymInt[]? sizes=None, Tensor? fill=None, str layout=\"jagged\", SymInt length=0, int dtype=-1, " \
    "bool sparse=False, str bounds_check=\"on\") -> "
const rf__operator rf__torch_fused_embedding = {ARGUMENTS "Tensor", RF__CPU | RF__CUDA, run};
/* Also the row of each slot in its weight, which gradients need; -1: none. */
const rf__operator rf__torch__fused_embedding_rows = {ARGUMENTS "(Tensor, Tensor)", RF__CPU | RF__CUDA,
                                                      run_rows};
