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

static RF__INLINE void update_row(const rf__step *step, const rf_update_matrix *matrix, int64_t row,
                                  const float *sum, const rf_dtype dtype, const rf_optimizer optimizer) {
    const int64_t dim = matrix->dim;
    char *weight = (char *)matrix->weight + rf__elements_bytes(dtype, row * dim);
    float *first = optimizer == RF_SGD ? NULL : matrix->states[0] + row * dim;
    float *second = optimizer == RF_ADAM ? matrix->states[1] + row * dim : NULL;
    float of_row = 0; /* row-wise Adagrad's divisor */
    if (optimizer == RF_ROWWISE_ADAGRAD) {
        matrix->states[0][row] += mean_of_squares(step, weight, dtype, dim, sum);
        of_row = sqrtf(matrix->states[0][row]) + step->eps;
    }
    for (int64_t column = 0; column < dim; column += RF__WIDEST) {
        const int64_t columns = dim - column < RF__WIDEST ? dim - column : RF__WIDEST;
        char *to = weight + rf__elements_bytes(dtype, column);
        RF__N(vec) value = load_columns(to, columns, dtype);
        const RF__N(vec) gradient = gradient_of(step, sum, value, column, columns);
        if (optimizer == RF_SGD) {
            value -= step->lr * gradient;
        } else if (optimizer == RF_ROWWISE_ADAGRAD) {
            value -= step->lr * gradient / of_row;
        } else if (optimizer == RF_ADAGRAD) {
            const RF__N(vec) total = load_floats(first + column, columns) + gradient * gradient;
            store_floats(first + column, columns, total);
            value -= step->lr * gradient / (RF__N(square_root)(total) + step->eps);
        } else {
            RF__N(vec) mean = load_floats(first + column, columns);
            RF__N(vec) square = load_floats(second + column, columns);
            mean += step->one_minus_beta1 * (gradient - mean);
            square += step->one_minus_beta2 * (gradient * gradient - square);
            store_floats(first + column, columns, mean);
            store_floats(second + column, columns, square);
            value -= step->corrected_lr * mean / (RF__N(square_root)(square) + step->eps);
        }
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
#define RF__UPDATE_ROWS(name, dtype)                          \
    RF__UPDATE_ROW(name##_sgd, dtype, RF_SGD)                 \
    RF__UPDATE_ROW(name##_adagrad, dtype, RF_ADAGRAD)         \
    RF__UPDATE_ROW(name##_rowwise, dtype, RF_ROWWISE_ADAGRAD) \
    RF__UPDATE_ROW(name##_adam, dtype, RF_ADAM)
RF__UPDATE_ROWS(f32, RF_FLOAT32)
RF__UPDATE_ROWS(f16, RF_FLOAT16)
RF__UPDATE_ROWS(bf16, RF_BFLOAT16)
#define RF__UPDATES(name) \
    {update_##name##_sgd, update_##name##_adagrad, update_##name##_rowwise, update_##name##_adam}

#undef RF__N
#undef RF__JOIN
#undef RF__JOIN_
