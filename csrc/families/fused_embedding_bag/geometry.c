/* The geometry of features for kernels: vectors, lanes, slices. */
#include <inttypes.h>

#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/features.h"
#include "core/validate.h"

enum { MOST_VECTOR = 16, HALF_VECTOR = 8, QUARTER_VECTOR = 4, MOST_VECTORS = 2 };

rf_status rf__fused_geometry_of(const rf_fused_embedding_bag_params *params, int64_t at,
                                rf__fused_geometry *shape) {
    const rf_feature *feature = &params->features[at];
    const rf_dtype output_dtype = params->output_dtype;
    RF_FAIL_IF(feature->dim > INT32_MAX / 4 || feature->rows > INT64_MAX / 4, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: features[%" PRId64 "] has a table of %" PRId64 " x %" PRId64
               "; expected rows of at most %d columns on a GPU",
               at, feature->rows, feature->dim, INT32_MAX / 4);
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    RF_CHECK(rf__check_fused_parameters("fused_embedding_bag", params, at));
    /* 16 bytes of halves are 8 sums, which take the registers that rows in flight wait in. */
    const int32_t widest = row.dtype == RF_INT4_ROWS                     ? QUARTER_VECTOR
                           : rf__elements_in(row.dtype, MOST_VECTOR) > 4 ? HALF_VECTOR
                                                                         : MOST_VECTOR;
    const uint64_t weight = (uintptr_t)rf__feature_weight(params->buffers, feature);
    const uint64_t output = (uintptr_t)params->output |
                            (uint64_t)rf__elements_bytes(output_dtype, feature->output_column) |
                            (uint64_t)rf__elements_bytes(output_dtype, params->output_stride);
    shape->row = row;
    shape->align = rf__alignment_of(weight | (uint64_t)row.bytes | (uint64_t)row.pitch, widest);
    const int64_t elements = rf__elements_in(row.dtype, shape->align);
    shape->store =
        rf__alignment_of(output | (uint64_t)rf__elements_bytes(output_dtype, elements), MOST_VECTOR);
    shape->columns = (int32_t)(row.bytes / shape->align);
    shape->lanes = 1;
    while (shape->lanes < shape->columns && shape->lanes < RF_FUSED_TILE) shape->lanes *= 2;
    shape->vectors = shape->columns > shape->lanes ? MOST_VECTORS : 1;
    const int32_t wide = shape->lanes * shape->vectors;
    shape->slices = (shape->columns + wide - 1) / wide;
    shape->pooling = (int32_t)feature->pooling;
    shape->is_padded = feature->padding_idx >= 0;
    return RF_OK;
}

rf_status rf__fused_check_limits(const rf_fused_embedding_bag_params *params) {
    enum { MOST_COLUMNS = INT32_MAX / 4 };
    RF_FAIL_IF(params->output_stride > MOST_COLUMNS, RF_ERR_UNSUPPORTED,
               "recfuse.fused_embedding_bag: the output has %" PRId64
               " columns; expected at most %d on a GPU",
               params->output_stride, MOST_COLUMNS);
    if (params->bags <= INT32_MAX / 2 && params->n_features <= INT32_MAX / 2) return RF_OK;
    return rf__fail(RF_ERR_UNSUPPORTED,
                    "recfuse.fused_embedding_bag: %" PRId64 " features of %" PRId64
                    " bags are given; expected at most %d of each on a GPU",
                    params->n_features, params->bags, INT32_MAX / 2);
}
