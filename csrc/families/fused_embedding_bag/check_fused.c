/* rf__check_fused_call, rf__check_fused_features, rf_stored_tables_buffers. */
#include "families/fused_embedding_bag/check_fused.h"

#include <stddef.h>

#include "families/fused_embedding_bag/feature_rows.h"

static const char operator_name[] = "fused_embedding_bag";

/* Of a table whose rows have a pitch. */
static rf_status check_pitched_feature(const rf_fused_embedding_bag_params *params, int64_t at) {
    const rf_feature *feature = &params->features[at];
    const rf_buffer *buffer = &params->buffers[feature->buffer];
    const int64_t bytes = rf__feature_row(params->buffers, feature).bytes;
    RF__REFUSE_IF(!rf__is_multiple(feature->weight_offset, feature->dim), RF_ERR_VALUE,
                  "features[" RF__I64 "] begins at element " RF__I64 "; expected a multiple of its " RF__I64
                  " columns, because rows of weights[" RF__I64 "] have a pitch",
                  at, feature->weight_offset, feature->dim, feature->buffer);
    RF__REFUSE_IF(rf__elements_in(buffer->dtype, bytes) != feature->dim, RF_ERR_VALUE,
                  "features[" RF__I64 "] has " RF__I64
                  " columns of int4; expected whole bytes, so an even number",
                  at, feature->dim);
    RF__REFUSE_IF(feature->rows > 1 && buffer->pitch < bytes, RF_ERR_VALUE,
                  "weights[" RF__I64 "] has a pitch of " RF__I64 " bytes; expected at least the " RF__I64
                  " bytes of a row, as in a contiguous tensor",
                  feature->buffer, buffer->pitch, bytes);
    return RF_OK;
}

/* Buffers of the C API are the operator's `weights`. */
static rf_status check_fused_feature(const rf_fused_embedding_bag_params *params, int64_t at,
                                     int64_t column) {
    const rf_feature *feature = &params->features[at];
    RF_CHECK(rf__check_table(operator_name, feature, at, params->buffers, params->n_buffers));
    const rf_buffer *buffer = &params->buffers[feature->buffer];
    if (buffer->pitch != 0 || rf_is_quantized((int)buffer->dtype))
        RF_CHECK(check_pitched_feature(params, at));
    RF__REFUSE_IF(feature->output_column != column, RF_ERR_VALUE,
                  "features[" RF__I64 "] has output_column " RF__I64 "; expected " RF__I64
                  ", the end of the feature before",
                  at, feature->output_column, column);
    RF__REFUSE_IF(feature->dim > params->output_dim - column, RF_ERR_VALUE,
                  "output_dim is " RF__I64 ", but features[" RF__I64 "] writes " RF__I64
                  " columns from column " RF__I64,
                  params->output_dim, at, feature->dim, column);
    return rf__check_pooling(operator_name, at, feature->pooling, feature->padding_idx, feature->rows,
                             params->sample_weights != NULL);
}

rf_status rf__check_fused_call(const rf_fused_embedding_bag_params *params) {
    int64_t bags;
    RF__REFUSE_IF(params->n_features < 0 || params->n_buffers < 0 ||
                      __builtin_mul_overflow(params->n_features, params->bags, &bags),
                  RF_ERR_VALUE,
                  "n_features is " RF__I64 ", n_buffers " RF__I64 " and bags " RF__I64
                  "; expected 0 or more, and a product that fits int64",
                  params->n_features, params->n_buffers, params->bags);
    return rf__check_lookups(operator_name, &(rf__lookup_arrays){RF__LOOKUPS_OF(params)},
                             params->prefetch_distance);
}

rf_status rf__check_fused_rows(const rf_fused_embedding_bag_params *params, const int64_t *columns) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        if (feature->buffer < 0 || feature->buffer >= params->n_buffers || columns[feature->buffer] < 0)
            continue;
        const int64_t dim = columns[feature->buffer];
        RF__REFUSE_IF(feature->dim != dim || !rf__is_multiple(feature->weight_offset, dim), RF_ERR_VALUE,
                      "features[" RF__I64 "] has " RF__I64 " columns and begins at element " RF__I64
                      "; expected whole rows of weights[" RF__I64 "], which has " RF__I64 " columns",
                      f, feature->dim, feature->weight_offset, feature->buffer, dim);
    }
    return RF_OK;
}

rf_status rf__check_fused_floats(const char *operator_name, const rf_fused_embedding_bag_params *params) {
    for (int64_t i = 0; i < params->n_buffers; i++)
        RF__REFUSE_IF(rf_is_quantized((int)params->buffers[i].dtype), RF_ERR_UNSUPPORTED,
                      "weights[" RF__I64 "] is quantised; expected floats, of which gradients exist", i);
    return RF_OK;
}

