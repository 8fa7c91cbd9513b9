/* rf_fused_embedding_cpu: slots, cut into tasks for threads.
 *
 * Features one after the other: a task has slots of a feature. Features side by side: a task has slots of all
 * features, whose output is consecutive. A slot depends on its lookups only. Offsets are checked first. An
 * invalid index stops its task; the first one in the order of the lookups is then found by a search, so that
 * the error does not depend on the threads. */
#include <stdlib.h>
#include <string.h>

#include "core/huge_pages.h"
#include "core/isa.h"
#include "core/tasks.h"
#include "families/fused_embedding/check_fused_embedding.h"
#include "families/fused_embedding_bag/cpu/pool.h"

enum {
    TASK_BYTES = 1 << 18, /* that a task reads and writes, approximately */
    LEAD_BYTES = 32768,   /* of prefetched, unused rows */
    BLOCK = 256,          /* elements that are converted at once */
};

static const char operator_name[] = "fused_embedding";

/* A feature with the position of its output. */
typedef struct history_feature {
    const char *weight;
    char *output; /* of slot 0 */
    int64_t pitch, slots, first_lookup, first_task; /* pitch: bytes from slot to slot */
    int64_t *rows;
    const char *fill;
} history_feature;

typedef struct history_call {
    const rf_fused_embedding_params *params;
    history_feature *features; /* [n_features] */
    int64_t tasks, task_slots; /* slots of a task */
    rf__load_kernel load;
    rf__store_kernel store;
    bool is_bad; /* atomic: a task has found an invalid index */
} history_call;

static int64_t offset_at(const rf_fused_embedding_params *params, int64_t at) {
    return rf__load_int(params->offsets, params->offset_type, at);
}

static rf_status check_offset(const rf_fused_embedding_params *params, int64_t at) {
    const int64_t offset = offset_at(params, at), before = at > 0 ? offset_at(params, at - 1) : 0;
    const int64_t feature = at / (params->bags > 0 ? params->bags : 1), all = params->n_features;
    RF__REFUSE_IF(at == 0 && offset != 0, RF_ERR_OFFSET,
                  "offsets[0] is " RF__I64 "; expected 0, where the first bag begins", offset);
    RF__REFUSE_IF(
        offset < before || offset > params->lookups, RF_ERR_OFFSET,
        "offsets[" RF__I64 "] is " RF__I64 ", for feature " RF__I64 ", bag " RF__I64 "; expected " RF__I64
        " (where the bag before begins, since offsets never decrease) to " RF__I64 " (the number of indices)",
        at, offset, (at - 1) / params->bags, (at - 1) % params->bags, before, params->lookups);
    if (params->layout == RF_HISTORY_JOINED && feature > 0) {
        const int64_t expected = feature * (params->lookups / all) + offset_at(params, at % params->bags);
        RF__REFUSE_IF(offset != expected, RF_ERR_OFFSET,
                      "offsets[" RF__I64 "] is " RF__I64 ", for feature " RF__I64 ", bag " RF__I64
                      "; expected " RF__I64
                      ", since features of layout joined have histories of the same lengths",
                      at, offset, (at - 1) / params->bags, (at - 1) % params->bags, expected);
    }
    return RF_OK;
}

static rf_status check_offsets(const rf_fused_embedding_params *params) {
    const int64_t last = params->n_features * params->bags;
    for (int64_t at = 0; at <= last; at++) RF_CHECK(check_offset(params, at));
    const int64_t end = offset_at(params, last);
    RF__REFUSE_IF(end != params->lookups, RF_ERR_OFFSET,
                  "offsets[" RF__I64 "], the last offset, is " RF__I64 "; expected " RF__I64
                  ", the number of indices",
                  last, end, params->lookups);
    for (int64_t f = 0; f < params->n_features && params->sizes != NULL; f++) {
        const int64_t size = offset_at(params, (f + 1) * params->bags) - offset_at(params, f * params->bags);
        RF__REFUSE_IF(size != params->sizes[f], RF_ERR_VALUE,
                      "sizes[" RF__I64 "] is " RF__I64 "; expected " RF__I64
                      ", the lookups of the feature according to offsets",
                      f, params->sizes[f], size);
    }
    return RF_OK;
}

