/* What becomes of the sum of a row's gradients, four columns at a time: a gradient that is written, or a step of an
 * optimizer on the row. Weight and state are read apart from the step, so that they can be asked for early.
 *
 * A row's columns are shared by a group of lanes. Steps (semantics: recfuse.h, rf_optimizer):
 *     rf_emit_ahead_t ahead; rf_emit_load(matrix, row, column, valid, ahead);
 *     rf_emit_gradient(numbers, ahead, sums);   sum -> gradient: scaled, with weight decay
 *     row-wise Adagrad: its factor from the group's sum of squares, rf_emit_row_factor
 *     rf_emit_store(...)
 * RF_EMIT: RF_EMIT_GRADIENT, or an optimizer's number + 1; RF_WEIGHT_DTYPE: of the weight, or of the gradient; RF_ROUND: 1:
 * half tables are rounded stochastically; RF_ALIGNED: dims are multiples of four and rows aligned to four columns.
 */
#ifndef RECFUSE_CUDA_BACKWARD_EMIT_CUH
#define RECFUSE_CUDA_BACKWARD_EMIT_CUH

#include "device/common.cuh"
#include "device/rounding.h"
#include "fused_embedding_bag/backward/args.h"

#ifndef RF_EMIT
#define RF_EMIT (RF_SGD + 1)
#endif
#ifndef RF_WEIGHT_DTYPE
#define RF_WEIGHT_DTYPE RF_FLOAT32
#endif
#ifndef RF_ROUND
#define RF_ROUND 0
#endif
#ifndef RF_ALIGNED
#define RF_ALIGNED 1
#endif

enum {
    EMIT_STATES = RF_EMIT == RF_ADAGRAD + 1 ? 1
                  : RF_EMIT == RF_ADAM + 1  ? 2
                                            : 0, /* of a row's columns */
    EMIT_ROWWISE = RF_EMIT == RF_ROWWISE_ADAGRAD + 1,
    EMIT_READS = RF_EMIT != RF_EMIT_GRADIENT,
    WEIGHT_BYTES = rf_element<RF_WEIGHT_DTYPE>::BYTES
};

/* Four columns. */
struct four_t {
    float of[4];
};

/* Rows are read and written once: they are to leave the caches before gradients do. */
RF_INLINE rf_bytes<16> streamed_load(const rf_bytes<16> *from) {
    const uint4 found = __ldcs((const uint4 *)from);
    return {{found.x, found.y, found.z, found.w}};
}
RF_INLINE rf_bytes<8> streamed_load(const rf_bytes<8> *from) {
    const uint2 found = __ldcs((const uint2 *)from);
    return {{found.x, found.y}};
}
RF_INLINE void streamed_store(rf_bytes<16> *to, const rf_bytes<16> &from) {
    __stcs((uint4 *)to, make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]));
}
RF_INLINE void streamed_store(rf_bytes<8> *to, const rf_bytes<8> &from) {
    __stcs((uint2 *)to, make_uint2(from.word[0], from.word[1]));
}

/* Four columns at `from`, of which `valid` are there; others are 0. Tables change while a kernel runs, gradients do not:
 * those may come through the cache for constant data. */
template <int DTYPE, bool CONSTANT> RF_INLINE four_t four_load(const rf_u8 *from, int valid) {
    four_t to = {};
    enum { BYTES = rf_element<DTYPE>::BYTES };
#if RF_ALIGNED
    if (valid > 0) {
        typedef rf_bytes<4 * BYTES> vector_t;
        const vector_t found =
            CONSTANT ? rf_load((const vector_t *)from) : streamed_load((const vector_t *)from);
#pragma unroll
        for (int i = 0; i < 4; i++) to.of[i] = rf_element<DTYPE>::get(found, i);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < valid) to.of[i] = rf_element<DTYPE>::get(*(const rf_bytes<BYTES> *)(from + i * BYTES), 0);
#endif
    return to;
}

template <int DTYPE> RF_INLINE void four_store(rf_u8 *to, const four_t &from, int valid) {
    enum { BYTES = rf_element<DTYPE>::BYTES };
#if RF_ALIGNED
    if (valid > 0) {
        rf_bytes<4 * BYTES> found;
#pragma unroll
        for (int i = 0; i < 4; i++) rf_element<DTYPE>::set(found, i, from.of[i]);
        streamed_store((rf_bytes<4 * BYTES> *)to, found);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        rf_bytes<BYTES> found;
        rf_element<DTYPE>::set(found, 0, from.of[i]);
        if (i < valid) *(rf_bytes<BYTES> *)(to + i * BYTES) = found;
    }
#endif
}

/* What all rows of a launch have in common. */
struct rf_emit_t {
    float lr, decay, eps, beta1, beta2, scale;
    float step_size; /* of Adam, with its bias corrections */
    float step;
    rf_u64 seed;
    bool skip;
};

