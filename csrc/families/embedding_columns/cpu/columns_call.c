/* The start and the end of every call of embedding columns. */
#include "families/embedding_columns/cpu/columns.h"

static const char operator_name[] = "embedding_columns";

rf_status rf__columns_begin(const rf_embedding_columns_params *params, bool with_output,
                            rf__columns_call *call) {
    *call = (rf__columns_call){.params = params};
    RF_CHECK(rf__check_columns(params, with_output, &call->program));
    call->kernels = rf__isa_in_use()->columns;
    call->pool = rf__isa_in_use()->kernels;
    if (with_output)
        call->output_row = rf__row_format_of(params->output_dtype, params->output_dim, params->output_stride);
    RF__REFUSE_IF(pthread_mutex_init(&call->lock, NULL) != 0, RF_ERR_MEMORY, "%s", "no mutex could be made");
    return RF_OK;
}

static bool is_before(const rf__column_offence *a, const rf__column_offence *b) {
    if (a->column != b->column) return a->column < b->column;
    if (a->sample != b->sample) return a->sample < b->sample;
    return a->position < b->position;
}

void rf__columns_offend(rf__columns_call *call, const rf__column_offence *offence) {
    pthread_mutex_lock(&call->lock);
    if (!call->has_offence || is_before(offence, &call->offence)) call->offence = *offence;
    call->has_offence = true;
    pthread_mutex_unlock(&call->lock);
}

static rf_status report(const rf__columns_call *call) {
    const rf__column_offence *bad = &call->offence;
    RF__REFUSE_IF(bad->kind == RF__COLUMN_NO_MEMORY, RF_ERR_MEMORY,
                  "column " RF__I64 ": no memory for a row of " RF__I64 " elements", bad->column, bad->value);
    RF__REFUSE_IF(bad->kind == RF__COLUMN_BAD_INDEX && bad->limit == 0, RF_ERR_INDEX,
                  "column " RF__I64 ": the index is " RF__I64 ", of value " RF__I64 " of sample " RF__I64
                  ", but its table has no rows, so no index is valid",
                  bad->column, bad->value, bad->position, bad->sample);
    RF__REFUSE_IF(bad->kind == RF__COLUMN_BAD_INDEX, RF_ERR_INDEX,
                  "column " RF__I64 ": the index is " RF__I64 ", of value " RF__I64 " of sample " RF__I64
                  "; expected 0 to " RF__I64 ", less than the " RF__I64 " rows of its table",
                  bad->column, bad->value, bad->position, bad->sample, bad->limit - 1, bad->limit);
    RF__REFUSE_IF(bad->limit < 0, RF_ERR_OFFSET,
                  "column " RF__I64 ": offsets[0] of input " RF__I64 " is " RF__I64
                  "; expected 0, where the first bag begins",
                  bad->column, bad->input, bad->value);
    return rf__fail(RF_ERR_OFFSET,
                    "recfuse.%s: column " RF__I64 ": offsets[" RF__I64 "] of input " RF__I64 " is " RF__I64
                    "; expected " RF__I64
                    " (where the bag before begins, since offsets never decrease) to " RF__I64
                    " (the number of its values)",
                    operator_name, bad->column, bad->position, bad->input, bad->value, bad->limit,
                    call->params->inputs[bad->input].lookups);
}

rf_status rf__columns_end(rf__columns_call *call, rf_status status) {
    pthread_mutex_destroy(&call->lock);
    return status == RF_OK && call->has_offence ? report(call) : status;
}

static rf__column_source source_of(const rf__columns_call *call, int32_t number) {
    if (number < 0) return (rf__column_source){0};
    const rf__columns *program = &call->program;
    const rf_columns_source *source = &program->sources[number];
    return (rf__column_source){.input = &call->params->inputs[source->input],
                               .steps = program->steps + source->first_step,
                               .n_steps = source->n_steps,
                               .slot = source->slot,
                               .width = source->width,
                               .batch = call->params->batch,
                               .boundaries = program->boundaries,
                               .vocabulary = program->vocabulary};
}

rf__column rf__column_of(const rf__columns_call *call, int64_t number) {
    const rf_columns_column *column = &call->program.columns[number];
    return (rf__column){.column = column,
                        .number = number,
                        .left = source_of(call, column->left),
                        .right = source_of(call, column->right)};
}

/* Values that a sample has of a source, on average; at least 1. */
static int64_t values_of(const rf__columns_call *call, int32_t number) {
    if (number < 0) return 1;
    const rf_columns_source *source = &call->program.sources[number];
    const rf_column_input *input = &call->params->inputs[source->input];
    if (source->width > 0) return source->width;
    const int64_t bags = input->features * call->params->batch;
    return bags > 0 ? 1 + input->lookups / bags : 1;
}

int64_t rf__columns_cost(const rf__columns_call *call, int64_t number) {
    enum { A_VALUE = 16 }; /* bytes that would take as long as it takes to prepare one */
    const rf_columns_column *column = &call->program.columns[number];
    const int64_t values = values_of(call, column->left) * values_of(call, column->right);
    return values * A_VALUE + rf__elements_bytes(RF_FLOAT32, (values + 1) * column->n_dims);
}
