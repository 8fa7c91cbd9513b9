/* Random programs and batches. */
#include <math.h>
#include <string.h>

#include "columns.h"

enum { TABLE_BYTES = 1 << 17, VALUE_BYTES = 1 << 18, PROGRAM_BYTES = 1 << 19, OUTPUT_BYTES = 1 << 23 };

columns_memory columns_memory_new(void) {
    columns_memory memory;
    for (int i = 0; i < MOST_TABLES; i++) memory.tables[i] = region_new(TABLE_BYTES + 4096);
    for (int i = 0; i < MOST_INPUTS; i++) {
        memory.values[i] = region_new(VALUE_BYTES);
        memory.offsets[i] = region_new(VALUE_BYTES);
        memory.weights[i] = region_new(VALUE_BYTES);
    }
    memory.program = region_new(PROGRAM_BYTES);
    memory.output = region_new(OUTPUT_BYTES);
    return memory;
}

void columns_memory_free(columns_memory *memory) {
    for (int i = 0; i < MOST_TABLES; i++) region_free(&memory->tables[i]);
    for (int i = 0; i < MOST_INPUTS; i++) {
        region_free(&memory->values[i]);
        region_free(&memory->offsets[i]);
        region_free(&memory->weights[i]);
    }
    region_free(&memory->program);
    region_free(&memory->output);
}

static void draw_arrays(randomness *random, columns_case *call) {
    const double first = (double)random_between(random, -20, 5);
    float boundary = (float)first;
    const bool rough = random_chance(random, 0.4);
    const double jitter =
        random_chance(random, 0.5) ? 0 : 0.45 * (double)random_between(random, 0, 100) / 100;
    for (int64_t i = 0; i < N_BOUNDARIES; i++) {
        const double off = jitter * (double)random_between(random, -100, 100) / 100;
        call->boundaries[i] = rough ? boundary : (float)(first + 0.75 * ((double)i + off));
        boundary += (float)random_between(random, 0, 3) * 0.5f;
    }
    if (random_chance(random, 0.2)) call->boundaries[0] = -INFINITY;
    if (random_chance(random, 0.2)) call->boundaries[N_BOUNDARIES - 1] = INFINITY;
    for (int64_t i = 0; i < N_VOCABULARY; i++) call->vocabulary[i] = (i * 37 % N_VOCABULARY) * 3 - 40;
    call->vocabulary[7] = INT64_MIN;
    call->vocabulary[8] = INT64_MAX;
    call->written.boundaries = call->boundaries;
    call->written.n_boundaries = N_BOUNDARIES;
    call->written.vocabulary = call->vocabulary;
    call->written.n_vocabulary = N_VOCABULARY;
}

static float random_float(randomness *random, const columns_case *call) {
    static const float special[] = {NAN,    INFINITY, -INFINITY, 0,       -0.0f,   3e38f,
                                    -3e38f, 1e-40f,   0x1p62f,   0x1p63f, -0x1p63f};
    if (random_chance(random, 0.1))
        return special[random_between(random, 0, sizeof special / sizeof special[0] - 1)];
    if (random_chance(random, 0.3)) {
        const float boundary = call->boundaries[random_between(random, 0, N_BOUNDARIES - 1)];
        return random_chance(random, 0.5) ? boundary
                                          : nextafterf(boundary, random_chance(random, 0.5) ? 1e9f : -1e9f);
    }
    return (float)(random_normal(random) * 30);
}

static int64_t random_integer(randomness *random, rf_column_type type) {
    static const int64_t special[] = {INT64_MIN, INT64_MAX, INT64_MIN + 1, INT32_MIN, INT32_MAX, -1, 0};
    if (random_chance(random, 0.1)) {
        const int64_t drawn = special[random_between(random, 0, sizeof special / sizeof special[0] - 1)];
        return type == RF_COLUMN_INT32 ? (int32_t)drawn : drawn;
    }
    return random_between(random, -4, 70);
}

static void *place(randomness *random, const region *memory, size_t bytes) {
    return random_chance(random, 0.7) ? region_at_end(memory, bytes) : region_at_start(memory, bytes);
}

static void draw_values(randomness *random, const columns_case *call, rf_column_type type, void *to,
                        int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (type == RF_COLUMN_FLOAT32) {
            element_set(to, i, RF_FLOAT32, (double)random_float(random, call));
        } else {
            integer_set(to, i, type == RF_COLUMN_INT32 ? RF_INT32 : RF_INT64, random_integer(random, type));
        }
    }
}

