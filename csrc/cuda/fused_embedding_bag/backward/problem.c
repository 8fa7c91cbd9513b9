/* Features as the kernels of the backward see them. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/validate.h"
#include "cuda/fused_embedding_bag/backward/backward.h"

enum { VECTOR = 4 /* columns */ };

/* The number of its matrix; -1: the feature is not of this launch. */
static int32_t matrix_of(const rf__backward_problem *problem, const rf_feature *feature) {
    if (feature->buffer < 0 || feature->rows == 0 || feature->dim == 0) return -1;
    for (int32_t i = 0; i < problem->n_matrices; i++)
        if (problem->buffers[i] == feature->buffer) return i;
    return -1;
}

bool rf__backward_aligned(const rf_backward_matrix *matrix, rf_dtype dtype, int32_t optimizer) {
    bool aligned =
        matrix->dim % VECTOR == 0 && matrix->weight % (VECTOR * (uint64_t)rf__dtype_bytes(dtype)) == 0;
    for (int32_t state = 0; state < 2 && optimizer != RF_ROWWISE_ADAGRAD; state++)
        aligned &= matrix->states[state] % (VECTOR * sizeof(float)) == 0;
    return aligned;
}

static bool all_aligned(const rf__backward_problem *problem) {
    const rf_fused_backward_params *call = &problem->call;
    const uint64_t grad_bytes = VECTOR * (uint64_t)rf__dtype_bytes(call->grad_dtype);
    bool aligned = (uintptr_t)call->grad % grad_bytes == 0 && call->output_dim % VECTOR == 0;
    for (int32_t i = 0; i < problem->n_matrices; i++)
        aligned &= rf__backward_aligned(&problem->matrices[i], problem->dtype, problem->emit - 1);
    return aligned;
}

void rf__backward_summarise(const rf__backward_problem *problem, rf__backward_features *described) {
    const rf_fused_backward_params *call = &problem->call;
    described->count = 0;
    described->any_mean = false;
    described->entries = call->sample_weights != NULL ? RF_ENTRIES_INDIRECT : RF_ENTRIES_DIRECT;
    described->aligned = all_aligned(problem);
    for (int64_t f = 0; f < call->n_features; f++) {
        const rf_backward_feature *feature = &described->features[f];
        if (feature->pooling < 0) continue;
        described->count++;
        described->aligned &= feature->output_column % VECTOR == 0;
        described->any_mean |= feature->pooling == RF_MEAN;
        if (feature->pooling == RF_MAX) described->entries = RF_ENTRIES_MIXED;
        if (feature->pooling == RF_MEAN && described->entries == RF_ENTRIES_DIRECT)
            described->entries = RF_ENTRIES_INDIRECT;
    }
    rf__backward_segment(problem, described);
}

void rf__backward_place_matrices(rf__backward_problem *problem) {
    int64_t rows = 0;
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        problem->matrices[i].first_row = rows;
        rows += problem->matrices[i].rows;
    }
}

rf_status rf__backward_describe(const rf__backward_problem *problem, rf__backward_features *described) {
    const rf_fused_backward_params *call = &problem->call;
    *described = (rf__backward_features){0};
    described->features = calloc((size_t)call->n_features + 1, sizeof *described->features);
    RF_FAIL_IF(described->features == NULL, RF_ERR_MEMORY, "no memory for %" PRId64 " features",
               call->n_features);
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        described->rows = matrix->first_row + matrix->rows;
        if (matrix->dim > described->dim) described->dim = matrix->dim;
    }
    for (int64_t f = 0; f < call->n_features; f++) {
        const rf_feature *feature = &call->features[f];
        const int32_t number = matrix_of(problem, feature);
        rf_backward_feature *to = &described->features[f];
        *to = (rf_backward_feature){.pooling = -1};
        if (number < 0) continue;
        const rf_backward_matrix *matrix = &problem->matrices[number];
        *to = (rf_backward_feature){.first_row = matrix->first_row + feature->weight_offset / matrix->dim,
                                    .rows = feature->rows,
                                    .padding_idx = feature->padding_idx,
                                    .output_column = (int32_t)feature->output_column,
                                    .pooling = (int32_t)feature->pooling};
    }
    rf__backward_summarise(problem, described);
    return RF_OK;
}
