/* How rf_embedding_columns_cpu writes one column. */
#ifndef RECFUSE_CPU_COLUMNS_POOL_H
#define RECFUSE_CPU_COLUMNS_POOL_H

#include "families/embedding_columns/cpu/columns.h"

/* The address of a column's part of a sample's row of the output. */
static inline char *rf__column_output(const rf__columns_call *call, const rf_columns_column *column,
                                      int64_t sample) {
    const rf_embedding_columns_params *params = call->params;
    return (char *)params->output +
           (sample * params->output_stride + column->output_column) * rf__dtype_bytes(params->output_dtype);
}

/* Samples [first, last) of a column of any kind. */
void rf__column_write(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last);

#endif
