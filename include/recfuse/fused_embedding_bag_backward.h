/* Gradients of fused calls. */
#ifndef RECFUSE_API_FUSED_EMBEDDING_BAG_BACKWARD_H
#define RECFUSE_API_FUSED_EMBEDDING_BAG_BACKWARD_H

#include "recfuse/fused_embedding_bag.h"

RF_BEGIN_DECLARATIONS

/* The gradient of a weight of a fused call: of buffers[group] as rows [rows, dim]. Features in other buffers
 * are ignored. The contents of indices and offsets may be invalid: such lookups do not count. */
typedef struct rf_fused_backward_params {
    const rf_feature
        *features; /* [n_features]; those of the group: tables of `dim` columns inside it that begin at a
                    * whole row */
    int64_t n_features;
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_features * bags + 1] of offset_type */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    const float *sample_weights; /* [lookups], may be NULL; then every pooling of the group is RF_SUM */
    const void *grad; /* [bags, output_dim] of grad_dtype: the gradient of the call's output */
    int64_t output_dim;
    rf_dtype grad_dtype;
    const int64_t *winners; /* [bags, output_dim], may be NULL if no feature of the group is RF_MAX */
    int64_t group;
    int64_t rows, dim; /* of the weight */
    rf_dtype dtype; /* of the written gradient; sums are in float32 */
    bool scale_grad_by_freq; /* each row's gradient is divided by the number of its lookups */
} rf_fused_backward_params;

/* Writes the dense gradient to output [rows, dim] of params->dtype: rows without lookups are zeros. The same
 * bits for any executor, which may be NULL: the caller's thread. RF_ERR_VALUE, RF_ERR_TYPE, RF_ERR_MEMORY. */
RF_API rf_status rf_fused_embedding_bag_backward_cpu(const rf_fused_backward_params *params, void *output,
                                                     const rf_executor *executor);

/* As above, on a GPU: all pointers except features are of its memory. Puts the work into the stream without
 * waiting; it may be captured in a CUDA graph. The workspace comes from the allocator, NULL: from the driver.
 * The descriptions of features for the kernels are cached as rf_fused_embedding_bag_update_cuda documents. */
RF_API rf_status rf_fused_embedding_bag_backward_cuda(const rf_fused_backward_params *params, void *output,
                                                      const rf_cuda_allocator *allocator,
                                                      const rf_cuda_stream *stream);

/* The destination of a sparse gradient. */
typedef struct rf_sparse_output {
    /* Called once at most, with the number of rows that have a gradient: gives *rows [count] and *values
     * [count, dim] of params->dtype. Its failure is the call's. */
    rf_status (*allocate)(void *context, int64_t count, int64_t **rows, void **values);
    void *context; /* [1], may be NULL: handed to allocate */
} rf_sparse_output;

/* As above, as ascending rows and their values; rows without lookups are left out (all, if dim is 0). */
RF_API rf_status rf_fused_embedding_bag_sparse_backward_cpu(const rf_fused_backward_params *params,
                                                            const rf_sparse_output *output,
                                                            const rf_executor *executor);

/* As above, on a GPU, except that it waits for the stream once, because the number of rows is known only
 * after counting. So it cannot be captured: RF_ERR_UNSUPPORTED. output->allocate must return memory of that
 * device. */
RF_API rf_status rf_fused_embedding_bag_sparse_backward_cuda(const rf_fused_backward_params *params,
                                                             const rf_sparse_output *output,
                                                             const rf_cuda_allocator *allocator,
                                                             const rf_cuda_stream *stream);

/* As above, for several weights at once, whose lookups are sorted together: params [n] are of one call, and
 * differ only in group, rows, dim and dtype; outputs [n]. Waits once for every 16 weights of a dtype. */
RF_API rf_status rf_fused_embedding_bag_sparse_gradients_cuda(const rf_fused_backward_params *params,
                                                              const rf_sparse_output *outputs, int64_t n,
                                                              const rf_cuda_allocator *allocator,
                                                              const rf_cuda_stream *stream);

/* Writes the row of its table that supplied the maximum of each column of each bag of each feature of pooling
 * RF_MAX: winners [bags, output_dim], -1 if no lookup counts and in the columns of other features.
 * params->output is not used. */
RF_API rf_status rf_fused_embedding_bag_winners_cpu(const rf_fused_embedding_bag_params *params,
                                                    int64_t *winners, const rf_executor *executor);

/* As above, on a GPU: the arrays of features and buffers are on the host. Puts the work into the stream. */
RF_API rf_status rf_fused_embedding_bag_winners_cuda(const rf_fused_embedding_bag_params *params,
                                                     int64_t *winners, const rf_cuda_allocator *allocator,
                                                     const rf_cuda_stream *stream);

/* The gradient of the sample weights of a call whose features are all RF_SUM, from grad [bags, output_dim]
 * of grad_dtype: output [lookups], 0 if a lookup does not count. Tables may be quantised. params->output and
 * sample_weights are not used. */
RF_API rf_status rf_fused_embedding_bag_sample_weights_backward_cpu(
    const rf_fused_embedding_bag_params *params, const void *grad, rf_dtype grad_dtype, float *output,
    const rf_executor *executor);

/* As above, on a GPU, with pointers as for the winners. */
RF_API rf_status rf_fused_embedding_bag_sample_weights_backward_cuda(
    const rf_fused_embedding_bag_params *params, const void *grad, rf_dtype grad_dtype, float *output,
    const rf_cuda_allocator *allocator, const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
