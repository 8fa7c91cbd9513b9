/* recfuse::_embedding_columns_split: columns of a GPU beside columns whose tables are on the host. Threads of the library pool
 * the latter's rows, and nobody but the GPU's stream waits for them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "families/embedding_columns/torch/columns_torch.h"
#include "torch/dispatch.h"
#include "torch/operators.h"

#include "families/embedding_columns/program/columns_program.h"
#include "core/threads/workers.h"
#include "families/embedding_columns/host/staging.h"
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

/* In messages about columns that are counted by themselves; embedding_columns.py looks for it. */
#define OF_HOST "of the columns whose tables are on the host"

/* Of what threads have pooled: so much is not copied, which the caller would have to ask for, with memory for it; the GPU's
 * kernel reads it where they have written it. */
enum { MOST_READ_BYTES = 1 << 18 };

/* What threads work with. It outlives the call. */
typedef struct lookup {
    rf__job disposal;
    rf__staging *delivery;
    rf__cuda_error_word word;
    rf__cuda_note *note;
    size_t bytes; /* of the delivery, that are written */
    void *scratch; /* descriptions of tensors */
    size_t n_held;
    AtenTensorHandle held[]; /* [n_held] views, which keep the memory that is read */
} lookup;

static void lookup_free(void *context) {
    lookup *of = context;
    if (of == NULL) return;
    for (size_t i = 0; i < of->n_held; i++) rf__tensor_free(of->held[i]);
    free(of->scratch);
    free(of->note);
    free(of);
}

/* On a thread. What is wrong is noted before the stream goes on, so that whoever waits for that hears of it. */
static void lookup_done(void *context, rf_status status, const char *message) {
    lookup *of = context;
    if (status != RF_OK) {
        memset(of->delivery->memory, 0, of->bytes);
        of->note->status = status;
        snprintf(of->note->text, sizeof of->note->text,
                 "%s, " OF_HOST " (found by CPU threads for an earlier call, whose output is wrong)",
                 message);
        rf__cuda_note_leave(of->word, of->note);
        of->note = NULL;
    }
    rf__staging_fill_end(of->delivery);
    /* To free memory torch may call the driver, which may wait for a stream that waits for this thread's next job. */
    of->disposal = (rf__job){.end = lookup_free, .context = of, .most_threads = 1};
    rf__workers_take(RF__DISPOSAL_CREW, &of->disposal);
}

/* A view of nothing, which keeps a tensor's memory. It has no Python object, so that to free it needs no lock of Python's where
 * the memory is torch's own, as that of programs and of page-locked tables is. */
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

static rf_status lookup_new(rf__call *call, void *scratch, lookup **made) {
    size_t most = 1;
    for (int l = 0; l < N_HOST_LISTS; l++) {
        size_t count;
        RF__TORCH_CHECK(torch_list_size(call->values[host_lists[l]].list, &count));
        most += count;
    }
    lookup *of = calloc(1, sizeof *of + most * sizeof *of->held);
    RF_FAIL_IF(of == NULL, RF_ERR_MEMORY, "no memory for a lookup of %zu tensors", most);
    of->note = malloc(sizeof *of->note);
    rf_status status = of->note == NULL ? rf__fail(RF_ERR_MEMORY, "no memory for a message") : RF_OK;
    if (status == RF_OK) status = hold_all(call, of);
    if (status == RF_OK) {
        of->scratch = scratch;
        *made = of;
    } else {
        lookup_free(of);
    }
    return status;
}

/* Says which columns an error is of, which counts them by themselves. */
static rf_status of_host(rf_status status) {
    return status == RF_OK ? RF_OK : rf__fail(status, "%s, " OF_HOST, rf_last_error());
}

static size_t pooled_bytes(const rf_embedding_columns_params *host) {
    return (size_t)(host->batch * host->output_dim) * sizeof(float);
}

/* As many as torch's threads, but for the caller's. */
static rf_status threads_of(int32_t *threads) {
    rf_executor executor;
    RF_CHECK(rf__call_executor(&executor));
    *threads = executor.threads > 2 ? executor.threads - 1 : 1;
    return RF_OK;
}

/* Hands the lookup over, then puts the stream's wait for it into the stream, and the copy to `pooled` where that is not NULL.
 * *scratch, of `host`, is the lookup's where NULL is left. A delivery that is left is to be ended when no more work in the
 * stream reads it. */
static rf_status look_up(rf__call *call, rf_embedding_columns_params *host, void **scratch,
                         const rf__cuda_device *device, void *stream, void *pooled, rf__staging **delivery) {
    const size_t bytes = pooled_bytes(host);
    const void *first = host->n_buffers > 0 ? host->buffers[0].data : host->program;
    lookup *of = NULL;
    bool captured = false;
    int32_t threads;
    RF_CHECK(rf__cuda_is_capturing(device, stream, &captured));
    RF_FAIL_IF(captured, RF_ERR_UNSUPPORTED,
               "tables are on the CPU, and a CUDA graph that is being captured would not look them up again");
    const rf__cuda_error_word word =
        rf__cuda_error_word_of(&device->errors, first, (uint64_t)host->program_words);
    /* Whatever is checked, threads may have run out of memory for an earlier call. */
    RF_CHECK(rf__cuda_check_word(device, word, stream));
    RF_CHECK(threads_of(&threads));
    RF_CHECK(rf__workers_start(RF__DISPOSAL_CREW, "embedding_columns", 1));
    RF_CHECK(lookup_new(call, *scratch, &of));
    *scratch = NULL;
    rf_status status = rf__staging_acquire(device, stream, bytes, delivery);
    if (status != RF_OK) {
        lookup_free(of);
        return status;
    }
    of->delivery = *delivery;
    of->word = word;
    of->bytes = bytes;
    host->output = (*delivery)->memory;
    status = of_host(rf_embedding_columns_start_cpu(host, threads, lookup_done, of));
    if (status != RF_OK) {
        rf__staging_fill_end(*delivery);
        lookup_free(of);
        return status;
    }
    return rf__staging_copy(device, *delivery, pooled != NULL ? bytes : 0, (rf__cu_pointer)(uintptr_t)pooled,
                            stream);
}

