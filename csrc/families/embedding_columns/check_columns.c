/* Checks of a call of embedding columns. */
#include "families/embedding_columns/program/columns_program.h"
#include "core/validate.h"

#include <stddef.h>

static const char operator_name[] = "embedding_columns";

static rf_status check_input(const rf_embedding_columns_params *params, int64_t at) {
    const rf_column_input *input = &params->inputs[at];
    int64_t bags;
    RF__REFUSE_IF(input->type < RF_COLUMN_FLOAT32 || input->type > RF_COLUMN_INT64, RF_ERR_TYPE,
                  "inputs[" RF__I64
                  "] has type %d; expected RF_COLUMN_FLOAT32, RF_COLUMN_INT32 or RF_COLUMN_INT64",
                  at, (int)input->type);
    RF__REFUSE_IF(input->width < 0 || input->features < 0 || input->lookups < 0 ||
                      __builtin_mul_overflow(input->features, params->batch, &bags),
                  RF_ERR_VALUE,
                  "inputs[" RF__I64 "] has width " RF__I64 ", " RF__I64 " features and " RF__I64
                  " lookups; expected sizes of 0 or more",
                  at, input->width, input->features, input->lookups);
    if (input->width > 0) {
        RF__REFUSE_IF(input->values == NULL && params->batch > 0, RF_ERR_VALUE,
                      "inputs[" RF__I64 "] has values NULL; expected a pointer to [batch, width]", at);
        return RF_OK;
    }
    RF__REFUSE_IF(input->offset_type != RF_INT32 && input->offset_type != RF_INT64, RF_ERR_TYPE,
                  "inputs[" RF__I64 "] has offset_type %d; expected RF_INT32 or RF_INT64", at,
                  (int)input->offset_type);
    RF__REFUSE_IF(input->offsets == NULL || (input->values == NULL && input->lookups > 0), RF_ERR_VALUE,
                  "inputs[" RF__I64 "] has %s NULL; expected a pointer to its elements", at,
                  input->offsets == NULL ? "offsets" : "values");
    return RF_OK;
}

/* A source against the inputs of a call; its numbers are allowed. */
static rf_status check_call_source(const rf__columns *columns, const rf_embedding_columns_params *params,
                                   int32_t at, int32_t number) {
    const rf_columns_source *source = &columns->sources[number];
    RF__REFUSE_COLUMN_IF(source->input >= params->n_inputs, RF_ERR_VALUE,
                         "its source is input %d; expected one of " RF__I64 " inputs", (int)source->input,
                         params->n_inputs);
    const rf_column_input *input = &params->inputs[source->input];
    RF__REFUSE_COLUMN_IF((source->width > 0) != (input->width > 0), RF_ERR_VALUE,
                         "its source is %s, and input %d is %s", source->width > 0 ? "dense" : "jagged",
                         (int)source->input, input->width > 0 ? "dense" : "jagged");
    RF__REFUSE_COLUMN_IF(
        source->width > 0 && source->slot > input->width - source->width, RF_ERR_VALUE,
        "its source takes values %d to " RF__I64 " of each sample of input %d, which has " RF__I64,
        (int)source->slot, source->slot + (int64_t)source->width - 1, (int)source->input, input->width);
    RF__REFUSE_COLUMN_IF(source->width == 0 && source->slot >= input->features, RF_ERR_VALUE,
                         "its source is feature %d of input %d, which has " RF__I64, (int)source->slot,
                         (int)source->input, input->features);
    return rf__check_column_kind(columns, at, number,
                                 input->type == RF_COLUMN_FLOAT32 ? RF__COLUMN_FLOAT : RF__COLUMN_INTEGER);
}

