/* Epilogue of a row's summed gradient, four columns at a time: writes the gradient, or makes the step of an
 * optimizer on the row. Weight and state are read separately from the step, so that they can be prefetched.
 *
 * A group of lanes shares the columns of a row. Steps (semantics: recfuse.h, rf_optimizer):
 *     rf_emit_rows_t rows = rf_emit_rows(matrix, ...);   once
 *     rf_emit_ahead_t ahead; rf_emit_load(rows.place(number), valid, ahead);
 *     if (!emit.plain) rf_emit_gradient(emit, ahead, sums);   sum -> gradient: scaled, with weight decay
 *     row-wise Adagrad: rf_emit_squares, summed up over the group, rf_emit_row_state, rf_emit_row_factor
 *     rf_emit_store(...)
 * RF_EMIT: RF_EMIT_GRADIENT, or the number of an optimizer + 1; RF_WEIGHT_DTYPE: dtype of the weight, or of
 * the gradient; RF_ROUND 1: stochastic rounding of half tables; RF_ALIGNED: dims are multiples of four and
 * rows aligned to four columns.
 */
#ifndef RECFUSE_CUDA_BACKWARD_EMIT_CUH
#define RECFUSE_CUDA_BACKWARD_EMIT_CUH

#include "gpu/device/element.cuh"
#include "gpu/device/rounding.h"
#include "families/fused_backward/backward_args.h"
#include "families/fused_backward/device/optimizer_steps.h"

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
#ifndef RF_STREAMED
#define RF_STREAMED 1
#endif

enum {
    EMIT_STATES = rf_optimizer_column_states(RF_EMIT - 1), /* states with a value per column */
    EMIT_ROWWISE = rf_optimizer_row_states(RF_EMIT - 1),
    EMIT_READS = RF_EMIT != RF_EMIT_GRADIENT,
    WEIGHT_BYTES = rf_element<RF_WEIGHT_DTYPE>::BYTES,
    STATE_BYTES = rf_element<RF_FLOAT32>::BYTES
};

/* Four columns. */
struct four_t {
    float of[4];
};

/* Reads four columns of a row. Rows are read and written once: with RF_STREAMED they leave the caches before
 * gradients do. */
RF_INLINE rf_bytes<16> row_read(const rf_bytes<16> *from) {
    const uint4 found = RF_STREAMED ? __ldcs((const uint4 *)from) : __ldca((const uint4 *)from);
    return {{found.x, found.y, found.z, found.w}};
}
RF_INLINE rf_bytes<8> row_read(const rf_bytes<8> *from) {
    const uint2 found = RF_STREAMED ? __ldcs((const uint2 *)from) : __ldca((const uint2 *)from);
    return {{found.x, found.y}};
}
RF_INLINE void row_write(rf_bytes<16> *to, const rf_bytes<16> &from) {
    const uint4 words = make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]);
    if (RF_STREAMED) {
        __stcs((uint4 *)to, words);
    } else {
        __stwb((uint4 *)to, words);
    }
}
RF_INLINE void row_write(rf_bytes<8> *to, const rf_bytes<8> &from) {
    const uint2 words = make_uint2(from.word[0], from.word[1]);
    if (RF_STREAMED) {
        __stcs((uint2 *)to, words);
    } else {
        __stwb((uint2 *)to, words);
    }
}

/* Reads a row's state of row-wise Adagrad. The base address is held in registers (rf_keep), which hides that
 * it is in global memory. */
template <class N> RF_INLINE float state_read(const rf_u8 *states, N number) {
    return __ldca((const float *)rf_place(states, number, sizeof(float)));
}
template <class N> RF_INLINE void state_write(rf_u8 *states, N number, float state) {
    __stwb((float *)rf_place(states, number, sizeof(float)), state);
}

/* Loads four columns from `from`; columns past `valid` are 0. CONSTANT: the values do not change during the
 * kernel (gradients, not tables), so the read-only cache may serve them. */
