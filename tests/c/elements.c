/* Elements of every dtype as doubles, written from the definition of the binary formats. */
#include <math.h>
#include <string.h>

#include "check.h"

/* A binary format of 16 bits: sign, exponent, mantissa. */
typedef struct format16 {
    int exponent_bits, mantissa_bits;
} format16;

static const format16 float16 = {5, 10}, bfloat16 = {8, 7};

static int format_bias(format16 format) { return (1 << (format.exponent_bits - 1)) - 1; }

static uint16_t format_encode(format16 format, double value) {
    const int bias = format_bias(format), mantissa = format.mantissa_bits;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const uint16_t infinity = (uint16_t)(((1 << format.exponent_bits) - 1) << mantissa);
    if (isnan(value)) return (uint16_t)(infinity | 1 << (mantissa - 1));
    if (isinf(value)) return sign | infinity;
    int exponent;
    frexp(value, &exponent);
    exponent -= 1;
    if (value == 0 || exponent < 1 - bias) exponent = 1 - bias; /* subnormal: the smallest exponent */
    const double units = nearbyint(ldexp(fabs(value), mantissa - exponent));
    /* The leading 1, if any, and a carry out of the mantissa add to the exponent. */
    const double bits = ldexp(exponent + bias - 1, mantissa) + units;
    return sign | (bits < infinity ? (uint16_t)bits : infinity);
}

static double format_decode(format16 format, uint16_t bits) {
    const int mask = (1 << format.exponent_bits) - 1, exponent = bits >> format.mantissa_bits & mask;
    const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == mask) return mantissa ? NAN : sign * INFINITY;
    const int leading = exponent ? 1 << format.mantissa_bits : 0;
    const int scale = (exponent ? exponent : 1) - format_bias(format) - format.mantissa_bits;
    return sign * ldexp(mantissa + leading, scale);
}

size_t element_size(rf_dtype dtype) { return dtype == RF_FLOAT64 ? 8 : dtype == RF_FLOAT32 ? 4 : 2; }

const char *dtype_name(rf_dtype dtype) {
    static const char *const names[] = {"float32", "float16", "bfloat16", "float64"};
    return names[dtype];
}

uint32_t element_bits(const void *data, int64_t at, rf_dtype dtype) {
    const unsigned char *from = (const unsigned char *)data + at * (int64_t)element_size(dtype);
    uint32_t word;
    uint16_t half;
    if (dtype == RF_FLOAT32) return memcpy(&word, from, sizeof word), word;
    return memcpy(&half, from, sizeof half), half;
}

double element_get(const void *data, int64_t at, rf_dtype dtype) {
    float single;
    double wide;
    if (dtype == RF_FLOAT64) return memcpy(&wide, (const char *)data + at * 8, sizeof wide), wide;
    const uint32_t bits = element_bits(data, at, dtype);
    if (dtype == RF_FLOAT32) return memcpy(&single, &bits, sizeof single), single;
    return format_decode(dtype == RF_FLOAT16 ? float16 : bfloat16, (uint16_t)bits);
}

void element_set(void *data, int64_t at, rf_dtype dtype, double value) {
    unsigned char *to = (unsigned char *)data + at * (int64_t)element_size(dtype);
    if (dtype == RF_FLOAT64) {
        memcpy(to, &value, sizeof value);
    } else if (dtype == RF_FLOAT32) {
        const float single = (float)value;
        memcpy(to, &single, sizeof single);
    } else {
        const uint16_t half = format_encode(dtype == RF_FLOAT16 ? float16 : bfloat16, value);
        memcpy(to, &half, sizeof half);
    }
}

size_t integer_size(rf_int_type type) { return type == RF_INT32 ? sizeof(int32_t) : sizeof(int64_t); }

int64_t integer_get(const void *data, int64_t at, rf_int_type type) {
    return type == RF_INT32 ? ((const int32_t *)data)[at] : ((const int64_t *)data)[at];
}

void integer_set(void *data, int64_t at, rf_int_type type, int64_t value) {
    if (type == RF_INT32)
        ((int32_t *)data)[at] = (int32_t)value;
    else
        ((int64_t *)data)[at] = value;
}
