/* Random calls of rf_fused_embedding_bag_cpu. */
#include <stdio.h>
#include <string.h>

#include "cases.h"
#include "reference.h"

enum { MOST_FEATURES = 12, MOST_FUSED_BAGS = 40, UNTOUCHED = 0xa5 };

/* A call and the arrays of its parameters. */
typedef struct fused_call {
    rf_fused_embedding_bag_params params;
    rf_buffer buffers[MOST_BUFFERS];
    rf_feature features[MOST_FEATURES];
} fused_call;

/* Tables are consecutive in their buffers, with gaps of NaN; some features share the previous table. */
static void draw_features(randomness *random, arena *memory, fused_call *call) {
    rf_fused_embedding_bag_params *params = &call->params;
    const bool no_rows = random_chance(random, 0.03), summed = random_chance(random, 0.4);
    for (int64_t f = 0; f < params->n_features; f++) {
        rf_feature *feature = &call->features[f];
        if (f > 0 && random_chance(random, 0.2)) {
            *feature = call->features[f - 1];
        } else {
            feature->buffer = random_between(random, 0, params->n_buffers - 1);
            rf_buffer *buffer = &call->buffers[feature->buffer];
            feature->weight_offset = buffer->numel + random_between(random, 0, 3);
            feature->rows = no_rows ? 0 : random_between(random, 1, random_chance(random, 0.5) ? 8 : 60);
            feature->dim = random_dim(random);
            buffer->numel = feature->weight_offset + feature->rows * feature->dim;
        }
        feature->pooling = summed ? RF_SUM : random_between(random, RF_SUM, RF_MAX);
        feature->padding_idx = -1;
        if (feature->rows > 0 && random_chance(random, 0.3))
            feature->padding_idx = random_between(random, 0, feature->rows - 1);
    }
    for (int64_t b = 0; b < params->n_buffers; b++) {
        rf_buffer *buffer = &call->buffers[b];
        void *data =
            arena_place(random, &memory->weights[b], (size_t)buffer->numel * element_size(buffer->dtype));
        fill_poison(data, 0, buffer->numel, buffer->dtype);
        buffer->data = data;
        for (int64_t f = 0; f < params->n_features; f++) {
            const rf_feature *feature = &call->features[f];
            if (feature->buffer != b) continue;
            unsigned char *weight = (unsigned char *)data;
            weight += (size_t)feature->weight_offset * element_size(buffer->dtype);
            fill_normal(random, weight, feature->rows * feature->dim, buffer->dtype);
        }
    }
}

/* The features' columns are adjacent, in a random order. */
static void lay_columns(fused_call *call) {
    int64_t column = 0;
    for (int64_t f = 0; f < call->params.n_features; f++) {
        call->features[f].output_column = column;
        column += call->features[f].dim;
    }
    call->params.output_dim = column;
}

static void draw_lookups(randomness *random, arena *memory, fused_call *call) {
    rf_fused_embedding_bag_params *params = &call->params;
    int64_t offsets[MOST_FEATURES * MOST_FUSED_BAGS + 1];
    const int64_t all_bags = params->n_features * params->bags;
    const bool empty = params->n_features > 0 && call->features[0].rows == 0;
    params->lookups = arena_offsets(random, offsets, all_bags, empty);
    void *to =
        arena_place(random, &memory->offsets, (size_t)(all_bags + 1) * integer_size(params->offset_type));
    for (int64_t i = 0; i <= all_bags; i++) integer_set(to, i, params->offset_type, offsets[i]);
    params->offsets = to;

    const size_t bytes = (size_t)params->lookups * integer_size(params->index_type);
    void *indices = arena_place(random, &memory->indices, bytes);
    for (int64_t b = 0; b < all_bags; b++) {
        const rf_feature *feature = &call->features[b / params->bags];
        for (int64_t i = offsets[b]; i < offsets[b + 1]; i++)
            integer_set(indices, i, params->index_type, random_between(random, 0, feature->rows - 1));
    }
    params->indices = indices;

    bool summed = random_chance(random, 0.5);
    for (int64_t f = 0; f < params->n_features; f++) summed = summed && call->features[f].pooling == RF_SUM;
    if (!summed) return;
    float *samples = arena_place(random, &memory->samples, (size_t)params->lookups * sizeof(float));
    for (int64_t i = 0; i < params->lookups; i++) samples[i] = (float)random_normal(random);
    params->sample_weights = samples;
}