rf_status rf__check_fused_parameters(const char *operator_name, const rf_fused_embedding_bag_params *params,
                                     int64_t at) {
    const rf_feature *feature = &params->features[at];
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    const uint64_t parameters =
        (uintptr_t)rf__feature_parameters(params->buffers, feature) | (uint64_t)row.parameters_pitch;
    if (!rf_is_quantized((int)row.dtype)) return RF_OK;
    RF__REFUSE_IF(row.parameters_dtype != RF_FLOAT16 ||
                      parameters % (uint64_t)rf__parameters_bytes(RF_FLOAT16) != 0,
                  RF_ERR_UNSUPPORTED,
                  "features[" RF__I64 "] has parameters of rf_dtype %d, " RF__I64
                  " bytes apart; expected float16 (%d), aligned to 4 bytes, on a GPU",
                  at, (int)row.parameters_dtype, row.parameters_pitch, (int)RF_FLOAT16);
    return RF_OK;
}

rf_status rf__check_fused_warps(int32_t warps) {
    RF__REFUSE_IF(warps != 0 && (warps < 2 || warps > 64), RF_ERR_VALUE,
                  "warps is %d; expected 2 to 64, or 0 for a good default", (int)warps);
    return RF_OK;
}

/* Codes: rows and parameters must not overlap with those of the next row. */
static rf_status check_quantized_buffer(int64_t at, const rf_buffer *buffer) {
    RF__REFUSE_IF(buffer->parameters_dtype != RF_FLOAT16 && buffer->parameters_dtype != RF_FLOAT32,
                  RF_ERR_TYPE,
                  "parameters_dtype of weights[" RF__I64 "] is %d; expected RF_FLOAT16 or RF_FLOAT32", at,
                  (int)buffer->parameters_dtype);
    RF__REFUSE_IF(buffer->parameters == NULL && buffer->numel > 0, RF_ERR_VALUE,
                  "parameters of weights[" RF__I64 "] is NULL, for " RF__I64 " codes", at, buffer->numel);
    RF__REFUSE_IF(buffer->pitch < 0 ||
                      buffer->parameters_pitch < rf__parameters_bytes(buffer->parameters_dtype),
                  RF_ERR_VALUE,
                  "weights[" RF__I64 "] has a pitch of " RF__I64 " bytes, and its parameters of " RF__I64
                  "; expected at least the bytes of a row and of its parameters, as in contiguous tensors",
                  at, buffer->pitch, buffer->parameters_pitch);
    return RF_OK;
}

static rf_status check_buffer(int64_t at, const rf_buffer *buffer) {
    const bool is_quantized = rf_is_quantized((int)buffer->dtype);
    if (!is_quantized) RF_CHECK(rf__check_dtype(operator_name, "dtype of weights", buffer->dtype));
    RF__REFUSE_IF(buffer->data == NULL && buffer->numel > 0, RF_ERR_VALUE,
                  "weights[" RF__I64 "] is NULL, for " RF__I64 " elements", at, buffer->numel);
    return is_quantized ? check_quantized_buffer(at, buffer) : RF_OK;
}

rf_status rf__check_fused_features(const rf_fused_embedding_bag_params *params) {
    int64_t column = 0;
    RF_CHECK(rf__check_dtype(operator_name, "output_dtype", params->output_dtype));
    for (int64_t i = 0; i < params->n_buffers; i++) RF_CHECK(check_buffer(i, &params->buffers[i]));
    for (int64_t i = 0; i < params->n_features; i++) {
        RF_CHECK(check_fused_feature(params, i, column));
        column += params->features[i].dim;
    }
    RF__REFUSE_IF(column != params->output_dim, RF_ERR_VALUE,
                  "output_dim is " RF__I64 "; expected the " RF__I64 " columns of all features",
                  params->output_dim, column);
    RF__REFUSE_IF(params->output_stride < params->output_dim, RF_ERR_VALUE,
                  "output_stride is " RF__I64 "; expected output_dim, " RF__I64 ", or more",
                  params->output_stride, params->output_dim);
    RF__REFUSE_IF(params->output == NULL && params->bags > 0 && column > 0, RF_ERR_VALUE,
                  "output is NULL; expected a pointer to " RF__I64 " columns a bag", column);
    return RF_OK;
}

/* `bytes` at `first`, and again after each pitch, `rows` times, lie within `size` bytes. */
static bool rows_fit(int64_t first, int64_t rows, int64_t pitch, int64_t bytes, int64_t size) {
    int64_t last, end;
    if (first < 0 || rows < 0 || pitch < 0) return false;
    if (rows == 0) return first <= size;
    return !__builtin_mul_overflow(rows - 1, pitch, &last) && !__builtin_add_overflow(last, first, &last) &&
           !__builtin_add_overflow(last, bytes, &end) && end <= size;
}

