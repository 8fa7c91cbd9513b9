/* The kernels of one instruction set. Each column_kernels_ISA.c defines RF__TABLE (the name of its table
 * of kernels) and includes this: plain loops that the compiler vectorises for the instruction set of the
 * file. */
#include <stddef.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "families/embedding_columns/cpu/columns.h"
#include "families/embedding_columns/device/column_values.h"

static void load_dense(const rf__column_source *source, int64_t from, int64_t count,
                       rf__column_values *values) {
    const rf_column_input *input = source->input;
    const int64_t width = source->width, sample_stride = input->sample_stride;
    int64_t sample = from / width, at = from - sample * width, next = sample_stride;
    int64_t element = sample * sample_stride + (source->slot + at) * input->value_stride;
#define LOAD(type, to)                                                            \
    {                                                                             \
        const type *data = input->values;                                         \
        if (width == 1) {                                                         \
            for (int64_t i = 0; i < count; i++) to[i] = data[element + i * next]; \
        } else {                                                                  \
            for (int64_t i = 0; i < count; i++) {                                 \
                to[i] = data[element];                                            \
                element += input->value_stride;                                   \
                if (++at < width) continue;                                       \
                at = 0;                                                           \
                element += sample_stride - width * input->value_stride;           \
            }                                                                     \
        }                                                                         \
    }
    if (input->type == RF_COLUMN_FLOAT32) {
        LOAD(float, values->floats)
    } else if (input->type == RF_COLUMN_INT32) {
        LOAD(int32_t, values->integers)
    } else {
        LOAD(int64_t, values->integers)
    }
#undef LOAD
}

static void load_jagged(const rf__column_source *source, int64_t from, int64_t count,
                        rf__column_values *values) {
    const rf_column_input *input = source->input;
    if (input->type == RF_COLUMN_FLOAT32) {
        memcpy(values->floats, (const float *)input->values + from, (size_t)count * sizeof(float));
    } else if (input->type == RF_COLUMN_INT32) {
        const int32_t *data = (const int32_t *)input->values + from;
        for (int64_t i = 0; i < count; i++) values->integers[i] = data[i];
    } else {
        memcpy(values->integers, (const int64_t *)input->values + from, (size_t)count * sizeof(int64_t));
    }
}

#define IS_BELOW(boundary, value) (right ? !((boundary) > (value)) : !((boundary) >= (value)))

/* All values go down one level of the search together: their loads overlap. */
static inline __attribute__((always_inline)) void search_boundaries(const float *restrict floats,
                                                                    int64_t count, const float *boundaries,
                                                                    int32_t n_boundaries, const bool right,
                                                                    int32_t *restrict position) {
    for (int64_t i = 0; i < count; i++) position[i] = 0;
    for (int32_t remaining = n_boundaries; remaining > 0; remaining -= (remaining + 1) / 2) {
        const int32_t half = (remaining + 1) / 2;
        for (int64_t i = 0; i < count; i++)
            position[i] += IS_BELOW(boundaries[position[i] + half - 1], floats[i]) ? half : 0;
    }
}

/* For equidistant boundaries a calculation leaves one boundary to compare. */
static inline __attribute__((always_inline)) void
calculate_boundaries(const float *restrict floats, int64_t count, const float *boundaries,
                     int32_t n_boundaries, float inverse, const bool right, int32_t *restrict position) {
    const float first = boundaries[0];
    for (int64_t i = 0; i < count; i++)
        position[i] = rf_column_nearest(floats[i], first, n_boundaries, inverse);
    for (int64_t i = 0; i < count; i++) position[i] += IS_BELOW(boundaries[position[i]], floats[i]);
}

static inline __attribute__((always_inline)) void bucketize(const rf__column_source *source,
                                                            const rf_columns_step *step, const bool right,
                                                            int64_t count, rf__column_values *values) {
    const float *boundaries = source->boundaries + step->a;
    int32_t position[RF__COLUMN_VALUES];
    if (step->b == 0) {
        search_boundaries(values->floats, count, boundaries, step->count, right, position);
    } else {
        calculate_boundaries(values->floats, count, boundaries, step->count, rf__columns_float(step->b),
                             right, position);
    }
    for (int64_t i = 0; i < count; i++) values->integers[i] = position[i];
}

/* As search_boundaries; words [n_words] are followed by their positions. */
static void search_words(int64_t *restrict integers, int64_t count, const int64_t *words, int64_t n_words) {
    int64_t position[RF__COLUMN_VALUES] = {0};
    for (int64_t remaining = n_words; remaining > 1; remaining -= remaining / 2) {
        const int64_t half = remaining / 2;
        for (int64_t i = 0; i < count; i++)
            position[i] += words[position[i] + half] <= integers[i] ? half : 0;
    }
    for (int64_t i = 0; i < count; i++)
        integers[i] = n_words > 0 && words[position[i]] == integers[i] ? words[n_words + position[i]] : -1;
}

static void to_floats(int64_t count, rf__column_values *values) {
    if (values->is_float) return;
    for (int64_t i = 0; i < count; i++) values->floats[i] = (float)values->integers[i];
    values->is_float = true;
}

