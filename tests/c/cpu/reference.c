/* Plain loops over the definition, independent of the kernels. */
#include "reference.h"

#include <math.h>

/* An output column: its value, and the sum of magnitudes, which bounds the error of a float32 sum. */
typedef struct column {
    double value, magnitude;
    int64_t count;
} column;

static column reference_column(const table *from, const bag *of, int64_t at) {
    column pooled = {0, 0, 0};
    for (int64_t i = of->from; i < of->to; i++) {
        const int64_t row = integer_get(of->indices, i, of->index_type);
        if (row == from->padding_idx) continue;
        double value = element_get(from->data, row * from->stride + at, from->dtype);
        if (of->sample_weights) value *= of->sample_weights[i];
        if (from->pooling == RF_MAX) {
            if (pooled.count == 0 || value > pooled.value) pooled.value = value;
        } else {
            pooled.value += value;
            pooled.magnitude += fabs(value);
        }
        pooled.count++;
    }
    if (from->pooling == RF_MEAN && pooled.count > 0) {
        pooled.value /= (double)pooled.count;
        pooled.magnitude /= (double)pooled.count;
    }
    return pooled;
}

/* Half a unit in the last place of `value`, and of the smallest number, in a dtype. */
static double rounding_error(double value, rf_dtype dtype) {
    if (dtype == RF_FLOAT32) return fabs(value) * 0x1p-24 + 0x1p-150;
    if (dtype == RF_FLOAT16) return fabs(value) * 0x1p-11 + 0x1p-25;
    return fabs(value) * 0x1p-8 + 0x1p-134;
}

void reference_check_bag(const table *from, const bag *of, const void *output, rf_dtype output_dtype,
                         const char *label) {
    for (int64_t at = 0; at < from->dim; at++) {
        const column want = reference_column(from, of, at);
        const double got = element_get(output, at, output_dtype);
        bool same;
        if (isnan(want.value)) {
            same = isnan(got);
        } else if (isinf(want.value) || from->pooling == RF_MAX || want.count == 0) {
            same = got == want.value; /* nothing is rounded, so nothing may differ */
        } else {
            /* Every product, sum and the division round once in float32, the result once in its dtype. */
            const double sums = ((double)want.count + 2) * (want.magnitude * 0x1p-24 + 0x1p-149);
            same = fabs(got - want.value) <= sums * 1.01 + rounding_error(want.value, output_dtype);
        }
        CHECK(same, "%s: column %lld of %lld, %s table, pooling %d, %lld lookups: %.9g, not %.9g", label,
              (long long)at, (long long)from->dim, dtype_name(from->dtype), (int)from->pooling,
              (long long)(of->to - of->from), got, want.value);
        if (!same) return; /* one column per bag suffices */
    }
}