static void draw_dense(randomness *random, const region *memory, const columns_case *call,
                       rf_column_input *input) {
    const int64_t batch = call->params.batch, size = input->type == RF_COLUMN_INT64 ? 8 : 4;
    input->width = random_chance(random, 0.4) ? random_between(random, 1, 30) : random_between(random, 1, 3);
    const bool by_value = random_chance(random, 0.3); /* the samples of a value are adjacent */
    const int64_t gap = random_chance(random, 0.4) ? random_between(random, 1, 3) : 0;
    input->sample_stride = by_value ? 1 : input->width + gap;
    input->value_stride = by_value ? batch + gap : 1;
    const int64_t count =
        batch == 0 ? 0 : (batch - 1) * input->sample_stride + (input->width - 1) * input->value_stride + 1;
    void *data = place(random, memory, (size_t)(count * size));
    draw_values(random, call, input->type, data, count);
    input->values = data;
}

static void draw_jagged(randomness *random, const columns_memory *memory, int at, const columns_case *call,
                        rf_column_input *input) {
    const int64_t batch = call->params.batch;
    input->features = random_between(random, 1, 3);
    input->offset_type = random_chance(random, 0.5) ? RF_INT32 : RF_INT64;
    const int64_t bags = input->features * batch;
    const bool with_long = batch < 20 && random_chance(random, 0.3);
    void *offsets =
        place(random, &memory->offsets[at], (size_t)(bags + 1) * integer_size(input->offset_type));
    int64_t end = 0;
    for (int64_t bag = 0; bag <= bags; bag++) {
        integer_set(offsets, bag, input->offset_type, end);
        if (bag == bags || random_chance(random, 0.25)) continue;
        end += with_long && random_chance(random, 0.15) ? random_between(random, 900, 3000)
                                                        : random_between(random, 0, 6);
    }
    input->offsets = offsets;
    input->lookups = end + random_between(random, 0, 2);
    const int64_t size = input->type == RF_COLUMN_INT64 ? 8 : 4;
    void *data = place(random, &memory->values[at], (size_t)(input->lookups * size));
    draw_values(random, call, input->type, data, input->lookups);
    input->values = data;
    if (random_chance(random, 0.4)) return;
    float *weights = place(random, &memory->weights[at], (size_t)input->lookups * sizeof *weights);
    for (int64_t i = 0; i < input->lookups; i++)
        weights[i] = 0.5f + 0.125f * (float)random_between(random, 0, 12);
    input->weights = weights;
}

/* Steps from a kind of value to integers or, if wanted so, to either. */
static void draw_steps(randomness *random, columns_case *call, rf_column_source *source, bool is_float,
                       bool any) {
    source->first_step = call->written.n_steps;
    source->n_steps = 0;
    for (;;) {
        rf_column_step *step = &call->steps[call->written.n_steps];
        if (source->n_steps == 3 || call->written.n_steps >= MOST_STEPS - MOST_SOURCES ||
            random_chance(random, source->n_steps == 0 ? 0.15 : 0.5)) {
            if (!is_float || any) return;
            *step = (rf_column_step){.operation = RF_COLUMN_CAST};
            source->n_steps++;
            call->written.n_steps++;
            return;
        }
        do {
            step->operation = random_between(random, RF_COLUMN_AFFINE, RF_COLUMN_VOCABULARY);
        } while (is_float &&
                 (step->operation == RF_COLUMN_CLIP_INTEGER || step->operation == RF_COLUMN_MODULO ||
                  step->operation == RF_COLUMN_HASH || step->operation == RF_COLUMN_VOCABULARY));
        is_float = step->operation <= RF_COLUMN_CLIP;
        switch ((rf_column_operation)step->operation) {
        case RF_COLUMN_AFFINE:
            step->a = float_as_bits((float)random_normal(random));
            step->b = float_as_bits((float)random_between(random, -5, 5) + 0.3f);
            break;
        case RF_COLUMN_CLIP:
            step->a = float_as_bits((float)random_between(random, -10, 3));
            step->b = float_as_bits((float)random_between(random, 0, 50));
            break;
        case RF_COLUMN_CLIP_INTEGER:
            step->a = random_between(random, -10, 3);
            step->b = random_between(random, 0, 50);
            break;
        case RF_COLUMN_MODULO:
            step->a = random_chance(random, 0.1) ? INT64_MAX : random_between(random, 1, 40);
            break;
        case RF_COLUMN_BUCKETIZE:
        case RF_COLUMN_BUCKETIZE_RIGHT:
            step->b = random_chance(random, 0.2) ? N_BOUNDARIES : random_between(random, 0, 40);
            step->a = random_between(random, 0, N_BOUNDARIES - step->b);
            break;
        case RF_COLUMN_HASH:
            step->a = random_chance(random, 0.1) ? INT32_MAX : random_between(random, 1, 60);
            step->b = (int64_t)random_bits(random);
            break;
        case RF_COLUMN_VOCABULARY:
            step->b = random_chance(random, 0.2) ? N_VOCABULARY : random_between(random, 0, 20);
            step->a = random_between(random, 0, N_VOCABULARY - step->b);
            break;
        default:
            break;
        }
        source->n_steps++;
        call->written.n_steps++;
    }
}

