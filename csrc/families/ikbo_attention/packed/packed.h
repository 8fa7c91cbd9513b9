/* The kernels of the portable path on a GPU (packed.cu), lowered. torch's attention runs between them. */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_PACKED_H
#define RECFUSE_CUDA_IKBO_ATTENTION_PACKED_H

#include "families/ikbo_attention/ikbo_attention.h"
#include "families/ikbo_attention/packed/attention_packed_args.h"

/* Writes users [candidates.count] and records invalid contents. Earlier errors are raised first. */
rf_status rf__attention_prepare_lower(const rf_ikbo_attention_params *params, int32_t *users,
                                      rf__launches *launches);

/* Writes the chunks of items: 3 * chunks + 2 integers, which are `rows`, `first` and `lengths` of
 * rf_attention_cut_args. */
rf_status rf__attention_cut_lower(const rf_attention_items *items, const rf_attention_users *keys,
                                  int32_t *chunks, rf__launches *launches);

/* Heads [items, queries, heads, dim] with pitches in elements. */
typedef struct rf__attention_rows {
    const void *data; /* [items, queries, heads, dim] */
    int64_t pitch[3]; /* of item, query, head */
    int64_t count, queries, heads, group, dim;
    rf_dtype dtype;
} rf__attention_rows;

/* Copies heads to `to` [count, queries, group, heads / group, padded] with zeros beyond dim; item i is
 * order[i] of `from`, `order` [count] or NULL. */
rf_status rf__attention_pack_lower(const rf__attention_rows *from, const int64_t *order, void *to,
                                   int64_t padded, rf__launches *launches);

/* The results of torch's attention for some chunks. */
typedef struct rf__attention_result {
    const void *out; /* rows of heads / group heads; NULL: no dim, or no keys */
    int64_t out_pitch[2]; /* elements from row to row and from head to head */
    const float *lse; /* or NULL */
    int64_t lse_pitch[3]; /* elements from chunk to chunk, head to head, row to row */
    bool lse_by_chunk;
    int64_t first_chunk, end_chunk;
} rf__attention_result;

/* Writes the outputs of the items in these chunks. `rows`: of rf__attention_cut_lower. */
rf_status rf__attention_unpack_lower(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries,
                                     const rf_attention_items *items, const int64_t *order,
                                     const int32_t *rows, const rf__attention_result *from,
                                     rf__launches *launches);

#endif