static void apply(const rf__column_source *source, const rf_columns_step *step, int64_t count,
                  rf__column_values *values) {
    float *restrict floats = values->floats;
    int64_t *restrict integers = values->integers;
    const int64_t a = step->a, b = step->b;
    const float low = rf__columns_float(a), high = rf__columns_float(b);
#define FOR_EACH_VALUE(to, value)                   \
    for (int64_t i = 0; i < count; i++) to = value; \
    break
    switch ((rf_column_operation)step->operation) {
    case RF_COLUMN_AFFINE:
        to_floats(count, values);
        FOR_EACH_VALUE(floats[i], rf_column_affine(floats[i], low, high));
    case RF_COLUMN_LOG1P:
        to_floats(count, values);
        FOR_EACH_VALUE(floats[i], rf_column_log1p(floats[i]));
    case RF_COLUMN_CLIP:
        to_floats(count, values);
        FOR_EACH_VALUE(floats[i], rf_column_clip(floats[i], low, high));
    case RF_COLUMN_CAST:
        if (!values->is_float) break;
        values->is_float = false;
        FOR_EACH_VALUE(integers[i], rf_column_cast(floats[i]));
    case RF_COLUMN_CLIP_INTEGER:
        FOR_EACH_VALUE(integers[i], rf_column_clip_integer(integers[i], a, b));
    case RF_COLUMN_MODULO:
        FOR_EACH_VALUE(integers[i], rf_column_modulo(integers[i], a));
    case RF_COLUMN_BUCKETIZE:
        to_floats(count, values);
        values->is_float = false;
        bucketize(source, step, false, count, values);
        break;
    case RF_COLUMN_BUCKETIZE_RIGHT:
        to_floats(count, values);
        values->is_float = false;
        bucketize(source, step, true, count, values);
        break;
    case RF_COLUMN_HASH:
        FOR_EACH_VALUE(integers[i], (int64_t)rf_column_high(rf_column_hash(integers[i], (uint64_t)b),
                                                            (uint64_t)step->count));
    case RF_COLUMN_VOCABULARY:
        search_words(integers, count, source->vocabulary + a, step->count);
        break;
    }
#undef FOR_EACH_VALUE
}

static void read_values(const rf__column_source *source, int64_t from, int64_t count,
                        rf__column_values *values) {
    values->is_float = source->input->type == RF_COLUMN_FLOAT32;
    if (source->width > 0) {
        load_dense(source, from, count, values);
    } else {
        load_jagged(source, from, count, values);
    }
    for (int64_t s = 0; s < source->n_steps; s++) apply(source, &source->steps[s], count, values);
}

static void cross_values(const int64_t *left, const int64_t *right, int64_t count, uint64_t seed,
                         int64_t buckets, int64_t *indices) {
    for (int64_t i = 0; i < count; i++)
        indices[i] = (int64_t)rf_column_high(rf_column_hash_pair(left[i], right[i], seed), (uint64_t)buckets);
}

static bool find_rows(const int64_t *indices, int64_t count, uint64_t limit, const char *base, int64_t pitch,
                      const char *otherwise, const char **rows) {
    bool good = true;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t index = (uint64_t)indices[i];
        const bool is_row = index < limit;
        rows[i] = is_row ? base + index * (uint64_t)pitch : otherwise;
        good &= is_row;
    }
    return good;
}

static inline __attribute__((always_inline)) void copy_each(const rf__column_copy *copy,
                                                            const int64_t bytes) {
    for (int64_t s = 0; s < copy->samples; s++) {
        char *to = copy->output + s * copy->output_pitch;
        const char *const *from = copy->rows + s;
        for (int64_t c = 0; c < copy->columns; c++)
            memcpy(to + c * bytes, from[c * copy->pitch], (size_t)bytes);
    }
}

/* Stores past the caches: lines that are completely written need not be read first. False: not supported
 * here. */
static bool stream_rows(const rf__column_copy *copy) {
#ifdef __AVX__
#define STREAM(to, from) _mm256_stream_si256((__m256i *)(to), _mm256_loadu_si256((const __m256i *)(from)))
    enum { VECTOR = sizeof(__m256i) };
#elif defined(__SSE2__)
#define STREAM(to, from) _mm_stream_si128((__m128i *)(to), _mm_loadu_si128((const __m128i *)(from)))
    enum { VECTOR = sizeof(__m128i) };
#endif
#ifdef STREAM
    if (((uintptr_t)copy->output | (uintptr_t)copy->output_pitch | (uintptr_t)copy->bytes) % VECTOR != 0)
        return false;
    for (int64_t s = 0; s < copy->samples; s++) {
        char *to = copy->output + s * copy->output_pitch;
        for (int64_t c = 0; c < copy->columns; c++) {
            const char *from = copy->rows[c * copy->pitch + s];
            for (int64_t at = 0; at < copy->bytes; at += VECTOR, to += VECTOR) STREAM(to, from + at);
        }
    }
    _mm_sfence();
#undef STREAM
    return true;
#else
    (void)copy;
    return false;
#endif
}

static void copy_rows(const rf__column_copy *copy) {
#define OF_WIDTH(width)         \
    case width:                 \
        copy_each(copy, width); \
        break;
    if (copy->stream && stream_rows(copy)) return;
    switch (copy->bytes) {
        OF_WIDTH(4)
        OF_WIDTH(8)
        OF_WIDTH(16)
        OF_WIDTH(32)
        OF_WIDTH(64)
        OF_WIDTH(128)
        OF_WIDTH(256)
    default:
        copy_each(copy, copy->bytes);
    }
#undef OF_WIDTH
}

const rf__column_kernels RF__TABLE = {
    .values = read_values, .cross = cross_values, .rows = find_rows, .copy = copy_rows};
