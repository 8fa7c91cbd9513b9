/* recfuse::embedding_columns and _embedding_columns_at: tensors -> rf_embedding_columns_params. */
#include "families/embedding_columns/torch/columns_torch.h"
#include "torch/operators.h"

enum {
    WEIGHTS,
    PROGRAM,
    DENSE,
    VALUES,
    OFFSETS,
    VALUE_WEIGHTS,
    BATCH,
    OUTPUT_DIM,
    PROGRAM_ON_DEVICE,
    BOUNDS_CHECK
};
enum { AT_WEIGHTS, AT_PROGRAM, AT_INPUTS, AT_BATCH, AT_OUTPUT_DIM, AT_PROGRAM_ON_DEVICE, AT_BOUNDS_CHECK };

static rf_status run_on_gpu(rf__call *call, const rf_embedding_columns_params *params,
                            int program_on_device) {
    rf_status status = RF_OK;
    rf__columns_program program;
    RF_CHECK(rf__columns_program_read(call, program_on_device, params, &program));
    status = rf_embedding_columns_cuda(params, program.words, &program.stream);
    rf__cuda_block_free(&program.store, &program.copy);
    return status;
}

static rf_status run_with(rf__call *call, const rf__columns_arguments *at, int output_dim,
                          int program_on_device) {
    rf_embedding_columns_params params = {0};
    rf_executor executor;
    RF_CHECK(rf__columns_read_with_output(call, at, output_dim, &params));
    if (!rf__call_on_cpu(call)) return run_on_gpu(call, &params, program_on_device);
    RF_CHECK(rf__call_executor(&executor));
    return rf_embedding_columns_cpu(&params, &executor);
}

static rf_status run(rf__call *call) {
    static const rf__columns_arguments at = {.weights = WEIGHTS,
                                             .program = PROGRAM,
                                             .dense = DENSE,
                                             .values = VALUES,
                                             .offsets = OFFSETS,
                                             .value_weights = VALUE_WEIGHTS,
                                             .batch = BATCH,
                                             .bounds_check = BOUNDS_CHECK,
                                             .inputs = -1};
    return run_with(call, &at, OUTPUT_DIM, PROGRAM_ON_DEVICE);
}

static rf_status run_at(rf__call *call) {
    static const rf__columns_arguments at = {.weights = AT_WEIGHTS,
                                             .program = AT_PROGRAM,
                                             .dense = -1,
                                             .values = -1,
                                             .offsets = -1,
                                             .value_weights = -1,
                                             .batch = AT_BATCH,
                                             .bounds_check = AT_BOUNDS_CHECK,
                                             .inputs = AT_INPUTS};
    return run_with(call, &at, AT_OUTPUT_DIM, AT_PROGRAM_ON_DEVICE);
}

const rf__operator rf__torch_embedding_columns = {
    "(Tensor[] weights, Tensor program, Tensor[] dense, Tensor[] values, Tensor[] offsets, "
    "Tensor[] value_weights, SymInt batch, SymInt output_dim, Tensor? program_on_device=None, "
    "str bounds_check=\"on\") -> Tensor",
    RF__CPU | RF__CUDA, run};

const rf__operator rf__torch__embedding_columns_at = {
    "(Tensor[] weights, Tensor program, int inputs, SymInt batch, SymInt output_dim, "
    "Tensor? program_on_device=None, str bounds_check=\"on\") -> Tensor",
    RF__CPU | RF__CUDA, run_at};
