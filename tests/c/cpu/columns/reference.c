/* The specification of embedding columns, value by value. */
#include <math.h>
#include <string.h>

#include "columns.h"

typedef struct value {
    bool is_float;
    float real;
    int64_t integer;
} value;

float bits_as_float(int64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float real;
    memcpy(&real, &low, sizeof real);
    return real;
}

int64_t float_as_bits(float real) {
    uint32_t bits;
    memcpy(&bits, &real, sizeof bits);
    return bits;
}

static float as_float(value v) { return v.is_float ? v.real : (float)v.integer; }

static int64_t bucket(const columns_case *call, const rf_column_step *step, float real, bool right) {
    int64_t count = 0;
    if (isnan(real)) return step->b;
    for (int64_t i = 0; i < step->b; i++) {
        const float boundary = call->boundaries[step->a + i];
        count += right ? boundary <= real : boundary < real;
    }
    return count;
}

static int64_t to_integer(float real) {
    if (isnan(real) || real < -0x1p63f) return INT64_MIN;
    return real >= 0x1p63f ? INT64_MAX : (int64_t)truncf(real);
}

static int64_t of_buckets(uint64_t hash, int64_t buckets) {
    const uint64_t n = (uint64_t)buckets, high = hash >> 32, low = hash & 0xffffffffu;
    return (int64_t)((high * n + (low * n >> 32)) >> 32);
}

static value stepped(const columns_case *call, const rf_column_step *step, value v) {
    const float a = bits_as_float(step->a), b = bits_as_float(step->b), real = as_float(v);
    value to = {0};
    int64_t place;
    switch ((rf_column_operation)step->operation) {
    case RF_COLUMN_AFFINE: {
        volatile float product = real * a; /* rounded before the sum */
        return (value){true, product + b, 0};
    }
    case RF_COLUMN_LOG1P:
        return (value){true, (float)log1p((double)real), 0};
    case RF_COLUMN_CLIP:
        to = (value){true, real, 0};
        if (to.real < a) to.real = a;
        if (to.real > b) to.real = b;
        return to;
    case RF_COLUMN_CAST:
        return v.is_float ? (value){false, 0, to_integer(v.real)} : v;
    case RF_COLUMN_CLIP_INTEGER:
        to.integer = v.integer < step->a ? step->a : v.integer;
        if (to.integer > step->b) to.integer = step->b;
        return to;
    case RF_COLUMN_MODULO:
        to.integer = v.integer % step->a;
        if (to.integer < 0) to.integer += step->a;
        return to;
    case RF_COLUMN_BUCKETIZE:
        return (value){false, 0, bucket(call, step, real, false)};
    case RF_COLUMN_BUCKETIZE_RIGHT:
        return (value){false, 0, bucket(call, step, real, true)};
    case RF_COLUMN_HASH:
        to.integer = of_buckets(rf_hash_integer(v.integer, (uint64_t)step->b), step->a);
        return to;
    case RF_COLUMN_VOCABULARY:
        for (place = 0; place < step->b && call->vocabulary[step->a + place] != v.integer; place++) {
        }
        to.integer = place < step->b ? place : -1;
        return to;
    }
    return v;
}

/* Value `at` of a source's bag in the input. */
static value prepared(const columns_case *call, const rf_column_source *source, int64_t sample, int64_t at) {
    const rf_column_input *input = &call->inputs[source->input];
    const int64_t element =
        source->width > 0
            ? sample * input->sample_stride + (source->slot + at) * input->value_stride
            : integer_get(input->offsets, source->slot * call->params.batch + sample, input->offset_type) +
                  at;
    value v = {.is_float = input->type == RF_COLUMN_FLOAT32};
    if (v.is_float) {
        v.real = (float)element_get(input->values, element, RF_FLOAT32);
    } else {
        v.integer = integer_get(input->values, element, input->type == RF_COLUMN_INT32 ? RF_INT32 : RF_INT64);
    }
    for (int64_t s = 0; s < source->n_steps; s++) v = stepped(call, &call->steps[source->first_step + s], v);
    return v;
}

int64_t columns_reference_values(const columns_case *call, const rf_column_source *source, int64_t sample) {
    if (source->width > 0) return source->width;
    const rf_column_input *input = &call->inputs[source->input];
    const int64_t at = source->slot * call->params.batch + sample;
    return integer_get(input->offsets, at + 1, input->offset_type) -
           integer_get(input->offsets, at, input->offset_type);
}

static double weight_of(const columns_case *call, const rf_column *column, int64_t sample, int64_t at) {
    const rf_column_source *source = &call->sources[column->left];
    const rf_column_input *input = &call->inputs[source->input];
    if (!column->weighted) return 1;
    return (double)input->weights[integer_get(input->offsets, source->slot * call->params.batch + sample,
                                              input->offset_type) +
                                  at];
}

void columns_reference_bag(const columns_case *call, int64_t number, int64_t sample, columns_bag *bag,
                           columns_offence *offence) {
    const rf_column *column = &call->columns[number];
    const rf_column_source *left = &call->sources[column->left];
    const rf_column_source *right = column->right < 0 ? NULL : &call->sources[column->right];
    const int64_t count = columns_reference_values(call, left, sample),
                  others = right ? columns_reference_values(call, right, sample) : 1;
    bag->count = 0;
    for (int64_t pair = 0; pair < count * others; pair++) {
        int64_t index = prepared(call, left, sample, pair / others).integer;
        if (right)
            index = of_buckets(rf_hash_integers(index, prepared(call, right, sample, pair % others).integer,
                                                (uint64_t)column->cross_seed),
                               column->cross_buckets);
        if (index < 0 || index >= column->rows) {
            const bool is_error = column->invalid == RF_COLUMN_INVALID_ERROR && call->params.check_bounds;
            if (is_error && !offence->found) *offence = (columns_offence){true, number, sample, pair, index};
            if (column->invalid < 0) continue;
            index = column->invalid;
        }
        bag->weights[bag->count] = weight_of(call, column, sample, pair);
        bag->rows[bag->count++] = index;
    }
}

double columns_reference_divisor(const rf_column *column, const columns_bag *bag) {
    double weights = 0, squares = 0;
    for (int64_t i = 0; i < bag->count; i++) {
        weights += bag->weights[i];
        squares += bag->weights[i] * bag->weights[i];
    }
    if (column->pooling == RF_COLUMN_MEAN) return weights;
    return column->pooling == RF_COLUMN_SQRTN ? sqrt(squares) : 1;
}

float columns_reference_number(const columns_case *call, const rf_column_source *source, int64_t sample,
                               int64_t k) {
    return as_float(prepared(call, source, sample, k));
}
