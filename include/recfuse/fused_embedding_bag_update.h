/* Fused optimizers: the update of a fused call's weights without a stored gradient. */
#ifndef RECFUSE_API_FUSED_EMBEDDING_BAG_UPDATE_H
#define RECFUSE_API_FUSED_EMBEDDING_BAG_UPDATE_H

#include "recfuse/fused_embedding_bag_backward.h"
#include "recfuse/update_codes.h"

RF_BEGIN_DECLARATIONS

/* A weight and the optimizer's states of it, all contiguous and on one device. Two of a call do not
 * overlap. */
typedef struct rf_update_matrix {
    void *weight; /* [rows, dim] of dtype; NULL: it does not change, and its features are ignored */
    float
        *states[2]; /* Adagrad: sum [rows, dim]; row-wise: sum [rows]; Adam: m and v [rows, dim]; else NULL */
    int64_t rows, dim;
    rf_dtype dtype; /* float32, float16 or bfloat16; states and the arithmetic are float32 */
} rf_update_matrix;

typedef struct rf_update {
    rf_optimizer optimizer;
    const float *numbers; /* [RF_UPDATE_NUMBERS] in memory of the matrices' device */
    /* For float16 and bfloat16: rounds up or down at random, with the probabilities that keep the mean;
     * otherwise to nearest. The random bits depend only on seed, STEP, row and column, and are the same on
     * every device. */
    bool stochastic_rounding;
    uint64_t seed;
} rf_update;

/* The update of all weights of a fused call. The contents of indices and offsets may be invalid: such lookups
 * do not count. */
typedef struct rf_fused_update_params {
    /* [n_features]; `buffer`: number of the matrix that has the table's rows; -1: ignored */
    const rf_feature *features; /* [n_features] */
    int64_t n_features;
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_features * bags + 1] of offset_type */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    const float *sample_weights; /* [lookups], may be NULL; then every pooling is RF_SUM */
    const void *grad; /* [bags, output_dim] of grad_dtype: the gradient of the call's output */
    int64_t output_dim;
    rf_dtype grad_dtype;
    const int64_t *winners; /* [bags, output_dim], may be NULL if no feature is RF_MAX */
    const rf_update_matrix *matrices; /* [n_matrices] */
    int64_t n_matrices;
    rf_update update;
} rf_fused_update_params;

/* Sums the gradients of each row and updates the row, in one pass: no gradient is written. The same bits for
 * any executor, which may be NULL: the caller's thread. RF_ERR_VALUE, RF_ERR_TYPE: nothing has changed;
 * RF_ERR_MEMORY, RF_ERR_INTERNAL: some rows may have. */
RF_API rf_status rf_fused_embedding_bag_update_cpu(const rf_fused_update_params *params,
                                                   const rf_executor *executor);

/* As above, on a GPU: all pointers except features and matrices are of its memory. Puts the work into the
 * stream without waiting; it may be captured in a CUDA graph. The workspace comes from the allocator, NULL:
 * from the driver.
 *
 * Descriptions of the work stay on the device, for repeated calls on the stream with the same features and
 * sizes: about 32 bytes per feature of a large table, about 150 of a small one. The 256 most recently used
 * descriptions of all operators stay on each device, and at most 128 MiB. Descriptions of a captured call
 * stay until the process ends, as for rf_fused_embedding_bag_cuda.
 */
RF_API rf_status rf_fused_embedding_bag_update_cuda(const rf_fused_update_params *params,
                                                    const rf_cuda_allocator *allocator,
                                                    const rf_cuda_stream *stream);

/* The update of a weight from summed gradients, in the form of a coalesced COO gradient: for a step after the
 * backward pass. */
typedef struct rf_rows_update_params {
    const int64_t *rows; /* [count], each once; a row that the matrix does not have is passed over */
    const void *sums; /* [count, matrix.dim] of sums_dtype */
    int64_t count;
    rf_dtype sums_dtype;
    rf_update_matrix matrix;
    rf_update update;
} rf_rows_update_params;

/* Updates the rows. As rf_fused_embedding_bag_update_cpu otherwise. */
RF_API rf_status rf_rows_update_cpu(const rf_rows_update_params *params, const rf_executor *executor);

/* As above, on a GPU, in the stream; without a workspace. */
RF_API rf_status rf_rows_update_cuda(const rf_rows_update_params *params, const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
