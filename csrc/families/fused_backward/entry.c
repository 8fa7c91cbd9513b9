/* The backward's functions of recfuse.h: arguments -> rf__backward_problem. */
#include "families/fused_backward/check/check_backward.h"
#include "families/fused_backward/lowering.h"

rf_status rf_fused_embedding_bag_backward_cuda(const rf_fused_backward_params *params, void *output,
                                               const rf_cuda_allocator *allocator,
                                               const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_backward";
    RF_CHECK(rf__check_fused_backward(operator_name, params));
    if (params->rows == 0 || params->dim == 0) return RF_OK;
    RF__REFUSE_IF(output == NULL, RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements", "output");
    rf__backward_problem problem = {
        .call = *params, .dtype = params->dtype, .epilogue = RF_EPILOGUE_GRADIENT};
    rf__backward_matrix_add(
        &problem, params->group,
        (rf_backward_matrix){.weight = (uintptr_t)output, .rows = params->rows, .dim = (int32_t)params->dim});
    return rf__backward_run(operator_name, &problem, allocator, stream);
}

rf_status rf_fused_embedding_bag_sparse_gradients_cuda(const rf_fused_backward_params *params,
                                                       const rf_sparse_output *outputs, int64_t n,
                                                       const rf_cuda_allocator *allocator,
                                                       const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_sparse_backward";
    for (int64_t i = 0; i < n; i++) {
        RF_CHECK(rf__check_fused_backward(operator_name, &params[i]));
        for (int64_t other = 0; other < i; other++)
            RF__REFUSE_IF(params[other].group == params[i].group, RF_ERR_VALUE,
                          "weight " RF__I64 " is given twice", params[i].group);
    }
    for (int32_t dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++) {
        for (int64_t next = 0; next < n;) {
            const rf_sparse_output *row_sparse[RF_BACKWARD_MOST_MATRICES];
            rf__backward_problem problem = {.call = params[0],
                                            .dtype = (rf_dtype)dtype,
                                            .epilogue = RF_EPILOGUE_GRADIENT,
                                            .row_sparse = row_sparse};
            for (; next < n && problem.n_matrices < RF_BACKWARD_MOST_MATRICES; next++) {
                if (params[next].dtype != (rf_dtype)dtype) continue;
                row_sparse[problem.n_matrices] = &outputs[next];
                rf__backward_matrix_add(
                    &problem, params[next].group,
                    (rf_backward_matrix){.rows = params[next].rows, .dim = (int32_t)params[next].dim});
            }
            if (problem.n_matrices > 0)
                RF_CHECK(rf__backward_run(operator_name, &problem, allocator, stream));
        }
    }
    return RF_OK;
}

rf_status rf_fused_embedding_bag_sparse_backward_cuda(const rf_fused_backward_params *params,
                                                      const rf_sparse_output *output,
                                                      const rf_cuda_allocator *allocator,
                                                      const rf_cuda_stream *stream) {
    return rf_fused_embedding_bag_sparse_gradients_cuda(params, output, 1, allocator, stream);
}

static rf_backward_matrix matrix_of(const rf_update_matrix *from) {
    return (rf_backward_matrix){.weight = (uintptr_t)from->weight,
                                .states = {(uintptr_t)from->states[0], (uintptr_t)from->states[1]},
                                .rows = from->rows,
                                .dim = (int32_t)from->dim};
}

/* The matrices of one dtype from number *next on, as many as one launch takes. */
static void matrices_take(const rf_fused_update_params *params, rf_dtype dtype, int64_t *next,
                          rf__backward_problem *problem) {
    problem->n_matrices = 0;
    for (; *next < params->n_matrices && problem->n_matrices < RF_BACKWARD_MOST_MATRICES; ++*next) {
        const rf_update_matrix *from = &params->matrices[*next];
        if (from->dtype != dtype || from->weight == NULL || from->rows == 0 || from->dim == 0) continue;
        rf__backward_matrix_add(problem, *next, matrix_of(from));
    }
}

rf_status rf_fused_embedding_bag_update_cuda(const rf_fused_update_params *params,
                                             const rf_cuda_allocator *allocator,
                                             const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_update";
    RF_CHECK(rf__check_fused_update(operator_name, params));
    rf__backward_problem problem = {
        .call = {.features = params->features,
                 .n_features = params->n_features,
                 RF__LOOKUPS_OF(params),
                 .grad = params->grad,
                 .output_dim = params->output_dim,
                 .grad_dtype = params->grad_dtype,
                 .winners = params->winners},
        .epilogue = (int32_t)params->update.optimizer + 1,
        .stochastic_rounding = params->update.stochastic_rounding,
        .epilogue_args = {(uintptr_t)params->update.numbers, params->update.seed}};
    for (int32_t dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++) {
        for (int64_t next = 0; next < params->n_matrices;) {
            problem.dtype = (rf_dtype)dtype;
            matrices_take(params, problem.dtype, &next, &problem);
            if (problem.n_matrices > 0)
                RF_CHECK(rf__backward_run(operator_name, &problem, allocator, stream));
        }
    }
    return RF_OK;
}

rf_status rf__rows_update_lower(const rf_rows_update_params *params, rf__launches *launches) {
    const char *const operator_name = launches->name;
    const rf_update_matrix *matrix = &params->matrix;
    const rf_backward_row_sparse_args args = {
        .rows = (uintptr_t)params->rows,
        .sums = (uintptr_t)params->sums,
        .count = params->count,
        .epilogue = {(uintptr_t)params->update.numbers, params->update.seed},
        .matrix = matrix_of(matrix)};
    /* As an update of a call whose bags are these rows. */
    const rf__backward_problem problem = {.call = {.bags = params->count, .grad_dtype = params->sums_dtype},
                                          .dtype = matrix->dtype,
                                          .epilogue = (int32_t)params->update.optimizer + 1,
                                          .stochastic_rounding = params->update.stochastic_rounding};
    const rf__backward_variant variant = {
        .grad_dtype = (int32_t)params->sums_dtype,
        .weight_dtype = (int32_t)matrix->dtype,
        .epilogue = problem.epilogue,
        .round = rf__backward_rounds(&problem),
        .aligned = rf__backward_aligned(&args.matrix, matrix->dtype, params->update.optimizer) &&
                   rf__elements_aligned((uintptr_t)params->sums, params->sums_dtype, 4)};
    const rf__backward_traffic traffic = {.columns = (double)matrix->dim,
                                          .rows = (double)params->count,
                                          .row_elements = (double)params->count * (double)matrix->dim};
    int64_t lanes = 1;
    if (params->count == 0 || matrix->rows == 0 || matrix->dim == 0) return RF_OK;
    while (lanes < RF_BACKWARD_LANES && 4 * lanes < matrix->dim) lanes *= 2;
    const int64_t groups = RF_BACKWARD_BLOCK / lanes, blocks = (params->count + groups - 1) / groups;
    RF__REFUSE_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
                  "a call has " RF__I64 " rows of " RF__I64 " columns, which need 2^31 blocks or more",
                  params->count, matrix->dim);
    rf__kernel_launch launch = {.grid = {(uint32_t)blocks},
                                .read_bytes = params->count * (int64_t)sizeof *params->rows};
    rf__backward_traffic_add(&problem, &traffic, &launch);
    return rf__backward_launch_add(launches, &variant, RF__BACKWARD_ROW_SPARSE, &launch, &args, sizeof args);
}

rf_status rf_rows_update_cuda(const rf_rows_update_params *params, const rf_cuda_stream *stream) {
    static const char operator_name[] = "rows_update";
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__check_rows_update(operator_name, params));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, operator_name);
    return rf__launches_finish(rf__rows_update_lower(params, &launches), device, &launches, NULL,
                               stream->stream);
}
