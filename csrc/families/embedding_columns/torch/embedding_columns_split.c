/* recfuse::_embedding_columns_split: columns of a GPU, and columns whose tables are on the host. Threads of
 * the library pool the rows of host tables, and only the GPU's stream waits for them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "families/embedding_columns/torch/columns_torch.h"
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

static const int host_lists[] = {HOST_WEIGHTS, HOST_DENSE, HOST_VALUES, HOST_OFFSETS, HOST_VALUE_WEIGHTS};
enum { N_HOST_LISTS = sizeof host_lists / sizeof host_lists[0] };

/* Opens messages about host columns, which are numbered by themselves; embedding_columns.py looks for it. */
#define OF_HOST "of the columns whose tables are on the host"

/* Up to this number of pooled bytes the GPU's kernel reads the staging buffer itself; more are copied to
 * memory of the GPU. */
enum { MOST_READ_BYTES = 1 << 18 };

/* The call of the host columns: its params, and the memory that they point to. */
typedef struct host_columns {
    rf_embedding_columns_params params;
    rf__columns_inputs *inputs; /* a reference */
    void *buffers;
} host_columns;

static void host_free(const host_columns *host) {
    rf__columns_inputs_drop(host->inputs);
    free(host->buffers);
}

/* A lookup by threads, which outlives the call. */
typedef struct lookup {
    rf__job disposal;
    rf__staging *staging;
    rf__cuda_error_word word;
    rf__cuda_note *note;
    host_columns host;
    size_t n_held;
    AtenTensorHandle held[]; /* [n_held] views, which keep the memory that is read */
} lookup;

static void lookup_free(void *context) {
    lookup *of = context;
    if (of == NULL) return;
    for (size_t i = 0; i < of->n_held; i++) rf__tensor_free(of->held[i]);
    host_free(&of->host);
    free(of->note);
    free(of);
}

static size_t pooled_bytes(const rf_embedding_columns_params *host) {
    return (size_t)rf__elements_bytes(RF_FLOAT32, host->batch * host->output_dim);
}

/* Ends a lookup, on a thread. An error is noted before the stream continues, so that it is visible to all
 * waiters. */
static void lookup_done(void *context, rf_status status, const char *message) {
    lookup *of = context;
    if (status != RF_OK) {
        memset(of->staging->memory, 0, pooled_bytes(&of->host.params));
        of->note->status = status;
        snprintf(of->note->text, sizeof of->note->text,
                 "%s (" OF_HOST ", found by CPU threads for an earlier call, whose output is wrong)",
                 message);
        rf__cuda_note_leave(of->word, of->note);
        of->note = NULL;
    }
    rf__staging_fill_end(of->staging);
    /* To free memory torch may call the driver, which may wait for a stream that waits for this thread's next
     * job. */
    of->disposal = (rf__job){.end = lookup_free, .context = of, .most_threads = 1};
    rf__workers_take(RF__DISPOSAL_CREW, &of->disposal);
}

/* An empty view, which keeps a tensor's memory. It has no Python object, so that freeing it needs no lock of
 * Python's if the memory is torch's own, like that of programs and of page-locked tables. */
static rf_status hold(lookup *of, AtenTensorHandle tensor) {
    static const int64_t size[1] = {0}, stride[1] = {1};
    RF_CHECK(rf__tensor_view(tensor, 1, size, stride, 0, &of->held[of->n_held]));
    of->n_held++;
    return RF_OK;
}

static rf_status hold_all(const rf__call *call, lookup *of) {
    RF_CHECK(hold(of, call->values[HOST_PROGRAM].tensor));
    for (int l = 0; l < N_HOST_LISTS; l++) {
        const StableListHandle list = call->values[host_lists[l]].list;
        size_t count;
        RF__TORCH_CHECK(torch_list_size(list, &count));
        for (size_t i = 0; i < count; i++) {
            rf__value item = {0};
            RF__TORCH_CHECK(torch_list_get_item(list, i, &item.bits));
            RF_CHECK(hold(of, item.tensor));
        }
    }
    return RF_OK;
}

/* Takes over `host` on success, and zeroes it. */
static rf_status lookup_new(rf__call *call, host_columns *host, lookup **made) {
    rf_status status = RF_OK;
    size_t most = 1;
    for (int l = 0; l < N_HOST_LISTS; l++) {
        size_t count;
        RF__TORCH_CHECK(torch_list_size(call->values[host_lists[l]].list, &count));
        most += count;
    }
    lookup *of = calloc(1, sizeof *of + most * sizeof *of->held);
    RF_FAIL_IF(of == NULL, RF_ERR_MEMORY, "no memory for a lookup of %zu tensors", most);
    of->note = malloc(sizeof *of->note);
    if (of->note == NULL) status = rf__fail(RF_ERR_MEMORY, "no memory for a message");
    if (status == RF_OK) status = hold_all(call, of);
    if (status != RF_OK) {
        lookup_free(of);
        return status;
    }
    of->host = *host;
    *host = (host_columns){.params = host->params};
    *made = of;
    return RF_OK;
}

/* Marks an error as that of the host columns. */
static rf_status of_host(rf_status status) {
    return status == RF_OK ? RF_OK : rf__fail(status, "%s (" OF_HOST ")", rf_last_error());
}

