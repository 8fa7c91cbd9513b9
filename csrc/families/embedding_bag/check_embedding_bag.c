/* rf__check_embedding_bag. */
#include "families/embedding_bag/check_embedding_bag.h"

#include <stddef.h>

rf_status rf__check_embedding_bag(const rf_embedding_bag_params *params) {
    static const char operator_name[] = "embedding_bag";
    const bool even = params->offsets == NULL && !params->include_last_offset;
    RF__REFUSE_IF(even && params->bags > 0 && params->lookups % params->bags != 0, RF_ERR_VALUE,
                  "lookups is " RF__I64 " and bags " RF__I64
                  " without offsets; expected bags of equal length",
                  params->lookups, params->bags);
    rf__lookup_arrays arrays = {RF__LOOKUPS_OF(params)};
    if (even) arrays.offsets = ""; /* there are none to check */
    RF_CHECK(rf__check_lookups(operator_name, &arrays, params->prefetch_distance));
    RF_CHECK(rf__check_dtype(operator_name, "dtype", params->dtype));
    RF__REFUSE_IF(params->rows < 0 || params->dim < 0, RF_ERR_VALUE,
                  "weight is " RF__I64 " x " RF__I64 "; expected sizes of 0 or more", params->rows,
                  params->dim);
    RF__REFUSE_IF(params->weight_stride < params->dim || params->output_stride < params->dim, RF_ERR_VALUE,
                  "weight_stride is " RF__I64 " and output_stride " RF__I64 "; expected dim, " RF__I64
                  ", or more",
                  params->weight_stride, params->output_stride, params->dim);
    RF__REFUSE_IF(!rf__rows_fit(params->dtype, params->rows, params->weight_stride), RF_ERR_VALUE,
                  "weight has " RF__I64 " rows, " RF__I64
                  " elements apart; expected a size in bytes that fits int64",
                  params->rows, params->weight_stride);
    RF__REFUSE_IF((params->weight == NULL && params->rows > 0 && params->dim > 0) ||
                      (params->output == NULL && params->bags > 0 && params->dim > 0),
                  RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements",
                  params->output == NULL ? "output" : "weight");
    return rf__check_pooling(operator_name, -1, params->pooling, params->padding_idx, params->rows,
                             params->sample_weights != NULL);
}