static void convert(const history_call *call, char *to, const char *from, rf_dtype dtype, int64_t dim) {
    const rf_dtype output_dtype = call->params->output_dtype;
    float numbers[BLOCK];
    for (int64_t at = 0; at < dim; at += BLOCK) {
        const int64_t count = dim - at < BLOCK ? dim - at : BLOCK;
        call->load(rf__element_at(from, dtype, at), dtype, count, numbers);
        call->store((char *)to + rf__elements_bytes(output_dtype, at), output_dtype, count, numbers);
    }
}

static void row_ask(const history_call *call, int64_t number, int64_t lookup) {
    const rf_fused_embedding_params *params = call->params;
    const rf__row_format row = rf__feature_row(params->buffers, &params->features[number]);
    const uint64_t index = (uint64_t)rf__load_int(params->indices, params->index_type, lookup);
    const uintptr_t weight = (uintptr_t)call->features[number].weight;
    rf__ask_for((const char *)(weight + (uintptr_t)index * (uintptr_t)row.pitch), row.bytes);
}

/* Returns the number of lookups from a row's prefetch to its copy. */
static int64_t distance_of(const history_call *call, int64_t number) {
    const int64_t bytes = rf__feature_row(call->params->buffers, &call->params->features[number]).bytes;
    return LEAD_BYTES / (bytes > 64 ? bytes : 64) + 1;
}

/* Copies the rows of `count` consecutive lookups to consecutive slots, and prefetches rows up to lookup
 * `ahead`. False at an invalid index. */
static bool run_copy(const history_call *call, int64_t number, int64_t lookup, int64_t slot, int64_t count,
                     int64_t ahead) {
    const rf_fused_embedding_params *params = call->params;
    const rf_feature *feature = &params->features[number];
    const history_feature *to = &call->features[number];
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    const bool is_copy = row.dtype == params->output_dtype;
    const int64_t distance = distance_of(call, number);
    for (int64_t i = 0; i < count; i++) {
        if (lookup + i + distance < ahead) row_ask(call, number, lookup + i + distance);
        const int64_t index = rf__load_int(params->indices, params->index_type, lookup + i);
        if (params->check_bounds && (uint64_t)index >= (uint64_t)feature->rows) return false;
        char *output = to->output + (slot + i) * to->pitch;
        const char *from = to->weight + index * row.pitch;
        if (is_copy) {
            memcpy(output, from, (size_t)row.bytes);
        } else {
            convert(call, output, from, row.dtype, row.dim);
        }
        if (to->rows != NULL)
            to->rows[slot + i] = index == feature->padding_idx
                                     ? -1
                                     : index + (params->first_rows != NULL ? params->first_rows[number] : 0);
    }
    return true;
}

static void padding_write(const history_call *call, int64_t number, int64_t slot, int64_t count) {
    const history_feature *to = &call->features[number];
    const int64_t dim = call->params->features[number].dim;
    const size_t bytes = (size_t)rf__elements_bytes(call->params->output_dtype, dim);
    for (int64_t i = slot; i < slot + count; i++) {
        if (to->fill != NULL && bytes > 0)
            memcpy(to->output + i * to->pitch, to->fill, bytes);
        else
            memset(to->output + i * to->pitch, 0, bytes);
        if (to->rows != NULL) to->rows[i] = -1;
    }
}

