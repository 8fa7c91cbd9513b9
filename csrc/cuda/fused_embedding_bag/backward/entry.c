/* The backward's functions of recfuse.h: arguments -> rf__backward_problem. */
#include "base/validate.h"
#include "cuda/fused_embedding_bag/backward/backward.h"

static rf_status zeros_write(const rf_cuda_stream *stream, void *output, int64_t bytes) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    if (bytes == 0) return RF_OK;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_enter(device));
    RF__CUDA_TRY(
        device->driver->cuMemsetD8Async((uintptr_t)output, 0, (size_t)bytes, (rf__cu_stream)stream->stream));
out:
    return rf__cuda_leave_with(status);
}

rf_status rf_fused_embedding_bag_backward_cuda(const rf_fused_backward_params *params, void *output,
                                               const rf_cuda_allocator *allocator,
                                               const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_backward";
    RF_CHECK(rf__check_fused_backward(operator_name, params));
    if (params->rows == 0 || params->dim == 0) return RF_OK;
    RF__REFUSE_IF(output == NULL, RF_ERR_VALUE, "%s is NULL; it must point to its elements", "output");
    RF_CHECK(zeros_write(stream, output, params->rows * params->dim * rf__dtype_bytes(params->dtype)));
    rf__backward_problem problem = {
        .call = *params,
        .matrices = {{.weight = (uintptr_t)output, .rows = params->rows, .dim = (int32_t)params->dim}},
        .buffers = {params->group},
        .n_matrices = 1,
        .dtype = params->dtype,
        .emit = RF_EMIT_GRADIENT};
    return rf__backward_run(operator_name, &problem, allocator, stream);
}

/* Adds a matrix to a problem. */
static void matrix_add(rf__backward_problem *problem, int64_t buffer, const rf_backward_matrix *matrix) {
    problem->buffers[problem->n_matrices] = buffer;
    problem->matrices[problem->n_matrices++] = *matrix;
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
            const rf_sparse_output *listed[RF_BACKWARD_MOST_MATRICES];
            rf__backward_problem problem = {
                .call = params[0], .dtype = (rf_dtype)dtype, .emit = RF_EMIT_GRADIENT, .listed = listed};
            for (; next < n && problem.n_matrices < RF_BACKWARD_MOST_MATRICES; next++) {
                if (params[next].dtype != (rf_dtype)dtype) continue;
                listed[problem.n_matrices] = &outputs[next];
                matrix_add(
                    &problem, params[next].group,
                    &(rf_backward_matrix){.rows = params[next].rows, .dim = (int32_t)params[next].dim});
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

/* The matrices of one dtype from number *next on, as many as one launch takes. */
static void matrices_take(const rf_fused_update_params *params, rf_dtype dtype, int64_t *next,
                          rf__backward_problem *problem) {
    problem->n_matrices = 0;
    for (; *next < params->n_matrices && problem->n_matrices < RF_BACKWARD_MOST_MATRICES; ++*next) {
        const rf_update_matrix *from = &params->matrices[*next];
        if (from->dtype != dtype || from->weight == NULL || from->rows == 0 || from->dim == 0) continue;
        matrix_add(problem, *next,
                   &(rf_backward_matrix){.weight = (uintptr_t)from->weight,
                                         .states = {(uintptr_t)from->states[0], (uintptr_t)from->states[1]},
                                         .rows = from->rows,
                                         .dim = (int32_t)from->dim});
    }
}

rf_status rf_fused_embedding_bag_update_cuda(const rf_fused_update_params *params,
                                             const rf_cuda_allocator *allocator,
                                             const rf_cuda_stream *stream) {
    static const char operator_name[] = "fused_embedding_bag_update";
    RF_CHECK(rf__check_fused_update(operator_name, params));
    rf__backward_problem problem = {.call = {.features = params->features,
                                             .n_features = params->n_features,
                                             RF__LOOKUPS_OF(params),
                                             .grad = params->grad,
                                             .output_dim = params->output_dim,
                                             .grad_dtype = params->grad_dtype,
                                             .winners = params->winners},
                                    .emit = (int32_t)params->update.optimizer + 1,
                                    .stochastic_rounding = params->update.stochastic_rounding,
                                    .emit_args = {(uintptr_t)params->update.numbers, params->update.seed}};
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

rf_status rf_rows_update_cuda(const rf_rows_update_params *params, const rf_cuda_stream *stream) {
    static const char operator_name[] = "rows_update";
    const rf__cuda_device *device = NULL;
    const rf__kernel *kernel = NULL;
    const rf_update_matrix *matrix = &params->matrix;
    RF_CHECK(rf__check_rows_update(operator_name, params));
    if (params->count == 0 || matrix->rows == 0 || matrix->dim == 0) return RF_OK;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    const rf_backward_listed_args args = {
        .rows = (uintptr_t)params->rows,
        .sums = (uintptr_t)params->sums,
        .count = params->count,
        .emit = {(uintptr_t)params->update.numbers, params->update.seed},
        .matrix = {.weight = (uintptr_t)matrix->weight,
                   .states = {(uintptr_t)matrix->states[0], (uintptr_t)matrix->states[1]},
                   .rows = matrix->rows,
                   .dim = (int32_t)matrix->dim}};
    const int64_t sums_bytes = 4 * rf__dtype_bytes(params->sums_dtype);
    const rf__backward_variant variant = {
        .grad_dtype = (int32_t)params->sums_dtype,
        .weight_dtype = (int32_t)matrix->dtype,
        .emit = (int32_t)params->update.optimizer + 1,
        .round = params->update.stochastic_rounding && matrix->dtype != RF_FLOAT32,
        .aligned = rf__backward_aligned(&args.matrix, matrix->dtype, params->update.optimizer) &&
                   (uintptr_t)params->sums % (uint64_t)sums_bytes == 0};
    int64_t lanes = 1;
    while (lanes < RF_BACKWARD_LANES && 4 * lanes < matrix->dim) lanes *= 2;
    const int64_t groups = RF_BACKWARD_BLOCK / lanes, blocks = (params->count + groups - 1) / groups;
    RF__REFUSE_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED, RF__I64 " rows of " RF__I64 " columns at once",
                  params->count, matrix->dim);
    RF_CHECK(rf__backward_kernel_get(device, &variant, RF__BACKWARD_LISTED, &kernel));
    const rf__launch_config launch = {.function = kernel->function,
                                      .grid = {(uint32_t)blocks},
                                      .block = {RF_BACKWARD_BLOCK},
                                      .stream = stream->stream};
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(rf__launch(device, &launch, &args));
}