static rf_status check_call_column(const rf__columns *columns, const rf_embedding_columns_params *params,
                                   bool with_output, int32_t at) {
    const rf_columns_column *column = &columns->columns[at];
    RF_CHECK(check_call_source(columns, params, at, column->left));
    if (column->right >= 0) RF_CHECK(check_call_source(columns, params, at, column->right));
    const rf_column_input *input = &params->inputs[columns->sources[column->left].input];
    RF__REFUSE_COLUMN_IF(column->weighted != 0 && input->weights == NULL && input->lookups > 0, RF_ERR_VALUE,
                         "it is weighted, and input %d has no weights",
                         (int)columns->sources[column->left].input);
    if (!with_output || column->buffer < 0) return RF_OK;
    RF__REFUSE_COLUMN_IF(column->buffer >= params->n_buffers, RF_ERR_VALUE,
                         "its table is in buffer %d; expected one of " RF__I64 " buffers",
                         (int)column->buffer, params->n_buffers);
    const int64_t numel = params->buffers[column->buffer].numel;
    RF__REFUSE_COLUMN_IF(column->weight_offset + column->rows * column->dim > numel, RF_ERR_VALUE,
                         "its table is " RF__I64 " x %d at element " RF__I64
                         "; expected a table within buffer %d, which has " RF__I64 " elements",
                         column->rows, (int)column->dim, column->weight_offset, (int)column->buffer, numel);
    return RF_OK;
}

static rf_status check_call_output(const rf_embedding_columns_params *params, const rf__columns *columns) {
    int64_t elements;
    for (int64_t b = 0; b < params->n_buffers; b++) {
        RF_CHECK(rf__check_dtype(operator_name, "dtype of a buffer", params->buffers[b].dtype));
        RF__REFUSE_IF(params->buffers[b].data == NULL && params->buffers[b].numel > 0, RF_ERR_VALUE,
                      "buffers[" RF__I64 "] has data NULL; expected a pointer to its elements", b);
    }
    RF_CHECK(rf__check_dtype(operator_name, "output_dtype", params->output_dtype));
    RF__REFUSE_IF(params->output_dim != columns->header->output_dim, RF_ERR_VALUE,
                  "output_dim is " RF__I64 "; expected the " RF__I64 " columns of the program",
                  params->output_dim, columns->header->output_dim);
    RF__REFUSE_IF(params->output_stride < params->output_dim ||
                      __builtin_mul_overflow(params->batch, params->output_stride, &elements) ||
                      elements > INT64_MAX / 8,
                  RF_ERR_VALUE,
                  "output_stride is " RF__I64 "; expected output_dim, " RF__I64
                  ", or more, and an output that fits int64",
                  params->output_stride, params->output_dim);
    RF__REFUSE_IF(params->output == NULL && params->batch > 0 && params->output_dim > 0, RF_ERR_VALUE, "%s",
                  "output is NULL; expected a pointer to its elements");
    return RF_OK;
}

rf_status rf__check_columns(const rf_embedding_columns_params *params, bool with_output,
                            rf__columns *columns) {
    RF__REFUSE_IF(params->batch < 0 || params->n_inputs < 0 || params->n_buffers < 0, RF_ERR_VALUE,
                  "batch is " RF__I64 ", with " RF__I64 " inputs and " RF__I64
                  " buffers; expected sizes of 0 or more",
                  params->batch, params->n_inputs, params->n_buffers);
    RF_CHECK(rf__columns_open(params->program, params->program_words, columns));
    for (int64_t i = 0; i < params->n_inputs; i++) RF_CHECK(check_input(params, i));
    const uint64_t digest = rf__columns_digest(params, with_output, columns);
    const bool is_checked = rf__columns_is_checked(digest);
    if (!is_checked) RF_CHECK(rf__check_columns_program(columns));
    if (with_output) RF_CHECK(check_call_output(params, columns));
    if (is_checked) return RF_OK;
    for (int32_t at = 0; at < columns->header->n_columns; at++)
        RF_CHECK(check_call_column(columns, params, with_output, at));
    rf__columns_remember(digest);
    return RF_OK;
}
