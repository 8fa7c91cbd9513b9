/* recfuse::_embedding_columns_split: columns of a GPU, and columns whose tables are on the host. Threads of
 * the library pool the rows of host tables, and only the GPU's stream waits for them. */
#include "families/embedding_columns/torch/host_lookup.h"
#include "torch/dispatch.h"
#include "torch/operators.h"

#include "families/embedding_columns/host/staging.h"
#include "families/embedding_columns/program/columns_program.h"
#include "families/embedding_columns/tensors/columns_inputs.h"
#include "core/row_format.h"
#include "core/threads/workers.h"
#include "gpu/driver/error_check.h"
#include "families/embedding_columns/embedding_columns.h"

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
    HOST_WEIGHTS,
    HOST_PROGRAM,
    HOST_DENSE,
    HOST_VALUES,
    HOST_OFFSETS,
    HOST_VALUE_WEIGHTS,
    BOUNDS_CHECK
};

/* Up to this number of pooled bytes the GPU's kernel reads the staging buffer itself; more are copied to
 * memory of the GPU. */
enum { MOST_READ_BYTES = 1 << 18 };

static const rf__columns_arguments host_arguments = {.weights = HOST_WEIGHTS,
                                                     .program = HOST_PROGRAM,
                                                     .dense = HOST_DENSE,
                                                     .values = HOST_VALUES,
                                                     .offsets = HOST_OFFSETS,
                                                     .value_weights = HOST_VALUE_WEIGHTS,
                                                     .batch = BATCH,
                                                     .bounds_check = BOUNDS_CHECK,
                                                     .inputs = -1};

/* Starts the lookup, then puts the GPU's columns into the stream, which read pooled rows of the host as
 * `input`, if any: in `pooled`, or in the staging buffer if that is NULL. */
static rf_status run_on_gpu(rf__call *call, rf_embedding_columns_params *params, rf__host_columns *host,
                            rf_column_input *input, void *pooled) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__staging *staging = NULL;
    rf__columns_program program;
    RF_CHECK(rf__columns_program_read(call, PROGRAM_ON_DEVICE, params, &program));
    void *stream = program.stream.stream;
    RF_TRY(rf__cuda_device_get(program.stream.device, &device));
    if (device->driver != NULL) { /* a described device looks nothing up */
        RF_TRY(rf__host_lookup_start(call, &host_arguments, host, device, stream, &staging));
        RF_TRY(rf__staging_copy(device, staging, pooled != NULL ? rf__host_columns_bytes(&host->params) : 0,
                                (rf__cu_pointer)(uintptr_t)pooled, stream));
        if (input != NULL && pooled == NULL)
            input->values = (const void *)(uintptr_t)staging->memory_on_device;
    }
    RF_TRY(rf_embedding_columns_cuda(params, program.words, &program.stream));
out:
    if (staging != NULL) status = rf__staging_release(device, staging, stream, status);
    rf__cuda_block_free(&program.store, &program.copy);
    return status;
}

static rf_status run_on_cpu(const rf_embedding_columns_params *params, rf_embedding_columns_params *host,
                            void *pooled) {
    rf_executor executor;
    RF_CHECK(rf__call_executor(&executor));
    host->output = pooled;
    RF_CHECK(rf__host_columns_status(rf_embedding_columns_cpu(host, &executor)));
    return rf_embedding_columns_cpu(params, &executor);
}

/* Reads the arguments of the host columns, and takes the memory that the params point to from the call. */
static rf_status host_read(rf__call *call, rf__host_columns *host) {
    rf__columns program;
    rf_embedding_columns_params *params = &host->params;
    const rf_status status = rf__columns_read(call, &host_arguments, params);
    host->inputs = call->reference;
    host->buffers = call->scratch;
    call->reference = NULL;
    call->scratch = NULL;
    RF_CHECK(rf__host_columns_status(status));
    RF_FAIL_IF(!rf__device_is_cpu(call->device), RF_ERR_VALUE,
               "inputs of columns whose tables are on the host are on a GPU; expected inputs on the CPU");
    RF_CHECK(rf__host_columns_status(rf__columns_open(params->program, params->program_words, &program)));
    params->output_dim = params->output_stride = program.header->output_dim;
    params->output_dtype = RF_FLOAT32;
    return RF_OK;
}

static rf_status run_with(rf__call *call, rf__host_columns *host) {
    size_t n_dense = 0;
    AtenTensorHandle temporary;
    void *pooled = NULL;
    rf_column_input *input = NULL; /* the pooled rows of the host, if it has columns */
    const int64_t sizes[2] = {host->params.batch, host->params.output_dim};
    const rf__columns_arguments at = {.weights = WEIGHTS,
                                      .program = PROGRAM,
                                      .dense = DENSE,
                                      .values = VALUES,
                                      .offsets = OFFSETS,
                                      .value_weights = VALUE_WEIGHTS,
                                      .batch = BATCH,
                                      .bounds_check = BOUNDS_CHECK,
                                      .inputs = -1,
                                      .gap = sizes[1] > 0};
    rf_embedding_columns_params params = {0};
    RF_CHECK(rf__columns_read_with_output(call, &at, OUTPUT_DIM, &params));
    RF__TORCH_CHECK(torch_list_size(call->values[DENSE].list, &n_dense));
    if (rf__device_is_cpu(call->device) || rf__host_columns_bytes(&host->params) > MOST_READ_BYTES)
        RF_CHECK(rf__call_temporary(call, 2, sizes, aoti_torch_dtype_float32(), &temporary, &pooled));
    if (at.gap > 0) {
        input = &rf__columns_inputs_of(call)->rows[n_dense];
        *input = (rf_column_input){.values = pooled,
                                   .type = RF_COLUMN_FLOAT32,
                                   .width = sizes[1],
                                   .sample_stride = sizes[1],
                                   .value_stride = 1};
    }
    return rf__call_on_cpu(call) ? run_on_cpu(&params, &host->params, pooled)
                                 : run_on_gpu(call, &params, host, input, pooled);
}

static rf_status run(rf__call *call) {
    rf__host_columns host = {0};
    rf_status status = host_read(call, &host);
    if (status == RF_OK) status = run_with(call, &host);
    rf__host_columns_free(&host);
    return status;
}

const rf__operator rf__torch__embedding_columns_split = {
    "(Tensor[] weights, Tensor program, Tensor[] dense, Tensor[] values, Tensor[] offsets, "
    "Tensor[] value_weights, SymInt batch, SymInt output_dim, Tensor? program_on_device, "
    "Tensor[] host_weights, Tensor host_program, Tensor[] host_dense, Tensor[] host_values, "
    "Tensor[] host_offsets, Tensor[] host_value_weights, str bounds_check=\"on\") -> Tensor",
    RF__CPU | RF__CUDA, run};