/* As many as torch's threads without the caller's. */
static rf_status threads_of(int32_t *threads) {
    rf_executor executor;
    RF_CHECK(rf__call_executor(&executor));
    *threads = executor.threads > 2 ? executor.threads - 1 : 1;
    return RF_OK;
}

static rf_status errors_check(const rf__cuda_device *device, void *stream,
                              const rf_embedding_columns_params *host, rf__cuda_error_word *word) {
    const void *first = host->n_buffers > 0 ? host->buffers[0].data : host->program;
    bool captured = false;
    RF_CHECK(rf__cuda_is_capturing(device, stream, &captured));
    RF_FAIL_IF(captured, RF_ERR_UNSUPPORTED,
               "tables are on the CPU, and a CUDA graph that is being captured would not look them up again");
    *word = rf__cuda_error_word_of(&device->errors, first, (uint64_t)host->program_words);
    /* Also if bounds are not checked: threads may have run out of memory for an earlier call. */
    return rf__cuda_check_word(device, *word, stream);
}

/* Starts a lookup into a staging buffer, which the caller must release if *staging is set. */
static rf_status lookup_start(rf__call *call, host_columns *host, const rf__cuda_device *device, void *stream,
                              rf__staging **staging) {
    rf_status status = RF_OK;
    rf__cuda_error_word word;
    lookup *of = NULL;
    int32_t threads;
    RF_CHECK(errors_check(device, stream, &host->params, &word));
    RF_CHECK(threads_of(&threads));
    RF_CHECK(rf__workers_start(RF__DISPOSAL_CREW, "embedding_columns", 1));
    RF_TRY(lookup_new(call, host, &of));
    RF_TRY(rf__staging_acquire(device, stream, pooled_bytes(&of->host.params), staging));
    of->staging = *staging;
    of->word = word;
    of->host.params.output = (*staging)->memory;
    status = of_host(rf_embedding_columns_start_cpu(&of->host.params, threads, lookup_done, of));
    if (status != RF_OK) rf__staging_fill_end(*staging);
out:
    if (status != RF_OK) lookup_free(of);
    return status;
}

/* Starts the lookup, then puts the GPU's columns into the stream, which read pooled rows of the host as
 * `input`, if any: in `pooled`, or in the staging buffer if that is NULL. */
static rf_status run_on_gpu(rf__call *call, rf_embedding_columns_params *params, host_columns *host,
                            rf_column_input *input, void *pooled) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__staging *staging = NULL;
    rf__columns_program program;
    RF_CHECK(rf__columns_program_read(call, PROGRAM_ON_DEVICE, params, &program));
    void *stream = program.stream.stream;
    RF_TRY(rf__cuda_device_get(program.stream.device, &device));
    if (device->driver != NULL) { /* a described device looks nothing up */
        RF_TRY(lookup_start(call, host, device, stream, &staging));
        RF_TRY(rf__staging_copy(device, staging, pooled != NULL ? pooled_bytes(&host->params) : 0,
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
    RF_CHECK(of_host(rf_embedding_columns_cpu(host, &executor)));
    return rf_embedding_columns_cpu(params, &executor);
}

/* Reads the arguments of the host columns, and takes the memory that the params point to from the call. */
static rf_status host_read(rf__call *call, host_columns *host) {
    static const rf__columns_arguments at = {.weights = HOST_WEIGHTS,
                                             .program = HOST_PROGRAM,
                                             .dense = HOST_DENSE,
                                             .values = HOST_VALUES,
                                             .offsets = HOST_OFFSETS,
                                             .value_weights = HOST_VALUE_WEIGHTS,
                                             .batch = BATCH,
                                             .bounds_check = BOUNDS_CHECK,
                                             .inputs = -1};
    rf__columns program;
    rf_embedding_columns_params *params = &host->params;
    const rf_status status = rf__columns_read(call, &at, params);
    host->inputs = call->reference;
    host->buffers = call->scratch;
    call->reference = NULL;
    call->scratch = NULL;
    RF_CHECK(of_host(status));
    RF_FAIL_IF(!rf__device_is_cpu(call->device), RF_ERR_VALUE,
               "inputs of columns whose tables are on the host are on a GPU; expected inputs on the CPU");
    RF_CHECK(of_host(rf__columns_open(params->program, params->program_words, &program)));
    params->output_dim = params->output_stride = program.header->output_dim;
    params->output_dtype = RF_FLOAT32;
    return RF_OK;
}

static rf_status run_with(rf__call *call, host_columns *host) {
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
    if (rf__device_is_cpu(call->device) || pooled_bytes(&host->params) > MOST_READ_BYTES)
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
    host_columns host = {0};
    rf_status status = host_read(call, &host);
    if (status == RF_OK) status = run_with(call, &host);
    host_free(&host);
    return status;
}

const rf__operator rf__torch__embedding_columns_split = {
    "(Tensor[] weights, Tensor program, Tensor[] dense, Tensor[] values, Tensor[] offsets, "
    "Tensor[] value_weights, SymInt batch, SymInt output_dim, Tensor? program_on_device, "
    "Tensor[] host_weights, Tensor host_program, Tensor[] host_dense, Tensor[] host_values, "
    "Tensor[] host_offsets, Tensor[] host_value_weights, str bounds_check=\"on\") -> Tensor",
    RF__CPU | RF__CUDA, run};
