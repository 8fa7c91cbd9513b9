/* Writes one column for rf_embedding_columns_cpu. */
#ifndef RECFUSE_CPU_COLUMNS_POOL_H
#define RECFUSE_CPU_COLUMNS_POOL_H

#include "families/embedding_columns/cpu/columns.h"

/* The address of a column's part of a sample's row of the output. */
static inline char *rf__column_output(const rf__columns_call *call, const rf_columns_column *column,
                                      int64_t sample) {
    return (char *)call->params->output + rf__row_offset(&call->output_row, sample, column->output_column);
}

/* Returns the address of row 0 of a column's table, and the format of its rows: of each the part that is
 * written. */
static inline const char *rf__column_rows(const rf__columns_call *call, const rf_columns_column *column,
                                          rf__row_format *row) {
    const rf_buffer *buffer = &call->params->buffers[column->buffer];
    *row = rf__row_format_of(buffer->dtype, column->n_dims, column->dim);
    return rf__element_at(buffer->data, buffer->dtype, column->weight_offset + column->first_dim);
}

/* Samples [first, last) of a column of any kind. */
void rf__column_write(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last);

#endif
