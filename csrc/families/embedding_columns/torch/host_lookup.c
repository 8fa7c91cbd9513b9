#include "families/embedding_columns/torch/host_lookup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/row_format.h"
#include "core/threads/workers.h"
#include "gpu/driver/error_check.h"
#include "torch/dispatch.h"
#include "families/embedding_columns/embedding_columns.h"

/* The arguments that are lists of tensors. */
enum { N_LISTS = 5 };
#define LISTS(at) {(at)->weights, (at)->dense, (at)->values, (at)->offsets, (at)->value_weights}

void rf__host_columns_free(const rf__host_columns *host) {
    rf__columns_inputs_drop(host->inputs);
    free(host->buffers);
}

/* A lookup by threads, which outlives the call. */
typedef struct lookup {
    rf__job deferred_free;
    rf__staging *staging;
    rf__cuda_error_word word;
    rf__cuda_note *note;
    rf__host_columns host;
    size_t n_views;
    AtenTensorHandle views[]; /* [n_views] views, which keep the memory that is read */
} lookup;

static void lookup_free(void *context) {
    lookup *of = context;
    if (of == NULL) return;
    for (size_t i = 0; i < of->n_views; i++) rf__tensor_free(of->views[i]);
    rf__host_columns_free(&of->host);
    free(of->note);
    free(of);
}

size_t rf__host_columns_bytes(const rf_embedding_columns_params *host) {
    return (size_t)rf__elements_bytes(RF_FLOAT32, host->batch * host->output_dim);
}

/* Ends a lookup, on a thread. An error is noted before the stream continues, so that it is visible to all
 * waiters. */
static void lookup_done(void *context, rf_status status, const char *message) {
    lookup *of = context;
    if (status != RF_OK) {
        memset(of->staging->memory, 0, rf__host_columns_bytes(&of->host.params));
        of->note->status = status;
        snprintf(of->note->text, sizeof of->note->text,
                 "%s (" RF__OF_HOST ", found by CPU threads for an earlier call, whose output is wrong)",
                 message);
        rf__cuda_note_leave(of->word, of->note);
        of->note = NULL;
    }
    rf__staging_fill_end(of->staging);
    /* To free memory torch may call the driver, which may wait for a stream that waits for this thread's next
     * job. */
    of->deferred_free = (rf__job){.end = lookup_free, .context = of, .most_threads = 1};
    rf__workers_take(RF__DEFERRED_FREE_CREW, &of->deferred_free);
}

/* An empty view, which keeps a tensor's memory. It has no Python object, so that freeing it needs no lock of
 * Python's if the memory is torch's own, like that of programs and of page-locked tables. */
static rf_status view_add(lookup *of, AtenTensorHandle tensor) {
    static const int64_t size[1] = {0}, stride[1] = {1};
    RF_CHECK(rf__tensor_view(tensor, 1, size, stride, 0, &of->views[of->n_views]));
    of->n_views++;
    return RF_OK;
}

static rf_status view_all(const rf__call *call, const rf__columns_arguments *at, lookup *of) {
    const int lists[N_LISTS] = LISTS(at);
    RF_CHECK(view_add(of, call->values[at->program].tensor));
    for (int l = 0; l < N_LISTS; l++) {
        const StableListHandle list = call->values[lists[l]].list;
        size_t count;
        RF__TORCH_CHECK(torch_list_size(list, &count));
        for (size_t i = 0; i < count; i++) {
            rf__value item = {0};
            RF__TORCH_CHECK(torch_list_get_item(list, i, &item.bits));
            RF_CHECK(view_add(of, item.tensor));
        }
    }
    return RF_OK;
}

/* Takes over `host` on success, and zeroes it. */
static rf_status lookup_new(rf__call *call, const rf__columns_arguments *at, rf__host_columns *host,
                            lookup **created) {
    const int lists[N_LISTS] = LISTS(at);
    rf_status status = RF_OK;
    size_t n_views = 1;
    for (int l = 0; l < N_LISTS; l++) {
        size_t count;
        RF__TORCH_CHECK(torch_list_size(call->values[lists[l]].list, &count));
        n_views += count;
    }
    lookup *of = calloc(1, sizeof *of + n_views * sizeof *of->views);
    RF_FAIL_IF(of == NULL, RF_ERR_MEMORY, "no memory for a lookup of %zu tensors", n_views);
    of->note = malloc(sizeof *of->note);
    if (of->note == NULL) status = rf__fail(RF_ERR_MEMORY, "no memory for a message");
    if (status == RF_OK) status = view_all(call, at, of);
    if (status != RF_OK) {
        lookup_free(of);
        return status;
    }
    of->host = *host;
    *host = (rf__host_columns){.params = host->params};
    *created = of;
    return RF_OK;
}

rf_status rf__host_columns_status(rf_status status) {
    return status == RF_OK ? RF_OK : rf__fail(status, "%s (" RF__OF_HOST ")", rf_last_error());
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

rf_status rf__host_lookup_start(rf__call *call, const rf__columns_arguments *at, rf__host_columns *host,
                                const rf__cuda_device *device, void *stream, rf__staging **staging) {
    rf_status status = RF_OK;
    rf__cuda_error_word word;
    lookup *of = NULL;
    int32_t threads;
    RF_CHECK(errors_check(device, stream, &host->params, &word));
    RF_CHECK(threads_of(&threads));
    RF_CHECK(rf__workers_start(RF__DEFERRED_FREE_CREW, "embedding_columns", 1));
    RF_TRY(lookup_new(call, at, host, &of));
    RF_TRY(rf__staging_acquire(device, stream, rf__host_columns_bytes(&of->host.params), staging));
    of->staging = *staging;
    of->word = word;
    of->host.params.output = (*staging)->memory;
    status =
        rf__host_columns_status(rf_embedding_columns_start_cpu(&of->host.params, threads, lookup_done, of));
    if (status != RF_OK) rf__staging_fill_end(*staging);
out:
    if (status != RF_OK) lookup_free(of);
    return status;
}
