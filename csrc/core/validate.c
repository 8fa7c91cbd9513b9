#include "core/validate.h"

#include <stddef.h>

rf_status rf__check_lookups(const char *operator_name, const rf__lookup_arrays *arrays,
                            int32_t prefetch_distance) {
    const int64_t lookups = arrays->lookups, bags = arrays->bags;
    const rf_int_type index_type = arrays->index_type, offset_type = arrays->offset_type;
    RF__REFUSE_IF(lookups < 0 || bags < 0, RF_ERR_VALUE,
                  "lookups is " RF__I64 " and bags " RF__I64 "; expected 0 or more", lookups, bags);
    RF__REFUSE_IF((index_type != RF_INT32 && index_type != RF_INT64) ||
                      (offset_type != RF_INT32 && offset_type != RF_INT64),
                  RF_ERR_TYPE, "index_type is %d and offset_type %d; expected RF_INT32 or RF_INT64",
                  (int)index_type, (int)offset_type);
    RF__REFUSE_IF(prefetch_distance < -1, RF_ERR_VALUE,
                  "prefetch_distance is %d; expected 0 (none) or more lookups, or -1 (the default)",
                  (int)prefetch_distance);
    RF__REFUSE_IF((arrays->indices == NULL && lookups > 0) || arrays->offsets == NULL, RF_ERR_VALUE,
                  "%s is NULL; expected a pointer to its elements",
                  arrays->offsets == NULL ? "offsets" : "indices");
    return RF_OK;
}

rf_status rf__check_dtype(const char *operator_name, const char *argument, rf_dtype dtype) {
    RF__REFUSE_IF(dtype != RF_FLOAT32 && dtype != RF_FLOAT16 && dtype != RF_BFLOAT16, RF_ERR_TYPE,
                  "%s is %d; expected RF_FLOAT32, RF_FLOAT16 or RF_BFLOAT16", argument, (int)dtype);
    return RF_OK;
}

rf_status rf__check_table(const char *operator_name, const rf_feature *feature, int64_t at,
                          const rf_buffer *buffers, int64_t n_buffers) {
    int64_t size, end;
    RF__REFUSE_IF(feature->buffer < 0 || feature->buffer >= n_buffers, RF_ERR_VALUE,
                  "features[" RF__I64 "] is in weights[" RF__I64 "]; expected one of " RF__I64 " weights", at,
                  feature->buffer, n_buffers);
    const int64_t numel = buffers[feature->buffer].numel;
    RF__REFUSE_IF(feature->rows < 0 || feature->dim < 0 || feature->weight_offset < 0 ||
                      __builtin_mul_overflow(feature->rows, feature->dim, &size) ||
                      __builtin_add_overflow(feature->weight_offset, size, &end) || end > numel,
                  RF_ERR_VALUE,
                  "features[" RF__I64 "] is a table of " RF__I64 " x " RF__I64 " at element " RF__I64
                  "; expected a table within weights[" RF__I64 "], which has " RF__I64 " elements",
                  at, feature->rows, feature->dim, feature->weight_offset, feature->buffer, numel);
    return RF_OK;
}

rf_status rf__check_pooling(const char *operator_name, int64_t feature, int64_t pooling, int64_t padding_idx,
                            int64_t rows, bool weighted) {
    if (feature < 0) feature = 0;
    RF__REFUSE_IF(pooling != RF_SUM && pooling != RF_MEAN && pooling != RF_MAX, RF_ERR_VALUE,
                  "feature " RF__I64 " has pooling " RF__I64 "; expected 0 (sum), 1 (mean), 2 (max)", feature,
                  pooling);
    RF__REFUSE_IF(weighted && pooling != RF_SUM, RF_ERR_UNSUPPORTED,
                  "per-sample weights are given with %s pooling (feature " RF__I64 "); expected sum pooling",
                  pooling == RF_MEAN ? "mean" : "max", feature);
    RF__REFUSE_IF(padding_idx < -1 || (padding_idx >= rows && padding_idx != -1), RF_ERR_VALUE,
                  "padding_idx is " RF__I64 " (feature " RF__I64 "); expected -1 (none) to " RF__I64,
                  padding_idx, feature, rows - 1);
    return RF_OK;
}