static void draw_sources(randomness *random, columns_case *call) {
    call->written.n_sources = random_between(random, 1, MOST_SOURCES);
    for (int64_t s = 0; s < call->written.n_sources; s++) {
        rf_column_source *source = &call->sources[s];
        source->input = random_between(random, 0, call->params.n_inputs - 1);
        const rf_column_input *input = &call->inputs[source->input];
        if (input->width > 0) {
            source->width = random_chance(random, 0.6) ? 1 : random_between(random, 1, input->width);
            source->slot = random_between(random, 0, input->width - source->width);
        } else {
            source->slot = random_between(random, 0, input->features - 1);
        }
        /* The first source may result in floats, unless it is the only one. */
        draw_steps(random, call, source, input->type == RF_COLUMN_FLOAT32,
                   s == 0 && call->written.n_sources > 1);
    }
}

/* Pairs of values that a sample has, at most. */
static int64_t most_pairs(const columns_case *call, const rf_column_source *left,
                          const rf_column_source *right) {
    int64_t most = 0;
    for (int64_t sample = 0; sample < call->params.batch; sample++) {
        const int64_t pairs =
            columns_reference_values(call, left, sample) * columns_reference_values(call, right, sample);
        if (pairs > most) most = pairs;
    }
    return most;
}

static void draw_table(randomness *random, columns_case *call, rf_column *column, int64_t most_dim) {
    rf_buffer *buffer = &call->buffers[column->buffer];
    column->rows =
        random_between(random, random_chance(random, 0.03) ? 0 : 1, random_chance(random, 0.5) ? 8 : 60);
    column->dim = random_chance(random, 0.4)   ? 8
                  : random_chance(random, 0.1) ? random_between(random, 100, 300)
                                               : random_between(random, 1, most_dim);
    const int64_t left = buffer->numel < TABLE_BYTES / 4 ? TABLE_BYTES / 4 - buffer->numel : 0;
    if (column->rows * column->dim > left) column->rows = left / column->dim;
    column->weight_offset = buffer->numel + random_between(random, 0, 3);
    buffer->numel = column->weight_offset + column->rows * column->dim;
    column->n_dims = column->dim;
    if (random_chance(random, 0.2)) {
        column->first_dim = random_between(random, 0, column->dim);
        column->n_dims = random_between(random, 0, column->dim - column->first_dim);
    }
    column->pooling = random_between(random, RF_COLUMN_SUM, RF_COLUMN_SQRTN);
    column->invalid = RF_COLUMN_INVALID_DROPPED;
    if (random_chance(random, 0.1)) column->invalid = RF_COLUMN_INVALID_ERROR;
    if (column->rows > 0 && random_chance(random, 0.4))
        column->invalid = random_between(random, 0, column->rows - 1);
    column->empty = RF_COLUMN_EMPTY_FILL;
    if (column->rows > 0 && random_chance(random, 0.4))
        column->empty = random_between(random, 0, column->rows - 1);
    column->fill = random_chance(random, 0.6) ? 0 : float_as_bits(random_chance(random, 0.2) ? NAN : 2.5f);
    column->scale = float_as_bits(random_chance(random, 0.7) ? 1.0f : 0.75f);
}