/* Slots [slot, end) of a feature, history by history. */
static bool padded_copy(const history_call *call, int64_t number, int64_t slot, int64_t end, int64_t ahead) {
    const rf_fused_embedding_params *params = call->params;
    while (slot < end) {
        const int64_t bag = slot / params->length, first = slot % params->length;
        const int64_t at = number * params->bags + bag, from = offset_at(params, at);
        const int64_t lookups = offset_at(params, at + 1) - from;
        int64_t last = params->length < first + (end - slot) ? params->length : first + (end - slot);
        const int64_t rows = lookups < last ? lookups : last;
        if (first < rows && !run_copy(call, number, from + first, slot, rows - first, ahead)) return false;
        const int64_t begin = rows > first ? rows : first;
        padding_write(call, number, slot + (begin - first), last - begin);
        slot += last - first;
    }
    return true;
}

/* Sets the lookups of slots [slot, end) of a feature, and perhaps adjacent lookups. */
static void lookups_of(const history_call *call, int64_t number, int64_t slot, int64_t end, int64_t *first,
                       int64_t *last) {
    const rf_fused_embedding_params *params = call->params;
    if (params->layout == RF_HISTORY_PADDED) {
        *first = offset_at(params, number * params->bags + slot / params->length);
        *last = offset_at(params, number * params->bags + (end - 1) / params->length + 1);
    } else {
        *first = call->features[number].first_lookup + slot;
        *last = call->features[number].first_lookup + end;
    }
}

/* Prefetches the first rows of slots [slot, end) of a feature. */
static void slots_ask(const history_call *call, int64_t number, int64_t slot, int64_t end) {
    int64_t first = 0, last = 0;
    lookups_of(call, number, slot, end, &first, &last);
    const int64_t distance = distance_of(call, number);
    for (int64_t i = first; i < last && i < first + distance; i++) row_ask(call, number, i);
}

static bool slots_copy(const history_call *call, int64_t number, int64_t slot, int64_t end) {
    int64_t first = 0, last = 0;
    lookups_of(call, number, slot, end, &first, &last);
    return call->params->layout == RF_HISTORY_PADDED ? padded_copy(call, number, slot, end, last)
                                                     : run_copy(call, number, first, slot, end - slot, last);
}

/* Returns the last feature whose first task is not after `task`. */
static int64_t feature_of_task(const history_call *call, int64_t task) {
    int64_t low = 0, high = call->params->n_features - 1;
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        if (call->features[middle].first_task <= task)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void task_run(void *context, int64_t task) {
    history_call *call = context;
    const bool is_jagged = call->params->layout == RF_HISTORY_JAGGED;
    const int64_t first = is_jagged ? feature_of_task(call, task) : 0;
    const history_feature *feature = &call->features[first];
    const int64_t slot = (task - feature->first_task) * call->task_slots;
    const int64_t end = feature->slots - slot < call->task_slots ? feature->slots : slot + call->task_slots;
    const int64_t last = is_jagged ? first : call->params->n_features - 1;
    bool is_good = true;
    slots_ask(call, first, slot, end);
    for (int64_t f = first; f <= last && is_good; f++) {
        if (f < last) slots_ask(call, f + 1, slot, end);
        is_good = slots_copy(call, f, slot, end);
    }
    if (!is_good) __atomic_store_n(&call->is_bad, true, __ATOMIC_RELAXED);
}

/* Sets the output and the tasks of each feature, and requests huge pages for a large output, which torch
 * allocates anew in each call; returns the bytes of work. */
static int64_t features_set(history_call *call) {
    const rf_fused_embedding_params *params = call->params;
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED;
    int64_t element = 0, slots_before = 0, task = 0, bytes = 0, widest = 1;
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t row_bytes = rf__elements_bytes(params->output_dtype, params->features[f].dim);
        widest = is_jagged ? (row_bytes > widest ? row_bytes : widest) : widest + row_bytes;
    }
    call->task_slots = TASK_BYTES / widest > 0 ? TASK_BYTES / widest : 1;
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const int64_t begin = offset_at(params, f * params->bags);
        const int64_t lookups = offset_at(params, (f + 1) * params->bags) - begin;
        const int64_t slots = is_jagged ? lookups : rf__history_slots(params);
        const int64_t dim = is_jagged ? feature->dim : params->output_dim;
        const int64_t at = is_jagged ? element : feature->output_column;
        call->features[f] = (history_feature){
            .weight = rf__feature_weight(params->buffers, feature),
            .output = (char *)params->output + rf__elements_bytes(params->output_dtype, at),
            .pitch = rf__elements_bytes(params->output_dtype, dim),
            .slots = slots,
            .first_lookup = begin,
            .first_task = task,
            .rows = params->rows != NULL ? params->rows + slots_before : NULL,
            .fill = params->fill != NULL
                        ? rf__element_at(params->fill, params->output_dtype, feature->output_column)
                        : NULL,
        };
        element += slots * feature->dim;
        slots_before += slots;
        if (is_jagged) task += (slots + call->task_slots - 1) / call->task_slots;
        bytes += slots * (rf__feature_row(params->buffers, feature).bytes +
                          rf__elements_bytes(params->output_dtype, feature->dim) + 8);
    }
    if (!is_jagged) {
        element = rf__history_slots(params) * params->output_dim;
        task = (rf__history_slots(params) + call->task_slots - 1) / call->task_slots;
    }
    call->tasks = task;
    rf__huge_pages_ask(params->output, rf__elements_bytes(params->output_dtype, element));
    return bytes;
}

