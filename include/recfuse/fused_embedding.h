/* Lookups of many features in one call, without pooling. */
#ifndef RECFUSE_API_FUSED_EMBEDDING_H
#define RECFUSE_API_FUSED_EMBEDDING_H

#include "recfuse/fused_embedding_bag.h"
#include "recfuse/fused_embedding_codes.h"

RF_BEGIN_DECLARATIONS

/* History b of feature f has the lookups from offsets[f * bags + b] to offsets[f * bags + b + 1]. A slot of
 * the output has the row of one lookup of a feature:
 *
 *   RF_HISTORY_JAGGED   a slot a lookup, [lookups, output_dim]; every feature has output_dim columns
 *     with `sizes`      feature after feature, [sizes[f], dim of f]; output_dim elements in all
 *   RF_HISTORY_JOINED   [lookups of a feature, output_dim], features side by side; equal histories
 *   RF_HISTORY_PADDED   [bags, length, output_dim], features side by side; a history is cut at `length`
 */
typedef struct rf_fused_embedding_params {
    const rf_buffer *buffers; /* [n_buffers] */
    int64_t n_buffers;
    const rf_feature *features; /* [n_features], in the order of their columns; pooling is RF_SUM */
    int64_t n_features;
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_features * bags + 1] of offset_type; rising from 0, on the CPU to lookups */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    bool check_bounds; /* as in rf_embedding_bag_params */
    rf_history_layout layout;
    int64_t length; /* of RF_HISTORY_PADDED, >= 1; else 0 */
    const int64_t *sizes; /* [n_features], may be NULL: lookups of each feature, on the host */
    const void *fill; /* [output_dim] of output_dtype: the row of a slot without lookup; NULL: zeros */
    rf_dtype output_dtype;
    int64_t output_dim;
    void *output; /* [slots, output_dim] of output_dtype, see above; completely written */
    const int64_t *first_rows; /* [n_features], on the host, may be NULL: zeros */
    /* May be NULL. The entry of a slot is first_rows of the feature plus the index; -1 for padding_idx, an
     * invalid index or no lookup. */
    int64_t *rows; /* [n_features, slots of a feature], of RF_HISTORY_JAGGED [lookups] */
} rf_fused_embedding_params;

/* Copies a row for each lookup, converted to output_dtype. Blocks until done; `executor` may be NULL.
 * RF_ERR_INDEX, RF_ERR_OFFSET: invalid contents; then the output is not completely written. */
RF_API rf_status rf_fused_embedding_cpu(const rf_fused_embedding_params *params, const rf_executor *executor);

/* As above on a GPU: everything but buffers, features, sizes and first_rows is memory of the device. Never
 * waits. An invalid index gives a row of zeros, and a later call with these tables returns its error. At most
 * 448 features. */
RF_API rf_status rf_fused_embedding_cuda(const rf_fused_embedding_params *params,
                                         const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