template <int DTYPE, bool CONSTANT> RF_INLINE four_t four_load(const rf_u8 *from, int valid) {
    four_t to = {};
    enum { BYTES = rf_element<DTYPE>::BYTES };
#if RF_ALIGNED
    typedef rf_elements<DTYPE, 4> vector_t;
    if (valid > 0)
        rf_elements_get<DTYPE, 4>(
            CONSTANT ? rf_load((const vector_t *)from) : row_read((const vector_t *)from), to.of);
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < valid)
            to.of[i] = rf_element<DTYPE>::get(*(const rf_elements<DTYPE, 1> *)(from + i * BYTES), 0);
#endif
    return to;
}

template <int DTYPE> RF_INLINE void four_store(rf_u8 *to, const four_t &from, int valid) {
    enum { BYTES = rf_element<DTYPE>::BYTES };
#if RF_ALIGNED
    if (valid > 0) row_write((rf_elements<DTYPE, 4> *)to, rf_elements_of<DTYPE, 4>(from.of));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const rf_elements<DTYPE, 1> element = rf_elements_of<DTYPE, 1>(from.of + i);
        if (i < valid) *(rf_elements<DTYPE, 1> *)(to + i * BYTES) = element;
    }
#endif
}

/* The parameters of all rows of a launch. */
struct rf_emit_t {
    float lr, decay, eps, beta1, beta2, scale;
    float step_size; /* Adam's, with its bias corrections */
    rf_u64 rounding; /* rf_rounding_step */
    bool skip;
    bool plain; /* sums are gradients: no scaling except in SGD's lr, and no weight decay */
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
    const float step = rf_load(numbers + RF_UPDATE_STEP);
    emit.rounding = rf_rounding_step(args.seed, step);
    emit.plain = emit.decay == 0.0f && (RF_EMIT == RF_SGD + 1 || emit.scale == 1.0f);
    if (RF_EMIT == RF_SGD + 1 && emit.plain) emit.lr *= emit.scale;
    if (rf_optimizer_counts(RF_EMIT - 1)) {
        emit.beta1 = rf_load(numbers + RF_UPDATE_BETA1);
        emit.beta2 = rf_load(numbers + RF_UPDATE_BETA2);
        emit.step_size = emit.lr * sqrtf(1.0f - powf(emit.beta2, step)) / (1.0f - powf(emit.beta1, step));
    }
    return emit;
}

/* The addresses of four columns of a row. */
struct rf_emit_place_t {
    rf_u8 *weight;
    rf_u8 *states[EMIT_STATES > 0 ? EMIT_STATES : 1];
};

/* The addresses of four columns of each row of a matrix: a row takes one multiplication and addition. */
struct rf_emit_rows_t {
    rf_emit_place_t first; /* of row 0 */
    rf_u32 weight_pitch, state_pitch; /* bytes between rows */

    template <class N> RF_INLINE rf_emit_place_t place(N number) const {
        rf_emit_place_t to;
        to.weight = rf_place(first.weight, number, weight_pitch);
#pragma unroll
        for (int i = 0; i < EMIT_STATES; i++) to.states[i] = rf_place(first.states[i], number, state_pitch);
        return to;
    }
};

/* Returns the addresses of the columns from `column` on. Row n of the matrix has the number n - before. */
RF_INLINE rf_emit_rows_t rf_emit_rows(const rf_backward_matrix &matrix, rf_i64 before, int column) {
    const rf_i64 element = before * matrix.dim + column;
    rf_emit_rows_t rows;
    rows.first.weight = matrix.weight + element * WEIGHT_BYTES;
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++) rows.first.states[i] = (rf_u8 *)(matrix.states[i] + element);
    rows.weight_pitch = (rf_u32)matrix.dim * WEIGHT_BYTES;
    rows.state_pitch = (rf_u32)matrix.dim * STATE_BYTES;
    rf_keep(rows.first.weight);
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++) rf_keep(rows.first.states[i]);
    return rows;
}