static void draw_column(randomness *random, columns_case *call, rf_column *column, int64_t most_dim) {
    *column = (rf_column){.right = -1};
    column->left = random_between(random, 0, call->written.n_sources - 1);
    const rf_column_source *left = &call->sources[column->left];
    const rf_column_input *input = &call->inputs[left->input];
    if ((column->left == 0 || random_chance(random, 0.1)) && left->width > 0) { /* numeric */
        column->buffer = -1;
        column->n_dims = left->width;
        return;
    }
    if (column->left == 0) column->left = call->written.n_sources - 1; /* it may be of floats */
    left = &call->sources[column->left];
    input = &call->inputs[left->input];
    column->buffer = random_between(random, 0, call->params.n_buffers - 1);
    draw_table(random, call, column, most_dim);
    const int64_t right = random_between(random, 0, call->written.n_sources - 1);
    if (random_chance(random, 0.25) && (right > 0 || call->written.n_sources == 1) &&
        most_pairs(call, left, &call->sources[right]) <= MOST_BAG) {
        column->right = right;
        column->cross_buckets = random_between(random, 1, column->rows + 3);
        column->cross_seed = (int64_t)random_bits(random);
    } else if (left->width == 0 && (input->weights != NULL || input->lookups == 0) &&
               column->pooling != RF_COLUMN_MAX) {
        column->weighted = random_chance(random, 0.7);
    }
}

static void draw_columns(randomness *random, const columns_memory *memory, columns_case *call) {
    call->written.n_columns = random_chance(random, 0.02)
                                  ? 0
                                  : random_between(random, 1, random_chance(random, 0.3) ? MOST_COLUMNS : 8);
    const int64_t most_dim = call->written.n_columns < 3 && random_chance(random, 0.1) ? 5000 : 40;
    int64_t at = 0;
    for (int64_t c = 0; c < call->written.n_columns; c++) {
        draw_column(random, call, &call->columns[c], most_dim);
        call->columns[c].output_column = at;
        at += call->columns[c].n_dims;
    }
    call->params.output_dim = at;
    for (int64_t b = 0; b < call->params.n_buffers; b++) {
        rf_buffer *buffer = &call->buffers[b];
        void *data = place(random, &memory->tables[b], (size_t)buffer->numel * element_size(buffer->dtype));
        for (int64_t i = 0; i < buffer->numel; i++)
            element_set(data, i, buffer->dtype, random_normal(random));
        buffer->data = data;
    }
}

bool columns_draw(randomness *random, const columns_memory *memory, columns_case *call) {
    memset(call, 0, sizeof *call);
    rf_embedding_columns_params *params = &call->params;
    params->batch = random_chance(random, 0.05)
                        ? 0
                        : random_between(random, 1, random_chance(random, 0.2) ? MOST_BATCH : 20);
    params->check_bounds = random_chance(random, 0.8);
    params->n_inputs = random_between(random, 1, MOST_INPUTS);
    params->n_buffers = random_between(random, 1, MOST_TABLES);
    draw_arrays(random, call);
    for (int i = 0; i < params->n_inputs; i++) {
        rf_column_input *input = &call->inputs[i];
        input->type = (rf_column_type)random_between(random, RF_COLUMN_FLOAT32, RF_COLUMN_INT64);
        if (random_chance(random, 0.5)) {
            draw_dense(random, &memory->values[i], call, input);
        } else {
            draw_jagged(random, memory, i, call, input);
        }
    }
    const rf_dtype dtype = (rf_dtype)random_between(random, RF_FLOAT32, RF_BFLOAT16);
    const bool single = random_chance(random, 0.5);
    for (int64_t b = 0; b < params->n_buffers; b++) call->buffers[b].dtype = single ? RF_FLOAT32 : dtype;
    params->output_dtype = single || random_chance(random, 0.5) ? RF_FLOAT32 : dtype;
    draw_sources(random, call);
    draw_columns(random, memory, call);
    call->written.columns = call->columns;
    call->written.sources = call->sources;
    call->written.steps = call->steps;

    int64_t *program = NULL, words = 0;
    const rf_status status = rf_embedding_columns_program(&call->written, &program, &words);
    CHECK(status == RF_OK, "%s: %s", rf_status_text(status), rf_last_error());
    if (status != RF_OK) return false;
    int64_t *placed = region_at_end(&memory->program, (size_t)words * sizeof *placed);
    memcpy(placed, program, (size_t)words * sizeof *placed);
    rf_embedding_columns_program_free(program);
    params->program = placed;
    params->program_words = words;
    params->buffers = call->buffers;
    params->inputs = call->inputs;
    params->output_stride =
        params->output_dim + (random_chance(random, 0.3) ? random_between(random, 1, 9) : 0);
    const int64_t elements =
        params->batch > 0 ? (params->batch - 1) * params->output_stride + params->output_dim : 0;
    call->output_bytes = (size_t)elements * element_size(params->output_dtype);
    params->output = place(random, &memory->output, call->output_bytes);
    memset(params->output, UNWRITTEN, call->output_bytes);
    return true;
}
