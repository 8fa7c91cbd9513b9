/* Checks of arguments that both operators make. `operator_name` opens every message. */
#ifndef RECFUSE_CPU_CHECK_H
#define RECFUSE_CPU_CHECK_H

#include "pool.h"
#include "status.h"

/* `indices` and `offsets` may be NULL only when there are none. */
rf_status rf__check_call(const char *operator_name, int64_t lookups, int64_t bags, rf_int_type index_type,
                         rf_int_type offset_type, int32_t prefetch_distance, const void *indices,
                         const void *offsets);
rf_status rf__check_dtype(const char *operator_name, const char *argument, rf_dtype dtype);
/* `feature` is -1 for an operator of one table. */
rf_status rf__check_pooling(const char *operator_name, int64_t feature, int64_t pooling, int64_t padding_idx,
                            int64_t rows, bool weighted);

#endif
