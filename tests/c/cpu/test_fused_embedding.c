/* rf_fused_embedding_cpu: values in every layout. Each array ends at an inaccessible page. */
#include <string.h>

#include "cases.h"
#include "reference.h"

enum { MOST_FEATURES = 6, MOST_BAGS = 12, MOST_LENGTH = 9, UNTOUCHED = 0xa5 };

/* A call and the arrays of its parameters. */
typedef struct history_call {
    rf_fused_embedding_params params;
    rf_buffer buffers[MOST_FEATURES];
    rf_feature features[MOST_FEATURES];
    int64_t offsets[MOST_FEATURES * MOST_BAGS + 1], sizes[MOST_FEATURES];
} history_call;

/* A buffer a table, so that a read beside a table is found. */
static void draw_tables(randomness *random, region *memory, history_call *call) {
    rf_fused_embedding_params *params = &call->params;
    const int64_t common = random_dim(random);
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED, has_sizes = random_chance(random, 0.5);
    int64_t column = 0;
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t rows = random_between(random, 1, 20);
        const int64_t dim = is_jagged && !has_sizes ? common : random_dim(random);
        rf_buffer *buffer = &call->buffers[f];
        *buffer = (rf_buffer){.numel = rows * dim, .dtype = random_dtype(random)};
        const size_t bytes = (size_t)buffer->numel * element_size(buffer->dtype);
        void *data = random_chance(random, 0.7) ? region_at_end(&memory[f], bytes)
                                                : region_at_start(&memory[f], bytes);
        fill_normal(random, data, buffer->numel, buffer->dtype);
        buffer->data = data;
        call->features[f] = (rf_feature){f, 0, rows, dim, RF_SUM, -1, column};
        column += dim;
    }
    params->output_dim = is_jagged ? common : column;
    params->sizes = is_jagged && has_sizes ? call->sizes : NULL;
}

static void draw_lookups(randomness *random, arena *memory, history_call *call) {
    rf_fused_embedding_params *params = &call->params;
    const int64_t bags = params->bags, all = params->n_features * bags;
    for (int64_t i = 0; i < all; i++) {
        const bool repeats = params->layout == RF_HISTORY_JOINED && i >= bags;
        const int64_t length = repeats ? call->offsets[i - bags + 1] - call->offsets[i - bags]
                               : random_chance(random, 0.3) ? 0
                                                            : random_between(random, 0, 12);
        call->offsets[i + 1] = call->offsets[i] + length;
    }
    params->lookups = call->offsets[all];
    void *offsets =
        arena_place(random, &memory->offsets, (size_t)(all + 1) * integer_size(params->offset_type));
    for (int64_t i = 0; i <= all; i++) integer_set(offsets, i, params->offset_type, call->offsets[i]);
    params->offsets = offsets;
    void *indices =
        arena_place(random, &memory->indices, (size_t)params->lookups * integer_size(params->index_type));
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t begin = call->offsets[f * bags], end = call->offsets[(f + 1) * bags];
        call->sizes[f] = end - begin;
        for (int64_t i = begin; i < end; i++)
            integer_set(indices, i, params->index_type,
                        random_between(random, 0, call->features[f].rows - 1));
    }
    params->indices = indices;
    if (params->sizes == NULL) return;
    params->output_dim = 0;
    for (int64_t f = 0; f < params->n_features; f++)
        params->output_dim += call->sizes[f] * call->features[f].dim;
}

/* Returns the first element of a slot of a feature in the output. */
static int64_t element_of(const history_call *call, int64_t number, int64_t slot) {
    const rf_fused_embedding_params *params = &call->params;
    if (params->layout != RF_HISTORY_JAGGED)
        return slot * params->output_dim + call->features[number].output_column;
    int64_t element = slot * call->features[number].dim;
    for (int64_t f = 0; f < number; f++) element += call->sizes[f] * call->features[f].dim;
    return element;
}

/* Checks a slot with the row of lookup `at`; -1: zeros. */
static void check_slot(const history_call *call, int64_t number, int64_t slot, int64_t at) {
    const rf_fused_embedding_params *params = &call->params;
    const rf_feature *feature = &call->features[number];
    const rf_buffer *buffer = &call->buffers[number];
    const table from = {buffer->data, feature->rows, feature->dim, feature->dim, buffer->dtype, RF_SUM, -1};
    const bag of = {params->indices, params->index_type, NULL, at < 0 ? 0 : at, at < 0 ? 0 : at + 1};
    const unsigned char *output = params->output;
    output += (size_t)element_of(call, number, slot) * element_size(params->output_dtype);
    reference_check_bag(&from, &of, output, params->output_dtype, "fused_embedding");
}

static void check_output(const history_call *call) {
    const rf_fused_embedding_params *params = &call->params;
    for (int64_t f = 0; f < params->n_features; f++) {
        const int64_t begin = call->offsets[f * params->bags];
        for (int64_t b = 0; b < params->bags; b++) {
            const int64_t from = call->offsets[f * params->bags + b];
            const int64_t lookups = call->offsets[f * params->bags + b + 1] - from;
            const bool is_padded = params->layout == RF_HISTORY_PADDED;
            for (int64_t p = 0; p < (is_padded ? params->length : lookups); p++) {
                const int64_t slot = is_padded ? b * params->length + p : from - begin + p;
                check_slot(call, f, slot, p < lookups ? from + p : -1);
            }
        }
    }
}

static void history_case(randomness *random, arena *memory, region *tables) {
    history_call call = {.offsets = {0}};
    rf_fused_embedding_params *params = &call.params;
    params->layout = (rf_history_layout)random_between(random, RF_HISTORY_JAGGED, RF_HISTORY_PADDED);
    params->n_features = random_between(random, 1, MOST_FEATURES);
    params->n_buffers = params->n_features;
    params->buffers = call.buffers;
    params->features = call.features;
    params->bags = random_between(random, 1, MOST_BAGS);
    params->length = params->layout == RF_HISTORY_PADDED ? random_between(random, 1, MOST_LENGTH) : 0;
    params->index_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->check_bounds = random_chance(random, 0.7);
    params->output_dtype = random_dtype(random);
    draw_tables(random, tables, &call);
    draw_lookups(random, memory, &call);
    const int64_t slots = params->layout == RF_HISTORY_PADDED   ? params->bags * params->length
                          : params->layout == RF_HISTORY_JOINED ? params->lookups / params->n_features
                                                                : params->lookups;
    const int64_t elements = params->sizes != NULL ? params->output_dim : slots * params->output_dim;
    const size_t bytes = (size_t)elements * element_size(params->output_dtype);
    params->output = arena_place(random, &memory->output, bytes);
    memset(params->output, UNTOUCHED, bytes);
    const rf_status status = rf_fused_embedding_cpu(params, executor_any(random));
    CHECK(status == RF_OK, "layout %d: %s", (int)params->layout, rf_last_error());
    if (status == RF_OK) check_output(&call);
}

void test_fused_embedding_random(void) {
    randomness random = {41};
    arena memory = arena_new();
    region tables[MOST_FEATURES];
    for (int f = 0; f < MOST_FEATURES; f++) tables[f] = region_new(20 * 304 * sizeof(float));
    for (int i = 0; i < 10 * check_rounds; i++) history_case(&random, &memory, tables);
    for (int f = 0; f < MOST_FEATURES; f++) region_free(&tables[f]);
    arena_free(&memory);
}