RF_INLINE rf_emit_t rf_emit_of(const rf_emit_args &args) {
    rf_emit_t emit = {};
    if (!EMIT_READS) return emit;
    const float *numbers = args.numbers;
    emit.lr = rf_load(numbers + RF_UPDATE_LR);
    emit.decay = rf_load(numbers + RF_UPDATE_WEIGHT_DECAY);
    emit.eps = rf_load(numbers + RF_UPDATE_EPS);
    emit.scale = rf_load(numbers + RF_UPDATE_GRAD_SCALE);
    emit.skip = rf_load(numbers + RF_UPDATE_SKIP) != 0.0f;
    emit.step = rf_load(numbers + RF_UPDATE_STEP);
    emit.seed = args.seed;
    if (RF_EMIT == RF_ADAM + 1) {
        emit.beta1 = rf_load(numbers + RF_UPDATE_BETA1);
        emit.beta2 = rf_load(numbers + RF_UPDATE_BETA2);
        emit.step_size =
            emit.lr * sqrtf(1.0f - powf(emit.beta2, emit.step)) / (1.0f - powf(emit.beta1, emit.step));
    }
    return emit;
}

/* Of four columns of a row, read ahead. */
struct rf_emit_ahead_t {
    four_t weight;
    four_t states[EMIT_STATES > 0 ? EMIT_STATES : 1];
};

/* Where four columns are: of a weight in bytes, of a state in elements. */
RF_INLINE rf_i64 rf_emit_element(const rf_backward_matrix &matrix, rf_i64 row, int column) {
    return row * matrix.dim + column;
}

RF_INLINE void rf_emit_load_at(const rf_backward_matrix &matrix, rf_i64 element, int valid,
                               rf_emit_ahead_t &ahead) {
    if (!EMIT_READS) return;
    ahead.weight = four_load<RF_WEIGHT_DTYPE, false>(matrix.weight + element * WEIGHT_BYTES, valid);
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++)
        ahead.states[i] = four_load<RF_FLOAT32, false>((const rf_u8 *)(matrix.states[i] + element), valid);
}

RF_INLINE void rf_emit_load(const rf_backward_matrix &matrix, rf_i64 row, int column, int valid,
                            rf_emit_ahead_t &ahead) {
    rf_emit_load_at(matrix, rf_emit_element(matrix, row, column), valid, ahead);
}

/* Sums become gradients; returns the sum of their squares. */
RF_INLINE float rf_emit_gradient(const rf_emit_t &emit, const rf_emit_ahead_t &ahead, int valid,
                                 four_t &sums) {
    float squares = 0;
    if (!EMIT_READS) return 0;
    /* Without decay a weight that is not finite has no part in it. */
    if (emit.decay != 0.0f) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums.of[i] = fmaf(sums.of[i], emit.scale, emit.decay * ahead.weight.of[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) sums.of[i] *= emit.scale;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < valid) squares += sums.of[i] * sums.of[i];
    return squares;
}

/* The step of row-wise Adagrad for one row; `squares`: of all its columns. One lane of the row's writes. */
RF_INLINE float rf_emit_row_factor(const rf_emit_t &emit, const rf_backward_matrix &matrix, rf_i64 row,
                                   float before, float squares, bool writes) {
    const float sum = before + squares / (float)matrix.dim;
    if (writes) matrix.states[0][row] = sum;
    return emit.lr / (sqrtf(sum) + emit.eps);
}

/* Writes four columns, where `element` is: `factor` of row-wise Adagrad. */
RF_INLINE void rf_emit_store_at(const rf_emit_t &emit, const rf_backward_matrix &matrix, rf_i64 element,
                                rf_i64 row, int column, int valid, rf_emit_ahead_t &ahead,
                                const four_t &gradient, float factor) {
    four_t result = gradient;
#pragma unroll
    for (int i = 0; i < 4 && EMIT_READS; i++) {
        const float g = gradient.of[i], w = ahead.weight.of[i];
        float &first = ahead.states[0].of[i];
        if (RF_EMIT == RF_SGD + 1) result.of[i] = w - emit.lr * g;
        if (EMIT_ROWWISE) result.of[i] = w - factor * g;
        if (RF_EMIT == RF_ADAGRAD + 1) {
            first += g * g;
            result.of[i] = w - emit.lr * g / (sqrtf(first) + emit.eps);
        }
        if (RF_EMIT == RF_ADAM + 1) {
            float &second = ahead.states[EMIT_STATES > 1].of[i];
            first += (1.0f - emit.beta1) * (g - first);
            second += (1.0f - emit.beta2) * (g * g - second);
            result.of[i] = w - emit.step_size * first / (sqrtf(second) + emit.eps);
        }
    }
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++)
        four_store<RF_FLOAT32>((rf_u8 *)(matrix.states[i] + element), ahead.states[i], valid);
    rf_u8 *to = matrix.weight + element * WEIGHT_BYTES;
#if RF_ROUND
    rf_u16 *halves = (rf_u16 *)to;
    const rf_u64 of_row = rf_rounding_row(emit.seed, emit.step, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const rf_u32 bits = rf_rounding_bits(of_row, (rf_u32)(column + i));
        const rf_u16 rounded = RF_WEIGHT_DTYPE == RF_FLOAT16 ? rf_round_f16(result.of[i], bits)
                                                             : rf_round_bf16(result.of[i], bits);
        if (i < valid) halves[i] = rounded;
    }
#else
    four_store<RF_WEIGHT_DTYPE>(to, result, valid);
#endif
}

RF_INLINE void rf_emit_store(const rf_emit_t &emit, const rf_backward_matrix &matrix, rf_i64 row, int column,
                             int valid, rf_emit_ahead_t &ahead, const four_t &gradient, float factor) {
    rf_emit_store_at(emit, matrix, rf_emit_element(matrix, row, column), row, column, valid, ahead, gradient,
                     factor);
}

#endif
