/* Arguments that several operators share; an error names the allowed values. */
#ifndef RECFUSE_TORCH_ARGUMENTS_H
#define RECFUSE_TORCH_ARGUMENTS_H

#include "torch/call.h"

rf_status rf__call_bounds_check(rf__call *call, int argument, bool *check);
/* Returns the type of a tensor: the first may have any of the four types of floats; others must have *dtype,
 * which messages explain by `like`: "q is". */
rf_status rf__dtype_read(const rf__tensor *tensor, bool first, const char *like, rf_dtype *dtype);
rf_status rf__call_prefetch_distance(rf__call *call, int argument, int32_t *distance);
/* per_sample_weights [lookups] as contiguous float32; NULL if absent. */
rf_status rf__call_sample_weights(rf__call *call, int argument, int64_t lookups, const float **weights);
/* Replaces offsets [bags] on the CPU by a copy of int64 [bags + 1], which ends with the number of lookups and
 * lasts as long as the call. Offsets of a call that is explained stay. */
rf_status rf__call_offsets_complete(rf__call *call, int64_t bags, int64_t lookups, const void **offsets,
                                    rf_int_type *type);

#endif
