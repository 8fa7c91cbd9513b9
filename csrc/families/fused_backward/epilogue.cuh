/* Epilogue of a row's summed gradient, four columns at a time: writes the gradient, or makes the step of an
 * optimizer on the row. Weight and state are read separately from the step, so that they can be prefetched.
 *
 * A group of lanes shares the columns of a row. Steps (semantics: recfuse.h, rf_optimizer):
 *     rf_epilogue_rows_t rows = rf_epilogue_rows(matrix, ...);   once
 *     rf_epilogue_values_t ahead; rf_epilogue_load(rows.address(number), valid, ahead);
 *     if (!epilogue.plain) rf_epilogue_gradient(epilogue, ahead, sums);   sum -> gradient: scaled, with weight decay
 *     row-wise Adagrad: rf_epilogue_squares, summed up over the group, rf_epilogue_row_state, rf_epilogue_row_factor
 *     rf_epilogue_store(...)
 * RF_EPILOGUE: RF_EPILOGUE_GRADIENT, or the number of an optimizer + 1; RF_WEIGHT_DTYPE: dtype of the weight, or of
 * the gradient; RF_ROUND 1: stochastic rounding of half tables; RF_ALIGNED: dims are multiples of four and
 * rows aligned to four columns.
 */
#ifndef RECFUSE_CUDA_BACKWARD_EPILOGUE_CUH
#define RECFUSE_CUDA_BACKWARD_EPILOGUE_CUH

#include "gpu/device/element.cuh"
#include "gpu/device/rounding.h"
#include "families/fused_backward/backward_args.h"
#include "families/fused_backward/device/optimizer_steps.h"

#ifndef RF_EPILOGUE
#define RF_EPILOGUE (RF_SGD + 1)
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
    EPILOGUE_STATES = rf_optimizer_column_states(RF_EPILOGUE - 1), /* states with a value per column */
    EPILOGUE_ROWWISE = rf_optimizer_row_states(RF_EPILOGUE - 1),
    EPILOGUE_READS = RF_EPILOGUE != RF_EPILOGUE_GRADIENT,
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
    const uint4 loaded = RF_STREAMED ? __ldcs((const uint4 *)from) : __ldca((const uint4 *)from);
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}
RF_INLINE rf_bytes<8> row_read(const rf_bytes<8> *from) {
    const uint2 loaded = RF_STREAMED ? __ldcs((const uint2 *)from) : __ldca((const uint2 *)from);
    return {{loaded.x, loaded.y}};
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
    return __ldca((const float *)rf_address(states, number, sizeof(float)));
}
template <class N> RF_INLINE void state_write(rf_u8 *states, N number, float state) {
    __stwb((float *)rf_address(states, number, sizeof(float)), state);
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
struct rf_epilogue_t {
    float lr, decay, eps, beta1, beta2, scale;
    float step_size; /* Adam's, with its bias corrections */
    rf_u64 rounding; /* rf_rounding_step */
    bool skip;
    bool plain; /* sums are gradients: no scaling except in SGD's lr, and no weight decay */
};

RF_INLINE rf_epilogue_t rf_epilogue_of(const rf_epilogue_args &args) {
    rf_epilogue_t epilogue = {};
    if (!EPILOGUE_READS) return epilogue;
    const float *numbers = args.numbers;
    epilogue.lr = rf_load(numbers + RF_UPDATE_LR);
    epilogue.decay = rf_load(numbers + RF_UPDATE_WEIGHT_DECAY);
    epilogue.eps = rf_load(numbers + RF_UPDATE_EPS);
    epilogue.scale = rf_load(numbers + RF_UPDATE_GRAD_SCALE);
    epilogue.skip = rf_load(numbers + RF_UPDATE_SKIP) != 0.0f;
    const float step = rf_load(numbers + RF_UPDATE_STEP);
    epilogue.rounding = rf_rounding_step(args.seed, step);
    epilogue.plain = epilogue.decay == 0.0f && (RF_EPILOGUE == RF_SGD + 1 || epilogue.scale == 1.0f);
    if (RF_EPILOGUE == RF_SGD + 1 && epilogue.plain) epilogue.lr *= epilogue.scale;
    if (rf_optimizer_counts(RF_EPILOGUE - 1)) {
        epilogue.beta1 = rf_load(numbers + RF_UPDATE_BETA1);
        epilogue.beta2 = rf_load(numbers + RF_UPDATE_BETA2);
        epilogue.step_size =
            epilogue.lr * sqrtf(1.0f - powf(epilogue.beta2, step)) / (1.0f - powf(epilogue.beta1, step));
    }
    return epilogue;
}

/* The addresses of four columns of a row. */
struct rf_epilogue_address_t {
    rf_u8 *weight;
    rf_u8 *states[EPILOGUE_STATES > 0 ? EPILOGUE_STATES : 1];
};

/* The addresses of four columns of each row of a matrix: a row takes one multiplication and addition. */
struct rf_epilogue_rows_t {
    rf_epilogue_address_t first; /* of row 0 */
    rf_u32 weight_pitch, state_pitch; /* bytes between rows */

    template <class N> RF_INLINE rf_epilogue_address_t address(N number) const {
        rf_epilogue_address_t to;
        to.weight = rf_address(first.weight, number, weight_pitch);
#pragma unroll
        for (int i = 0; i < EPILOGUE_STATES; i++)
            to.states[i] = rf_address(first.states[i], number, state_pitch);
        return to;
    }
};

/* Returns the addresses of the columns from `column` on. Row n of the matrix has the number n - before. */
RF_INLINE rf_epilogue_rows_t rf_epilogue_rows(const rf_backward_matrix &matrix, rf_i64 state_before,
                                              int column) {
    const rf_i64 element = state_before * matrix.dim + column;
    rf_epilogue_rows_t rows;
    rows.first.weight = matrix.weight + element * WEIGHT_BYTES;
#pragma unroll
    for (int i = 0; i < EPILOGUE_STATES; i++) rows.first.states[i] = (rf_u8 *)(matrix.states[i] + element);
    rows.weight_pitch = (rf_u32)matrix.dim * WEIGHT_BYTES;
    rows.state_pitch = (rf_u32)matrix.dim * STATE_BYTES;
    rf_keep(rows.first.weight);
#pragma unroll
    for (int i = 0; i < EPILOGUE_STATES; i++) rf_keep(rows.first.states[i]);
    return rows;
}

/* Returns the addresses of the four columns that follow after `columns` columns. */
RF_INLINE rf_epilogue_address_t rf_epilogue_offset(const rf_epilogue_address_t &address, int columns) {
    rf_epilogue_address_t to;
    to.weight = address.weight + columns * WEIGHT_BYTES;
#pragma unroll
    for (int i = 0; i < EPILOGUE_STATES; i++) to.states[i] = address.states[i] + columns * STATE_BYTES;
    return to;
}

/* Prefetched values of four columns of a row. */
struct rf_epilogue_values_t {
    four_t weight;
    four_t states[EPILOGUE_STATES > 0 ? EPILOGUE_STATES : 1];
};

RF_INLINE void rf_epilogue_load(const rf_epilogue_address_t &address, int valid,
                                rf_epilogue_values_t &values) {
    if (!EPILOGUE_READS) return;
    values.weight = four_load<RF_WEIGHT_DTYPE, false>(address.weight, valid);
#pragma unroll
    for (int i = 0; i < EPILOGUE_STATES; i++)
        values.states[i] = four_load<RF_FLOAT32, false>(address.states[i], valid);
}

/* Converts sums to gradients unless all are plain. Without weight decay, a weight that is not finite has no
 * effect. */
RF_INLINE void rf_epilogue_gradient(const rf_epilogue_t &epilogue, const rf_epilogue_values_t &values,
                                    four_t &sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums.of[i] *= epilogue.scale;
        if (epilogue.decay != 0.0f) sums.of[i] = fmaf(epilogue.decay, values.weight.of[i], sums.of[i]);
    }
}