/* Returns the addresses of the four columns that follow after `columns` columns. */
RF_INLINE rf_emit_place_t rf_emit_behind(const rf_emit_place_t &place, int columns) {
    rf_emit_place_t to;
    to.weight = place.weight + columns * WEIGHT_BYTES;
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++) to.states[i] = place.states[i] + columns * STATE_BYTES;
    return to;
}

/* Prefetched values of four columns of a row. */
struct rf_emit_ahead_t {
    four_t weight;
    four_t states[EMIT_STATES > 0 ? EMIT_STATES : 1];
};

RF_INLINE void rf_emit_load(const rf_emit_place_t &place, int valid, rf_emit_ahead_t &ahead) {
    if (!EMIT_READS) return;
    ahead.weight = four_load<RF_WEIGHT_DTYPE, false>(place.weight, valid);
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++)
        ahead.states[i] = four_load<RF_FLOAT32, false>(place.states[i], valid);
}

/* Converts sums to gradients unless all are plain. Without weight decay, a weight that is not finite has no
 * effect. */
RF_INLINE void rf_emit_gradient(const rf_emit_t &emit, const rf_emit_ahead_t &ahead, four_t &sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums.of[i] *= emit.scale;
        if (emit.decay != 0.0f) sums.of[i] = fmaf(emit.decay, ahead.weight.of[i], sums.of[i]);
    }
}

/* The step of row-wise Adagrad: the mean square of a row's gradient over its columns (`each`: 1 / columns) is
 * added to the row's state, from which the factor of the gradient follows. */
RF_INLINE float rf_emit_squares(int valid, const four_t &gradient) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < (RF_ALIGNED ? 4 : valid)) squares += gradient.of[i] * gradient.of[i];
    return RF_ALIGNED && valid == 0 ? 0.0f : squares;
}
RF_INLINE float rf_emit_row_state(float before, float squares, float each) { return before + squares * each; }
RF_INLINE float rf_emit_row_factor(const rf_emit_t &emit, float state) {
    return rf_near_quotient(emit.lr, rf_near_root(state) + emit.eps);
}

#define RF_STEP_LR emit.lr
#define RF_STEP_EPS emit.eps
#define RF_STEP_RATE1 (1.0f - emit.beta1)
#define RF_STEP_RATE2 (1.0f - emit.beta2)
#define RF_STEP_CORRECTED_LR emit.step_size
#define RF_STEP_ROOT(x) rf_near_root(x)
#define RF_STEP_QUOTIENT(x, y) rf_near_quotient(x, y)
#define RF_STEP_BY_ROW(g) (factor * (g))

/* Writes four columns; `factor`: of row-wise Adagrad; `row` and `column`: in the matrix. */
RF_INLINE void rf_emit_store(const rf_emit_t &emit, const rf_emit_place_t &place, rf_i64 row, int column,
                             int valid, rf_emit_ahead_t &ahead, const four_t &gradient, float factor) {
    four_t result = gradient;
#pragma unroll
    for (int i = 0; i < 4 && EMIT_READS; i++) {
        const float g = gradient.of[i];
        float w = ahead.weight.of[i];
        float &first = ahead.states[0].of[i], &second = ahead.states[EMIT_STATES > 1].of[i];
        RF_OPTIMIZER_STEP(RF_EMIT - 1, w, g, first, second);
        result.of[i] = w;
    }
#pragma unroll
    for (int i = 0; i < EMIT_STATES; i++) four_store<RF_FLOAT32>(place.states[i], ahead.states[i], valid);
#if RF_ROUND
    rf_u16 *halves = (rf_u16 *)place.weight;
    const rf_u64 of_row = rf_rounding_row(emit.rounding, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const rf_u32 bits = rf_rounding_bits(of_row, (rf_u32)(column + i));
        const rf_u16 rounded = RF_WEIGHT_DTYPE == RF_FLOAT16 ? rf_round_f16(result.of[i], bits)
                                                             : rf_round_bf16(result.of[i], bits);
        if (i < valid) halves[i] = rounded;
    }
#else
    four_store<RF_WEIGHT_DTYPE>(place.weight, result, valid);
#endif
}

#endif