static void check_output(const fused_call *call, const unsigned char *output, size_t bytes,
                         const char *label) {
    const rf_fused_embedding_bag_params *params = &call->params;
    const size_t size = element_size(params->output_dtype);
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &call->features[f];
        const rf_buffer *buffer = &call->buffers[feature->buffer];
        const unsigned char *weight = (const unsigned char *)buffer->data;
        weight += (size_t)feature->weight_offset * element_size(buffer->dtype);
        const table from = {weight,
                            feature->rows,
                            feature->dim,
                            feature->dim,
                            buffer->dtype,
                            (rf_pooling)feature->pooling,
                            feature->padding_idx};
        for (int64_t b = 0; b < params->bags; b++) {
            const int64_t at = f * params->bags + b;
            const bag of = {params->indices, params->index_type, params->sample_weights,
                            integer_get(params->offsets, at, params->offset_type),
                            integer_get(params->offsets, at + 1, params->offset_type)};
            const int64_t element = b * params->output_stride + feature->output_column;
            reference_check_bag(&from, &of, output + (size_t)element * size, params->output_dtype, label);
        }
    }
    for (size_t at = 0; at < bytes; at++) {
        const bool gap = at / size % (size_t)params->output_stride >= (size_t)params->output_dim;
        CHECK(!gap || output[at] == UNTOUCHED, "%s: byte %zu between two output rows was written", label, at);
    }
}

void fused_embedding_bag_case(randomness *random, arena *memory) {
    fused_call call = {0};
    rf_fused_embedding_bag_params *params = &call.params;
    params->n_buffers = random_between(random, 1, MOST_BUFFERS);
    params->n_features = random_chance(random, 0.03) ? 0 : random_between(random, 1, MOST_FEATURES);
    params->bags = random_chance(random, 0.05) ? 0 : random_between(random, 1, MOST_FUSED_BAGS);
    params->index_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    params->check_bounds = random_chance(random, 0.7);
    params->prefetch_distance = random_distance(random);
    const rf_dtype dtype = random_dtype(random);
    const bool mixed = random_chance(random, 0.3);
    for (int64_t b = 0; b < params->n_buffers; b++)
        call.buffers[b].dtype = mixed ? random_dtype(random) : dtype;
    params->output_dtype = mixed ? RF_FLOAT32 : dtype;
    params->buffers = call.buffers;
    params->features = call.features;
    draw_features(random, memory, &call);
    lay_columns(&call);
    draw_lookups(random, memory, &call);

    params->output_stride =
        params->output_dim + (random_chance(random, 0.3) ? random_between(random, 1, 20) : 0);
    const int64_t rows_before = params->bags > 0 ? (params->bags - 1) * params->output_stride : 0;
    const int64_t elements = params->bags > 0 ? rows_before + params->output_dim : 0;
    const size_t bytes = (size_t)elements * element_size(params->output_dtype);
    unsigned char *output = arena_place(random, &memory->output, bytes);
    memset(output, UNTOUCHED, bytes);
    params->output = output;

    char label[LABEL_BYTES];
    snprintf(label, sizeof label, "fused_embedding_bag features %lld bags %lld output %lld distance %d%s",
             (long long)params->n_features, (long long)params->bags, (long long)params->output_dim,
             params->prefetch_distance, params->sample_weights ? " weighted" : "");
    const rf_status status = rf_fused_embedding_bag_cpu(params, executor_any(random));
    CHECK(status == RF_OK, "%s: %s: %s", label, rf_status_text(status), rf_last_error());
    if (status == RF_OK) check_output(&call, output, bytes, label);
}
