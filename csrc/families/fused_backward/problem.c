/* Features as the kernels of the backward see them. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/validate.h"
#include "families/fused_backward/backward.h"
#include "families/fused_backward/device/optimizer_steps.h"

enum { VECTOR = 4 /* columns */ };

void rf__backward_matrix_add(rf__backward_problem *problem, int64_t buffer, rf_backward_matrix matrix) {
    const int32_t number = problem->n_matrices++;
    const rf_backward_matrix *previous = number > 0 ? &problem->matrices[number - 1] : NULL;
    matrix.first_row = previous != NULL ? previous->first_row + previous->rows : 0;
    problem->buffers[number] = buffer;
    problem->matrices[number] = matrix;
}

/* The number of its matrix; -1: the feature is not of this launch. */
static int32_t matrix_of(const rf__backward_problem *problem, const rf_feature *feature) {
    if (feature->buffer < 0 || feature->rows == 0 || feature->dim == 0) return -1;
    for (int32_t i = 0; i < problem->n_matrices; i++)
        if (problem->buffers[i] == feature->buffer) return i;
    return -1;
}

bool rf__backward_aligned(const rf_backward_matrix *matrix, rf_dtype dtype, int32_t optimizer) {
    bool aligned = matrix->dim % VECTOR == 0 && rf__elements_aligned(matrix->weight, dtype, VECTOR);
    for (int32_t state = 0; state < rf_optimizer_column_states(optimizer); state++)
        aligned &= rf__elements_aligned(matrix->states[state], RF_FLOAT32, VECTOR);
    return aligned;
}

static bool all_aligned(const rf__backward_problem *problem) {
    const rf_fused_backward_params *call = &problem->call;
    bool aligned = call->output_dim % VECTOR == 0 &&
                   rf__elements_aligned((uintptr_t)call->grad, call->grad_dtype, VECTOR);
    for (int32_t i = 0; i < problem->n_matrices; i++)
        aligned &= rf__backward_aligned(&problem->matrices[i], problem->dtype, problem->epilogue - 1);
    return aligned;
}

/* Rows of a matrix that several features share count once. */
static rf__backward_traffic traffic_of(const rf__backward_problem *problem,
                                       const rf_backward_feature *features) {
    const rf_fused_backward_params *call = &problem->call;
    const double lookups = (double)call->lookups / (double)call->n_features;
    double rows[RF_BACKWARD_MOST_MATRICES] = {0};
    rf__backward_traffic traffic = {0};
    for (int64_t f = 0; f < call->n_features; f++) {
        if (features[f].pooling < 0) continue;
        rows[matrix_of(problem, &call->features[f])] +=
            (double)features[f].rows < lookups ? (double)features[f].rows : lookups;
        traffic.columns += (double)call->features[f].dim;
        traffic.lookups += lookups;
        traffic.lookup_elements += lookups * (double)call->features[f].dim;
    }
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        if (rows[i] > (double)matrix->rows) rows[i] = (double)matrix->rows;
        traffic.rows += rows[i];
        traffic.row_elements += rows[i] * matrix->dim;
    }
    return traffic;
}

rf__backward_traffic rf__backward_traffic_less(rf__backward_traffic total, rf__backward_traffic part) {
    return (rf__backward_traffic){.columns = total.columns - part.columns,
                                  .lookups = total.lookups - part.lookups,
                                  .lookup_elements = total.lookup_elements - part.lookup_elements,
                                  .rows = total.rows - part.rows,
                                  .row_elements = total.row_elements - part.row_elements};
}

void rf__backward_traffic_add(const rf__backward_problem *problem, const rf__backward_traffic *traffic,
                              rf__kernel_launch *launch) {
    const int32_t optimizer = problem->epilogue - 1;
    const double states = traffic->row_elements * rf_optimizer_column_states(optimizer) +
                          traffic->rows * rf_optimizer_row_states(optimizer);
    const int64_t updated = rf__elements_bytes(problem->dtype, (int64_t)traffic->row_elements) +
                            rf__elements_bytes(RF_FLOAT32, (int64_t)states);
    launch->read_bytes += rf__elements_bytes(problem->call.grad_dtype,
                                             (int64_t)((double)problem->call.bags * traffic->columns));
    if (problem->epilogue != RF_EPILOGUE_GRADIENT) launch->read_bytes += updated;
    launch->written_bytes += updated;
    launch->flops += traffic->lookup_elements + traffic->row_elements * rf_optimizer_operations(optimizer);
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
    described->traffic = traffic_of(problem, described->features);
    rf__backward_segment(problem, described);
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
