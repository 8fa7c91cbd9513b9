/* recfuse::_embedding_columns_lookups: the lookups of the columns of tables, as one fused call. */
#include "families/embedding_columns/torch/columns_torch.h"
#include "torch/dispatch.h"
#include "torch/operators.h"

#include "families/embedding_columns/program/columns_program.h"
#include "families/embedding_columns/embedding_columns.h"

enum { PROGRAM, DENSE, VALUES, OFFSETS, VALUE_WEIGHTS, BATCH, PROGRAM_ON_DEVICE, BOUNDS_CHECK };

/* Bags of all tables, and the elements of their offsets. */
static rf_status bags_of(const rf__columns *program, int64_t batch, int64_t *bags, int64_t *n_offsets) {
    RF_FAIL_IF(__builtin_mul_overflow(program->header->n_tables, batch, bags) ||
                   __builtin_add_overflow(*bags, 1, n_offsets),
               RF_ERR_VALUE, "batch is %lld for %lld tables; expected a product that fits int64",
               (long long)batch, (long long)program->header->n_tables);
    return RF_OK;
}

/* Returns true if a factor may differ from 1: weights, or a division by more than one row. */
static bool has_factors(const rf__columns *program) {
    for (int64_t c = 0; c < program->header->n_columns; c++) {
        const rf_columns_column *column = &program->columns[c];
        const bool divides = column->pooling == RF_COLUMN_MEAN || column->pooling == RF_COLUMN_SQRTN;
        const bool one = program->sources[column->left].width == 1 &&
                         (column->right < 0 || program->sources[column->right].width == 1);
        if (column->table >= 0 && (column->weighted || (divides && !one))) return true;
    }
    return false;
}

/* An output of the first `count` elements of a tensor that the call has. */
static rf_status output_set(rf__call *call, int output, AtenTensorHandle tensor, int64_t count) {
    const int64_t strides[1] = {1};
    rf__value *value = &call->outputs[output];
    RF_CHECK(rf__tensor_view(tensor, 1, &count, strides, 0, &value->tensor));
    value->is_present = true;
    return RF_OK;
}

static rf_status run_cpu(rf__call *call, const rf_embedding_columns_params *params,
                         const rf__columns *program) {
    const bool with_factors = has_factors(program);
    int64_t bags, n_offsets;
    rf_embedding_columns_lookups lookups = {0};
    AtenTensorHandle indices, factors;
    rf_executor executor;
    void *data = NULL;
    RF_CHECK(bags_of(program, params->batch, &bags, &n_offsets));
    RF_CHECK(rf__call_executor(&executor));
    RF_CHECK(rf__call_output(call, 1, 1, &n_offsets, aoti_torch_dtype_int64(), &data));
    lookups.offsets = data;
    RF_CHECK(rf_embedding_columns_capacity(params, &lookups.capacity));
    if (lookups.capacity < 0) { /* no bound: they are counted */
        RF_CHECK(rf_embedding_columns_lookups_cpu(params, &lookups, &executor));
        lookups.capacity = lookups.offsets[bags];
    }
    const int64_t n_factors = with_factors ? lookups.capacity : 0;
    RF_CHECK(rf__call_temporary(call, 1, &lookups.capacity, aoti_torch_dtype_int64(), &indices, &data));
    lookups.indices = data;
    RF_CHECK(rf__call_temporary(call, 1, &n_factors, aoti_torch_dtype_float32(), &factors, &data));
    if (with_factors) lookups.factors = data;
    if (lookups.capacity > 0) {
        RF_CHECK(rf_embedding_columns_lookups_cpu(params, &lookups, &executor));
    } else {
        for (int64_t i = 0; i <= bags; i++) lookups.offsets[i] = 0;
    }
    const int64_t n_lookups = lookups.offsets[bags];
    RF_CHECK(output_set(call, 0, indices, n_lookups));
    return output_set(call, 2, factors, with_factors ? n_lookups : 0);
}

/* Creates tensors for the lookups, with a capacity that may exceed their number, for which nothing waits.
 * Lookups are counted first only if there is no bound. */
static rf_status look_up_on_gpu(rf__call *call, const rf_embedding_columns_params *params,
                                const rf__columns *columns, const rf__columns_program *program) {
    const bool with_factors = has_factors(columns);
    int64_t bags, n_offsets;
    rf_embedding_columns_lookups lookups = {0};
    void *data = NULL;
    RF_CHECK(bags_of(columns, params->batch, &bags, &n_offsets));
    RF_CHECK(rf__call_output(call, 1, 1, &n_offsets, aoti_torch_dtype_int64(), &data));
    lookups.offsets = data;
    RF_CHECK(rf_embedding_columns_capacity(params, &lookups.capacity));
    if (lookups.capacity < 0) {
        RF_CHECK(rf_embedding_columns_lookups_cuda(params, program->words, &lookups, &program->allocator,
                                                   &program->stream));
        RF_CHECK(rf__columns_lookups_count(&program->stream, lookups.offsets + bags, &lookups.capacity));
    }
    const int64_t n_factors = with_factors ? lookups.capacity : 0;
    RF_CHECK(rf__call_output(call, 0, 1, &lookups.capacity, aoti_torch_dtype_int64(), &data));
    lookups.indices = lookups.capacity > 0 ? data : NULL;
    RF_CHECK(rf__call_output(call, 2, 1, &n_factors, aoti_torch_dtype_float32(), &data));
    lookups.factors = n_factors > 0 ? data : NULL;
    return rf_embedding_columns_lookups_cuda(params, program->words, &lookups, &program->allocator,
                                             &program->stream);
}

static rf_status run_on_gpu(rf__call *call, const rf_embedding_columns_params *params,
                            const rf__columns *columns) {
    rf_status status = RF_OK;
    rf__columns_program program;
    RF_CHECK(rf__columns_program_read(call, PROGRAM_ON_DEVICE, params, &program));
    status = look_up_on_gpu(call, params, columns, &program);
    rf__cuda_block_free(&program.store, &program.copy);
    return status;
}

static rf_status run(rf__call *call) {
    static const rf__columns_arguments at = {.inputs = -1,
                                             .weights = -1,
                                             .program = PROGRAM,
                                             .dense = DENSE,
                                             .values = VALUES,
                                             .offsets = OFFSETS,
                                             .value_weights = VALUE_WEIGHTS,
                                             .batch = BATCH,
                                             .bounds_check = BOUNDS_CHECK};
    rf_embedding_columns_params params = {0};
    rf__columns program;
    RF_CHECK(rf__columns_read(call, &at, &params));
    RF_CHECK(rf__columns_open(params.program, params.program_words, &program));
    RF_CHECK(rf__check_columns_program(&program));
    if (!rf__call_on_cpu(call)) return run_on_gpu(call, &params, &program);
    return run_cpu(call, &params, &program);
}

const rf__operator rf__torch__embedding_columns_lookups = {
    "(Tensor program, Tensor[] dense, Tensor[] values, Tensor[] offsets, Tensor[] value_weights, "
    "SymInt batch, Tensor? program_on_device=None, str bounds_check=\"on\") -> (Tensor, Tensor, Tensor)",
    RF__CPU | RF__CUDA, run};
