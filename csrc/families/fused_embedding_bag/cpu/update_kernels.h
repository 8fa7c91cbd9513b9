/* Updates of a row by a fused optimizer, with vectors of RF__WIDEST floats. Included by pool_kernels.h.
 *
 * Each column separately, except for row-wise Adagrad's mean, whose order of additions depends only on the
 * number of columns: the same results for every instruction set.
 */
#define RF__JOIN_(name, width) name##width
#define RF__JOIN(name, width) RF__JOIN_(name, width)
#define RF__N(name) RF__JOIN(name, RF__WIDEST)

static RF__INLINE RF__N(vec) load_columns(const char *from, int64_t columns, const rf_dtype dtype) {
    return columns < RF__WIDEST ? RF__N(load_part)(from, columns, dtype) : RF__N(load)(from, dtype);
}

static RF__INLINE RF__N(vec) load_floats(const float *from, int64_t columns) {
    return load_columns((const char *)from, columns, RF_FLOAT32);
}

static RF__INLINE void store_floats(float *to, int64_t columns, RF__N(vec) value) {
    RF__N(store_part)((char *)to, columns, value, RF_FLOAT32);
}

/* The gradient of the columns from `column` on, with the weight decay. */
static RF__INLINE RF__N(vec)
    gradient_of(const rf__step *step, const float *sum, RF__N(vec) weight, int64_t column, int64_t columns) {
    const RF__N(vec) gradient = load_floats(sum + column, columns) * step->grad_scale;
    /* A weight that is not finite must not reach a gradient that has no decay. */
    return step->weight_decay != 0 ? gradient + step->weight_decay * weight : gradient;
}

/* Halves that are added give the same order for every width. */
static float mean_of_squares(const rf__step *step, const char *weight, rf_dtype dtype, int64_t dim,
                             const float *sum) {
    float sums[BLOCK] = {0};
    for (int64_t column = 0; column < dim; column += RF__WIDEST) {
        const int64_t columns = dim - column < RF__WIDEST ? dim - column : RF__WIDEST;
        const RF__N(vec) value = load_columns(rf__element_at(weight, dtype, column), columns, dtype);
        const RF__N(vec) gradient = gradient_of(step, sum, value, column, columns);
        float *to = &sums[column % BLOCK];
        store_floats(to, columns, load_floats(to, columns) + gradient * gradient);
    }
    for (int half = BLOCK / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[half + i];
    return sums[0] / (float)dim;
}

static void store_rounded(const rf__step *step, char *to, int64_t row, int64_t column, int64_t columns,
                          RF__N(vec) value, rf_dtype dtype) {
    const uint64_t key = rf_rounding_row(rf_rounding_step(step->seed, step->number), row);
    uint16_t halves[RF__WIDEST];
    float values[RF__WIDEST];
    memcpy(values, &value, sizeof values);
    for (int i = 0; i < RF__WIDEST && dtype == RF_FLOAT16; i++)
        halves[i] = rf_round_f16(values[i], rf_rounding_bits(key, (uint32_t)(column + i)));
    for (int i = 0; i < RF__WIDEST && dtype != RF_FLOAT16; i++)
        halves[i] = rf_round_bf16(values[i], rf_rounding_bits(key, (uint32_t)(column + i)));
    memcpy(to, halves, (size_t)columns * sizeof *halves);
}

enum { MOST_STATES = sizeof((rf_update_matrix){0}.states) / sizeof(float *) };

#define RF_STEP_LR step->lr
#define RF_STEP_EPS step->eps
#define RF_STEP_RATE1 step->one_minus_beta1
#define RF_STEP_RATE2 step->one_minus_beta2
#define RF_STEP_CORRECTED_LR step->corrected_lr
#define RF_STEP_ROOT(x) RF__N(square_root)(x)
#define RF_STEP_QUOTIENT(x, y) ((x) / (y))
#define RF_STEP_BY_ROW(g) (step->lr * (g) / of_row)

static RF__FOR_CONSTANTS void update_row(const rf__step *step, const rf_update_matrix *matrix, int64_t row,
                                         const float *sum, const rf_dtype dtype,
                                         const rf_optimizer optimizer) {
    const int64_t dim = matrix->dim;
    char *weight = (char *)matrix->weight + rf__elements_bytes(dtype, row * dim);
    const int columns_states = rf_optimizer_column_states(optimizer);
    float of_row = 0; /* row-wise Adagrad's divisor */
    if (rf_optimizer_row_states(optimizer) > 0) {
        matrix->states[0][row] += mean_of_squares(step, weight, dtype, dim, sum);
        of_row = sqrtf(matrix->states[0][row]) + step->eps;
    }
    for (int64_t column = 0; column < dim; column += RF__WIDEST) {
        const int64_t columns = dim - column < RF__WIDEST ? dim - column : RF__WIDEST;
        char *to = weight + rf__elements_bytes(dtype, column);
        RF__N(vec) value = load_columns(to, columns, dtype), states[MOST_STATES] = {value, value};
        const RF__N(vec) gradient = gradient_of(step, sum, value, column, columns);
        for (int i = 0; i < columns_states; i++)
            states[i] = load_floats(matrix->states[i] + row * dim + column, columns);
        RF_OPTIMIZER_STEP(optimizer, value, gradient, states[0], states[1]);
        for (int i = 0; i < columns_states; i++)
            store_floats(matrix->states[i] + row * dim + column, columns, states[i]);
        if (dtype != RF_FLOAT32 && step->stochastic_rounding) {
            store_rounded(step, to, row, column, columns, value, dtype);
        } else {
            RF__N(store_part)(to, columns, value, dtype);
        }
    }
}

#define RF__UPDATE_ROW(name, dtype, optimizer)                                                   \
    static void update_##name(const rf__step *step, const rf_update_matrix *matrix, int64_t row, \
                              const float *sum) {                                                \
        update_row(step, matrix, row, sum, dtype, optimizer);                                    \
    }
#define RF__UPDATE_F32(code, ...) RF__UPDATE_ROW(f32_##code, RF_FLOAT32, code)
#define RF__UPDATE_F16(code, ...) RF__UPDATE_ROW(f16_##code, RF_FLOAT16, code)
#define RF__UPDATE_BF16(code, ...) RF__UPDATE_ROW(bf16_##code, RF_BFLOAT16, code)
RF_OPTIMIZER_LIST(RF__UPDATE_F32)
RF_OPTIMIZER_LIST(RF__UPDATE_F16)
RF_OPTIMIZER_LIST(RF__UPDATE_BF16)
#define RF__NAME_F32(code, ...) update_f32_##code,
#define RF__NAME_F16(code, ...) update_f16_##code,
#define RF__NAME_BF16(code, ...) update_bf16_##code,
#define RF__UPDATES                                                             \
    {                                                                           \
        {RF_OPTIMIZER_LIST(RF__NAME_F32)}, {RF_OPTIMIZER_LIST(RF__NAME_F16)}, { \
            RF_OPTIMIZER_LIST(RF__NAME_BF16)                                    \
        }                                                                       \
    }

#undef RF__N
#undef RF__JOIN
#undef RF__JOIN_
