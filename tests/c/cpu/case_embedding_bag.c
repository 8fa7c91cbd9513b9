/* Random calls of rf_embedding_bag_cpu. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cases.h"
#include "reference.h"

enum { MOST_BAGS = 24, UNTOUCHED = 0xa5 };

/* Bytes of `rows` rows, the last without the gap after it: there the guard page begins. */
static size_t rows_bytes(int64_t rows, int64_t dim, int64_t stride, rf_dtype dtype) {
    return rows == 0 ? 0 : (size_t)((rows - 1) * stride + dim) * element_size(dtype);
}

static void draw_weight(randomness *random, arena *memory, rf_embedding_bag_params *call) {
    /* Any alignment: sometimes an odd address, where the guard page is then a byte away. */
    const size_t bytes = rows_bytes(call->rows, call->dim, call->weight_stride, call->dtype);
    const size_t shift = random_chance(random, 0.2) ? 1 : 0;
    unsigned char *weight = arena_place(random, &memory->weights[0], bytes + 2 * shift);
    weight += shift;
    for (int64_t row = 0; row < call->rows; row++) {
        unsigned char *at = weight + (size_t)(row * call->weight_stride) * element_size(call->dtype);
        fill_normal(random, at, call->dim, call->dtype);
        if (row == call->padding_idx) fill_poison(at, 0, call->dim, call->dtype);
        if (row + 1 < call->rows) fill_poison(at, call->dim, call->weight_stride - call->dim, call->dtype);
    }
    if (call->pooling != RF_MAX && call->rows * call->dim > 0 && random_chance(random, 0.1)) {
        const double special[] = {INFINITY, -INFINITY, NAN};
        element_set(weight, random_between(random, 0, call->dim - 1), call->dtype,
                    special[random_between(random, 0, 2)]);
    }
    call->weight = bytes > 0 || random_chance(random, 0.5) ? weight : NULL;
}

static void draw_lookups(randomness *random, arena *memory, rf_embedding_bag_params *call) {
    int64_t offsets[MOST_BAGS + 1];
    call->bags = random_chance(random, 0.05) ? 0 : random_between(random, 1, MOST_BAGS);
    call->lookups = arena_offsets(random, offsets, call->bags, call->rows == 0);
    const int64_t listed = call->bags + call->include_last_offset;
    void *to = arena_place(random, &memory->offsets, (size_t)listed * integer_size(call->offset_type));
    for (int64_t i = 0; i < listed; i++) integer_set(to, i, call->offset_type, offsets[i]);
    call->offsets = to;

    void *indices =
        arena_place(random, &memory->indices, (size_t)call->lookups * integer_size(call->index_type));
    const int64_t hot = call->rows > 0 ? random_between(random, 0, call->rows - 1) : 0;
    const double hotness = random_chance(random, 0.3) ? 0.9 : 0;
    for (int64_t i = 0; i < call->lookups; i++) {
        const bool is_hot = random_chance(random, hotness);
        integer_set(indices, i, call->index_type, is_hot ? hot : random_between(random, 0, call->rows - 1));
    }
    call->indices = indices;

    call->sample_weights = NULL;
    if (call->pooling == RF_SUM && random_chance(random, 0.4)) {
        float *samples = arena_place(random, &memory->samples, (size_t)call->lookups * sizeof(float));
        for (int64_t i = 0; i < call->lookups; i++) samples[i] = (float)random_normal(random);
        call->sample_weights = samples;
    }
}

static void check_output(const rf_embedding_bag_params *call, const unsigned char *output, size_t bytes,
                         const char *label) {
    const size_t size = element_size(call->dtype);
    const table from = {call->weight, call->rows,    call->dim,        call->weight_stride,
                        call->dtype,  call->pooling, call->padding_idx};
    for (int64_t b = 0; b < call->bags; b++) {
        const bool last = b + 1 == call->bags && !call->include_last_offset;
        const bag of = {call->indices, call->index_type, call->sample_weights,
                        integer_get(call->offsets, b, call->offset_type),
                        last ? call->lookups : integer_get(call->offsets, b + 1, call->offset_type)};
        const size_t row = (size_t)(b * call->output_stride) * size;
        reference_check_bag(&from, &of, output + row, call->dtype, label);
        for (size_t at = row + (size_t)call->dim * size;
             at < row + (size_t)call->output_stride * size && at < bytes; at++)
            CHECK(output[at] == UNTOUCHED, "%s: byte %zu between two output rows was written", label, at);
    }
}

void embedding_bag_case(randomness *random, arena *memory, rf_dtype dtype, rf_pooling pooling, int64_t dim) {
    static const int64_t gaps[] = {0, 0, 0, 1, 5, 64};
    rf_embedding_bag_params call = {0};
    call.dtype = dtype;
    call.pooling = pooling;
    call.dim = dim;
    call.rows = random_chance(random, 0.05) ? 0 : random_between(random, 1, 40);
    call.weight_stride = dim + gaps[random_between(random, 0, 5)];
    call.output_stride = dim + gaps[random_between(random, 0, 5)];
    call.index_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    call.offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    call.include_last_offset = random_chance(random, 0.5);
    call.check_bounds = random_chance(random, 0.7);
    call.padding_idx =
        call.rows > 0 && random_chance(random, 0.4) ? random_between(random, 0, call.rows - 1) : -1;
    call.prefetch_distance = random_distance(random);
    draw_weight(random, memory, &call);
    draw_lookups(random, memory, &call);
    const size_t bytes = rows_bytes(call.bags, dim, call.output_stride, dtype);
    unsigned char *output = arena_place(random, &memory->output, bytes);
    memset(output, UNTOUCHED, bytes);
    call.output = output;

    char label[LABEL_BYTES];
    snprintf(label, sizeof label,
             "embedding_bag rows %lld strides %lld %lld bags %lld padding %lld distance %d%s",
             (long long)call.rows, (long long)call.weight_stride, (long long)call.output_stride,
             (long long)call.bags, (long long)call.padding_idx, call.prefetch_distance,
             call.sample_weights ? " weighted" : "");
    const rf_status status = rf_embedding_bag_cpu(&call, executor_any(random));
    CHECK(status == RF_OK, "%s: %s: %s", label, rf_status_text(status), rf_last_error());
    if (status == RF_OK) check_output(&call, output, bytes, label);
}
