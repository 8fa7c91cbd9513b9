/* The values of a source in registers, and the steps that convert them. */
#ifndef RECFUSE_COLUMNS_STEPS_CUH
#define RECFUSE_COLUMNS_STEPS_CUH

#include "families/embedding_columns/columns_work.cuh"

/* The values of a source: value i is at `first` + i * `stride` bytes. The index i counts samples, bags or the
 * whole batch. */
struct rf_column_array {
    const rf_u8 *first;
    rf_i64 stride;
    int type;
};

RF_INLINE int rf_column_bytes(int type) { return type == RF_COLUMN_INT64 ? 8 : 4; }

/* N values during the steps of their source. Either all are floats or all are integers. */
template <int N> struct rf_column_values {
    rf_i64 integer[N]; /* an integer, or the bits of a float */

    RF_INLINE float number(int i) const { return __uint_as_float((rf_u32)integer[i]); }
    RF_INLINE void set(int i, float value) { integer[i] = (rf_i64)__float_as_uint(value); }
    /* Returns the value with a number that is unknown at compile time, by selects: registers have no
     * addresses. */
    RF_INLINE rf_i64 of(int number) const {
        rf_i64 selected = integer[0];
#pragma unroll
        for (int i = 1; i < N; i++)
            if (i == number) selected = integer[i];
        return selected;
    }
    /* Loads the values at[i] of a source. */
    RF_INLINE void load(const rf_column_array &array, const rf_i64 (&at)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const rf_u8 *from = array.first + at[i] * array.stride;
            integer[i] = array.type == RF_COLUMN_INT64 ? rf_load((const rf_i64 *)from)
                                                       : (rf_i64)rf_load((const int *)from);
        }
    }
};

/* Computes for N values the number of the `count` ascending boundaries that are less than each; `right`: not
 * greater. All N values share the search steps. */
template <int N>
RF_INLINE void rf_column_search(rf_column_values<N> &values, const float *boundaries, int count, bool right) {
    int selected[N] = {};
    for (int step = count > 0 ? 1 << (31 - __clz(count)) : 0; step > 0; step >>= 1) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int next = selected[i] + step;
            const float boundary = boundaries[min(next, count) - 1], value = values.number(i);
            const bool is_below = right ? !(boundary > value) : !(boundary >= value);
            if (next <= count && is_below) selected[i] = next;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) values.integer[i] = selected[i];
}

template <int N>
RF_INLINE void rf_column_buckets(rf_column_values<N> &values, const float *boundaries,
                                 const rf_columns_step &step) {
    const bool right = step.operation == RF_COLUMN_BUCKETIZE_RIGHT;
    const float inverse = __uint_as_float((rf_u32)step.b);
    if (inverse == 0.0f) return rf_column_search(values, boundaries, step.count, right);
#pragma unroll
    for (int i = 0; i < N; i++)
        values.integer[i] = rf_column_bucket_even(values.number(i), boundaries, step.count, inverse, right);
}

/* A call, because the inlined code for long words would take registers from all other code. */
static __device__ __noinline__ rf_i64 rf_column_word_noinline(rf_i64 value, const rf_i64 *words, int count) {
    return rf_column_word(value, words, words + count, count);
}
static __device__ __noinline__ float rf_column_log1p_noinline(float value) { return rf_column_log1p(value); }
static __device__ __noinline__ rf_i64 rf_column_modulo_noinline(rf_i64 value, rf_i64 divisor) {
    return rf_column_modulo(value, divisor);
}

/* Applies the steps of a source to its values. Returns true if the results are floats. */
template <int N>
RF_INLINE bool rf_column_steps(const rf_columns_args &args, const rf_column_work &work,
                               const rf_columns_source &source, int type, rf_column_values<N> &values) {
    bool floats = type == RF_COLUMN_FLOAT32;
#pragma unroll 1
    for (int k = 0; k < source.n_steps; k++) {
        const rf_columns_step &step = work.step(source.first_step + k);
        const int operation = step.operation;
        const bool of_floats = operation <= RF_COLUMN_CAST || operation == RF_COLUMN_BUCKETIZE ||
                               operation == RF_COLUMN_BUCKETIZE_RIGHT;
        if (of_floats && !floats) {
            if (operation == RF_COLUMN_CAST) continue;
#pragma unroll
            for (int i = 0; i < N; i++) values.set(i, (float)values.integer[i]);
        }
        floats = operation <= RF_COLUMN_CLIP;
        const float a = __uint_as_float((rf_u32)step.a), b = __uint_as_float((rf_u32)step.b);
#define RF_EACH(expression)                                   \
    _Pragma("unroll") for (int i = 0; i < N; i++) expression; \
    break
        switch (operation) {
        case RF_COLUMN_AFFINE:
            RF_EACH(values.set(i, rf_column_affine(values.number(i), a, b)));
        case RF_COLUMN_LOG1P:
            RF_EACH(values.set(i, rf_column_log1p_noinline(values.number(i))));
        case RF_COLUMN_CLIP:
            RF_EACH(values.set(i, rf_column_clip(values.number(i), a, b)));
        case RF_COLUMN_CAST:
            RF_EACH(values.integer[i] = rf_column_cast(values.number(i)));
        case RF_COLUMN_CLIP_INTEGER:
            RF_EACH(values.integer[i] = rf_column_clip_integer(values.integer[i], step.a, step.b));
        case RF_COLUMN_MODULO:
            RF_EACH(values.integer[i] = rf_column_modulo_noinline(values.integer[i], step.a));
        case RF_COLUMN_HASH:
            RF_EACH(values.integer[i] = (rf_i64)rf_column_high(
                        rf_column_hash(values.integer[i], (rf_u64)step.b), (rf_u64)step.count));
        case RF_COLUMN_VOCABULARY: {
            const rf_i64 *words =
                step.a >= 0 ? (const rf_i64 *)(work.body() + step.a) : args.vocabulary + ~step.a;
            RF_EACH(values.integer[i] = rf_column_word_noinline(values.integer[i], words, step.count));
        }
        default: /* one of the two steps that find buckets */
            if (step.a >= 0)
                rf_column_buckets(values, (const float *)(work.body() + step.a), step);
            else
                rf_column_buckets(values, args.boundaries + ~step.a, step);
        }
#undef RF_EACH
    }
    return floats;
}

#endif
