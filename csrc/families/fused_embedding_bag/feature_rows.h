/* The rows of a feature's table, in the buffer that the table is packed into. */
#ifndef RECFUSE_FUSED_FEATURE_ROWS_H
#define RECFUSE_FUSED_FEATURE_ROWS_H

#include "core/row_format.h"

static inline rf__row_format rf__feature_row(const rf_buffer *buffers, const rf_feature *feature) {
    return rf__contiguous_row(buffers[feature->buffer].dtype, feature->dim);
}

/* Returns the address of row 0. */
static inline const char *rf__feature_weight(const rf_buffer *buffers, const rf_feature *feature) {
    const rf_buffer *buffer = &buffers[feature->buffer];
    return rf__element_at(buffer->data, buffer->dtype, feature->weight_offset);
}

#endif
