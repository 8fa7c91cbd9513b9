/* The rows of a feature's table, in the buffer that the table is packed into. */
#ifndef RECFUSE_FUSED_FEATURE_ROWS_H
#define RECFUSE_FUSED_FEATURE_ROWS_H

#include <stddef.h>

#include "core/row_format.h"

static inline rf__row_format rf__feature_row(const rf_buffer *buffers, const rf_feature *feature) {
    const rf_buffer *buffer = &buffers[feature->buffer];
    rf__row_format row = rf__contiguous_row(buffer->dtype, feature->dim);
    if (rf_is_quantized((int)buffer->dtype)) {
        row.pitch = buffer->pitch;
        row.parameters_dtype = buffer->parameters_dtype;
        row.parameters_pitch = buffer->parameters_pitch;
    } else if (buffer->pitch != 0) {
        row.pitch = buffer->pitch;
    }
    return row;
}

/* Returns the number in its buffer of a table's row 0. Requires a buffer with a pitch. */
static inline int64_t rf__feature_first_row(const rf_feature *feature) {
    return feature->dim > 0 ? feature->weight_offset / feature->dim : 0;
}

/* Returns the address of row 0. */
static inline const char *rf__feature_weight(const rf_buffer *buffers, const rf_feature *feature) {
    const rf_buffer *buffer = &buffers[feature->buffer];
    if (rf_is_quantized((int)buffer->dtype) || buffer->pitch != 0)
        return (const char *)buffer->data + rf__feature_first_row(feature) * buffer->pitch;
    return rf__element_at(buffer->data, buffer->dtype, feature->weight_offset);
}

/* Returns the address of the scale and the bias of row 0; NULL if the table is not quantised. */
static inline const char *rf__feature_parameters(const rf_buffer *buffers, const rf_feature *feature) {
    const rf_buffer *buffer = &buffers[feature->buffer];
    if (!rf_is_quantized((int)buffer->dtype)) return NULL;
    return (const char *)buffer->parameters + rf__feature_first_row(feature) * buffer->parameters_pitch;
}

#endif
