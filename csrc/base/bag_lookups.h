/* Which lookups of a call count, and where: what gradients start from. Bad indices and offsets are allowed:
 * gradients must not stumble over what the forward call has already reported.
 */
#ifndef RECFUSE_BAG_LOOKUPS_H
#define RECFUSE_BAG_LOOKUPS_H

#include "base/status.h"

typedef struct rf__bag_lookups_params {
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_offsets] of offset_type: bags, or one more */
    int64_t bags, n_offsets;
    rf_int_type index_type, offset_type;
    int64_t rows;        /* of the table */
    int64_t padding_idx; /* -1: none */
    int64_t *row;        /* [lookups]: the index, or `rows` where a lookup does not count */
    int64_t *bag_of;     /* [lookups]; 0 where a lookup does not count */
    int64_t *sizes;      /* [bags]: lookups that count, at least 1 */
} rf__bag_lookups_params;

/* A lookup counts when a bag holds it and it is a row of the table other than padding. */
void rf__bag_lookups_cpu(const rf__bag_lookups_params *params);
rf_status rf__bag_lookups_cuda(const rf__bag_lookups_params *params, const rf_cuda_stream *stream);

/* Fills the cache with every variant; needs no GPU. */
RF__SHARED rf_status rf__bag_lookups_compile(const char *arch);

#endif