/* The step of row-wise Adagrad: the mean square of a row's gradient over its columns (`inverse_columns`: 1 / columns) is
 * added to the row's state, from which the factor of the gradient follows. */
RF_INLINE float rf_epilogue_squares(int valid, const four_t &gradient) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < (RF_ALIGNED ? 4 : valid)) squares += gradient.of[i] * gradient.of[i];
    return RF_ALIGNED && valid == 0 ? 0.0f : squares;
}
RF_INLINE float rf_epilogue_row_state(float state_before, float squares, float inverse_columns) {
    return state_before + squares * inverse_columns;
}
RF_INLINE float rf_epilogue_row_factor(const rf_epilogue_t &epilogue, float state) {
    return rf_near_quotient(epilogue.lr, rf_near_root(state) + epilogue.eps);
}

#define RF_STEP_LR epilogue.lr
#define RF_STEP_EPS epilogue.eps
#define RF_STEP_RATE1 (1.0f - epilogue.beta1)
#define RF_STEP_RATE2 (1.0f - epilogue.beta2)
#define RF_STEP_CORRECTED_LR epilogue.step_size
#define RF_STEP_ROOT(x) rf_near_root(x)
#define RF_STEP_QUOTIENT(x, y) rf_near_quotient(x, y)
#define RF_STEP_BY_ROW(g) (factor * (g))

/* Writes four columns; `factor`: of row-wise Adagrad; `row` and `column`: in the matrix. */
RF_INLINE void rf_epilogue_store(const rf_epilogue_t &epilogue, const rf_epilogue_address_t &address,
                                 rf_i64 row, int column, int valid, rf_epilogue_values_t &values,
                                 const four_t &gradient, float factor) {
    four_t result = gradient;
#pragma unroll
    for (int i = 0; i < 4 && EPILOGUE_READS; i++) {
        const float g = gradient.of[i];
        float w = values.weight.of[i];
        float &first = values.states[0].of[i], &second = values.states[EPILOGUE_STATES > 1].of[i];
        RF_OPTIMIZER_STEP(RF_EPILOGUE - 1, w, g, first, second);
        result.of[i] = w;
    }
#pragma unroll
    for (int i = 0; i < EPILOGUE_STATES; i++)
        four_store<RF_FLOAT32>(address.states[i], values.states[i], valid);
#if RF_ROUND
    rf_u16 *halves = (rf_u16 *)address.weight;
    const rf_u64 of_row = rf_rounding_row(epilogue.rounding, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const rf_u32 bits = rf_rounding_bits(of_row, (rf_u32)(column + i));
        const rf_u16 rounded = RF_WEIGHT_DTYPE == RF_FLOAT16 ? rf_round_f16(result.of[i], bits)
                                                             : rf_round_bf16(result.of[i], bits);
        if (i < valid) halves[i] = rounded;
    }
#else
    four_store<RF_WEIGHT_DTYPE>(address.weight, result, valid);
#endif
}

#endif