/* Returns the error of the first invalid index. */
static rf_status bad_index_find(const rf_fused_embedding_params *params) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t rows = params->features[f].rows;
        for (int64_t b = 0; b < params->bags; b++) {
            const int64_t from = offset_at(params, f * params->bags + b);
            int64_t to = offset_at(params, f * params->bags + b + 1);
            if (params->layout == RF_HISTORY_PADDED && to > from + params->length) to = from + params->length;
            for (int64_t i = from; i < to; i++) {
                const int64_t index = rf__load_int(params->indices, params->index_type, i);
                if ((uint64_t)index < (uint64_t)rows) continue;
                RF__REFUSE_IF(rows == 0, RF_ERR_INDEX,
                              "history[" RF__I64 "] is " RF__I64 ", for feature " RF__I64 ", bag " RF__I64
                              ", but its table has no rows, so no index is valid",
                              i - from, index, f, b);
                RF__REFUSE_IF(true, RF_ERR_INDEX,
                              "history[" RF__I64 "] is " RF__I64 ", for feature " RF__I64 ", bag " RF__I64
                              "; expected 0 to " RF__I64 ", less than the " RF__I64 " rows of its table",
                              i - from, index, f, b, rows - 1, rows);
            }
        }
    }
    return RF_OK;
}

rf_status rf_fused_embedding_cpu(const rf_fused_embedding_params *params, const rf_executor *executor) {
    rf_status status = RF_OK;
    const rf__pool_kernels *kernels = rf__isa_in_use()->kernels;
    history_call call = {.params = params, .load = kernels->load, .store = kernels->store};
    RF_CHECK(rf__check_fused_embedding(params));
    if (params->n_features == 0) return RF_OK;
    RF_CHECK(check_offsets(params)); /* also with check_bounds off: they are the bounds of writes */
    RF__REFUSE_IF(params->output == NULL && params->output_dim > 0 && rf__history_slots(params) > 0,
                  RF_ERR_VALUE, "output is NULL; expected a pointer to " RF__I64 " columns a slot",
                  params->output_dim);
    call.features = calloc((size_t)params->n_features, sizeof *call.features);
    RF_FAIL_IF(call.features == NULL, RF_ERR_MEMORY, "recfuse.%s: no memory for %lld features", operator_name,
               (long long)params->n_features);
    const int64_t bytes = features_set(&call);
    RF_TRY(rf__tasks_run(operator_name, call.tasks, rf__tasks_workers(executor, bytes), task_run, &call,
                         executor));
    if (call.is_bad) RF_TRY(bad_index_find(params));
out:
    free(call.features);
    return status;
}