static rf_status check_stored_dtypes(const rf_stored_table *table, int64_t at) {
    const bool is_quantized = rf_is_quantized((int)table->dtype);
    const int64_t dtype = table->dtype, of = table->parameters_dtype;
    RF__REFUSE_IF(!is_quantized && dtype != RF_FLOAT32 && dtype != RF_FLOAT16 && dtype != RF_BFLOAT16,
                  RF_ERR_TYPE,
                  "stored[" RF__I64 "] has rf_dtype " RF__I64
                  "; expected float32 (0), float16 (1), bfloat16 (2), int8 (4) or int4 (5)",
                  at, dtype);
    RF__REFUSE_IF(is_quantized && of != RF_FLOAT16 && of != RF_FLOAT32, RF_ERR_TYPE,
                  "stored[" RF__I64 "] has parameters of rf_dtype " RF__I64
                  "; expected float32 (0) or float16 (1)",
                  at, of);
    RF__REFUSE_IF(table->dim < 0 || (dtype == RF_INT4_ROWS && table->dim % 2 != 0), RF_ERR_VALUE,
                  "stored[" RF__I64 "] has " RF__I64 " columns; expected 0 or more, of int4 an even number",
                  at, table->dim);
    return RF_OK;
}

static rf_status stored_table_describe(const rf_stored_table *table, int64_t at, const rf_memory *memories,
                                       int64_t n_memories, rf_buffer *buffer) {
    RF__REFUSE_IF(table->memory < 0 || table->memory >= n_memories, RF_ERR_VALUE,
                  "stored[" RF__I64 "] is in weights[" RF__I64 "]; expected one of " RF__I64 " weights", at,
                  table->memory, n_memories);
    RF_CHECK(check_stored_dtypes(table, at));
    const rf_memory *memory = &memories[table->memory];
    const rf_dtype dtype = (rf_dtype)table->dtype;
    const bool is_quantized = rf_is_quantized((int)dtype);
    int64_t elements;
    RF__REFUSE_IF(!rf__rows_fit(RF_FLOAT32, table->rows < 0 ? 0 : table->rows, table->dim) ||
                      __builtin_mul_overflow(table->rows, table->dim, &elements),
                  RF_ERR_VALUE, "stored[" RF__I64 "] has " RF__I64 " x " RF__I64 " elements, beyond int64",
                  at, table->rows, table->dim);
    const int64_t bytes = rf__elements_bytes(dtype, table->dim);
    RF__REFUSE_IF(!rows_fit(table->first, table->rows, table->pitch, bytes, memory->bytes) ||
                      (table->rows > 1 && table->pitch < bytes),
                  RF_ERR_VALUE,
                  "stored[" RF__I64 "] has " RF__I64 " rows of " RF__I64 " bytes, " RF__I64
                  " apart, from byte " RF__I64 "; expected rows apart, within the " RF__I64
                  " bytes of weights[" RF__I64 "]",
                  at, table->rows, bytes, table->pitch, table->first, memory->bytes, table->memory);
    *buffer =
        (rf_buffer){.data = (const char *)memory->data + table->first, .numel = elements, .dtype = dtype};
    if (table->rows > 1 || is_quantized) buffer->pitch = table->pitch;
    if (!is_quantized) {
        const int64_t element = rf__elements_bytes(dtype, 1);
        RF__REFUSE_IF((uintptr_t)buffer->data % (uintptr_t)element != 0 || table->pitch % element != 0,
                      RF_ERR_VALUE,
                      "stored[" RF__I64 "] has floats at byte " RF__I64 ", " RF__I64
                      " bytes apart; expected multiples of the " RF__I64 " bytes of an element",
                      at, table->first, table->pitch, element);
        return RF_OK;
    }
    buffer->parameters_dtype = (rf_dtype)table->parameters_dtype;
    const int64_t of_row = rf__parameters_bytes(buffer->parameters_dtype);
    RF__REFUSE_IF(!rows_fit(table->parameters, table->rows, table->pitch, of_row, memory->parameters_bytes) ||
                      table->pitch < of_row,
                  RF_ERR_VALUE,
                  "stored[" RF__I64 "] has parameters of " RF__I64 " bytes, " RF__I64
                  " apart, from byte " RF__I64 "; expected parameters apart, within the " RF__I64
                  " bytes of parameters[" RF__I64 "]",
                  at, of_row, table->pitch, table->parameters, memory->parameters_bytes, table->memory);
    buffer->parameters = (const char *)memory->parameters + table->parameters;
    buffer->parameters_pitch = table->pitch;
    return RF_OK;
}

rf_status rf_stored_tables_buffers(const rf_stored_table *tables, int64_t n_tables, const rf_memory *memories,
                                   int64_t n_memories, rf_buffer *buffers) {
    for (int64_t t = 0; t < n_tables; t++)
        RF_CHECK(stored_table_describe(&tables[t], t, memories, n_memories, &buffers[t]));
    return RF_OK;
}