/* `input`: what has been pooled, as an input of the GPU's call; NULL: it has no such. Its values are NULL where the GPU is to
 * read them where threads write them. */
static rf_status run_on_gpu(rf__call *call, rf_embedding_columns_params *params,
                            rf_embedding_columns_params *host, void **scratch, rf_column_input *input,
                            void *pooled) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__staging *delivery = NULL;
    rf__columns_program program;
    RF_CHECK(rf__columns_program_read(call, PROGRAM_ON_DEVICE, params, &program));
    RF_TRY(rf__cuda_device_get(program.stream.device, &device));
    if (device->driver != NULL) /* else it is described, and nothing is looked up */
        RF_TRY(look_up(call, host, scratch, device, program.stream.stream, pooled, &delivery));
    if (input != NULL && pooled == NULL) input->values = (const void *)(uintptr_t)delivery->memory_on_device;
    RF_TRY(rf_embedding_columns_cuda(params, program.words, &program.stream));
out:
    if (delivery != NULL) status = rf__staging_release(device, delivery, program.stream.stream, status);
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

/* The arguments of the columns on the host; *scratch is what their descriptions are in. */
static rf_status host_read(rf__call *call, rf_embedding_columns_params *host, void **scratch) {
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
    const rf_status status = rf__columns_read(call, &at, host);
    *scratch = call->scratch;
    call->scratch = NULL;
    RF_CHECK(of_host(status));
    RF_FAIL_IF(!rf__device_is_cpu(call->device), RF_ERR_VALUE,
               "inputs of columns whose tables are on the host are on a GPU, must be on the CPU");
    RF_CHECK(of_host(rf__columns_open(host->program, host->program_words, &program)));
    host->output_dim = host->output_stride = program.header->output_dim;
    host->output_dtype = RF_FLOAT32;
    return RF_OK;
}

static rf_status run_with(rf__call *call, rf_embedding_columns_params *host, void **scratch) {
    size_t n_dense = 0;
    AtenTensorHandle temporary;
    void *pooled = NULL;
    const bool given = host->output_dim > 0; /* as one more input */
    const rf__columns_arguments at = {.weights = WEIGHTS,
                                      .program = PROGRAM,
                                      .dense = DENSE,
                                      .values = VALUES,
                                      .offsets = OFFSETS,
                                      .value_weights = VALUE_WEIGHTS,
                                      .batch = BATCH,
                                      .bounds_check = BOUNDS_CHECK,
                                      .inputs = -1,
                                      .gap = given};
    rf_embedding_columns_params params = {0};
    RF_CHECK(rf__columns_read_with_output(call, &at, OUTPUT_DIM, &params));
    RF__TORCH_CHECK(torch_list_size(call->values[DENSE].list, &n_dense));
    const int64_t host_sizes[2] = {host->batch, host->output_dim};
    const bool on_cpu = rf__device_is_cpu(call->device);
    if (on_cpu || pooled_bytes(host) > MOST_READ_BYTES)
        RF_CHECK(rf__call_temporary(call, 2, host_sizes, aoti_torch_dtype_float32(), &temporary, &pooled));
    rf_column_input *input = given ? (rf_column_input *)call->scratch + n_dense : NULL;
    if (given)
        *input = (rf_column_input){.values = pooled,
                                   .type = RF_COLUMN_FLOAT32,
                                   .width = host->output_dim,
                                   .sample_stride = host->output_dim,
                                   .value_stride = 1};
    return rf__call_on_cpu(call) ? run_on_cpu(&params, host, pooled)
                                 : run_on_gpu(call, &params, host, scratch, input, pooled);
}

static rf_status run(rf__call *call) {
    rf_embedding_columns_params host = {0};
    void *scratch = NULL;
    rf_status status = host_read(call, &host, &scratch);
    if (status == RF_OK) status = run_with(call, &host, &scratch);
    free(scratch);
    return status;
}

const rf__operator rf__torch__embedding_columns_split = {
    "(Tensor[] weights, Tensor program, Tensor[] dense, Tensor[] values, Tensor[] offsets, "
    "Tensor[] value_weights, SymInt batch, SymInt output_dim, Tensor? program_on_device, "
    "Tensor[] host_weights, Tensor host_program, Tensor[] host_dense, Tensor[] host_values, "
    "Tensor[] host_offsets, Tensor[] host_value_weights, str bounds_check=\"on\") -> Tensor",
    RF__CPU | RF__CUDA, run};
