/* Gradient kernels of one instruction set, with vectors of RF__WIDEST floats. Included by pool_kernels.h.
 *
 * A row's gradient is a sum over entries in their order, each column separately: the same for every
 * instruction set.
 */
#define RF__JOIN_(name, width) name##width
#define RF__JOIN(name, width) RF__JOIN_(name, width)
#define RF__N(name) RF__JOIN(name, RF__WIDEST)

enum {
    ENTRIES_AHEAD = 8, /* between the prefetch of an entry's gradient and its use */
    NEAR_BYTES = 32768, /* of a gradient that need not be prefetched */
    BLOCK =
        64, /* columns that the kernels without registers of their own work on at once; a multiple of each width */
};

/* Columns [column, column + columns) of a row. `vectors`, `part` and `dtype` are constants wherever this is
 * inlined. */
static RF__FOR_CONSTANTS void sum_chunk(const rf_fused_backward_params *params, const rf__entry *first,
                                        const rf__entry *last, const rf__entry *end, float divisor,
                                        int64_t column, int64_t columns, char *row, const int vectors,
                                        const bool part, const rf_dtype dtype) {
    const int64_t vector_bytes = rf__elements_bytes(dtype, RF__WIDEST);
    const char *grad = rf__element_at(params->grad, dtype, column);
    RF__N(vec) sum[8] = {{0}};
    for (const rf__entry *entry = first; entry < last; entry++) {
        if (end != NULL && column == 0 && end - entry > ENTRIES_AHEAD)
            rf__ask_for(rf__element_at(grad, dtype, entry[ENTRIES_AHEAD].source),
                        rf__elements_bytes(dtype, params->dim));
        const char *from = rf__element_at(grad, dtype, entry->source);
        const float factor = entry->factor;
        RF__UNROLL
        for (int v = 0; v < vectors; v++) {
            sum[v] += factor * (part ? RF__N(load_part)(from, columns, dtype)
                                     : RF__N(load)(from + v * vector_bytes, dtype));
        }
    }
    RF__UNROLL
    for (int v = 0; v < vectors; v++) {
        if (divisor != 1.0f) sum[v] /= divisor;
        RF__N(store_part)(row + rf__elements_bytes(params->dtype, column + v * RF__WIDEST),
                          part ? columns : RF__WIDEST, sum[v], params->dtype);
    }
}

static RF__INLINE void sum_row(const rf_fused_backward_params *params, const rf__entry *first,
                               const rf__entry *last, const rf__entry *end, float divisor, char *row,
                               const rf_dtype dtype) {
    const int64_t dim = params->dim;
    int64_t column = 0;
#define RF__SUM_CHUNKS(vectors)                                                  \
    for (; dim - column >= vectors * RF__WIDEST; column += vectors * RF__WIDEST) \
        sum_chunk(params, first, last, end, divisor, column, vectors *RF__WIDEST, row, vectors, false, dtype);
    RF__SUM_CHUNKS(8)
    RF__SUM_CHUNKS(4)
    RF__SUM_CHUNKS(2)
    RF__SUM_CHUNKS(1)
#undef RF__SUM_CHUNKS
    if (column < dim) sum_chunk(params, first, last, end, divisor, column, dim - column, row, 1, true, dtype);
}

#define RF__SUM_ROW(name, dtype)                                                                        \
    static void sum_row_##name(const rf_fused_backward_params *params, const rf__entry *first,          \
                               const rf__entry *last, const rf__entry *end, float divisor, char *row) { \
        sum_row(params, first, last, end, divisor, row, dtype);                                         \
    }
RF__SUM_ROW(f32, RF_FLOAT32)
RF__SUM_ROW(f16, RF_FLOAT16)
RF__SUM_ROW(bf16, RF_BFLOAT16)

static RF__INLINE void sum_rows_from(const rf_fused_backward_params *params, const rf__entry *at,
                                     const rf__entry *end, int64_t first_row, int64_t *rows, char *values,
                                     const bool ask, const rf_dtype dtype) {
    const int64_t row_bytes = rf__elements_bytes(params->dtype, params->dim);
    while (at < end) {
        const rf__entry *last = at + 1;
        while (last < end && last->row == at->row) last++;
        *rows++ = first_row + at->row;
        sum_row(params, at, last, ask ? end : NULL, 1.0f, values, dtype);
        values += row_bytes;
        at = last;
    }
}

/* Gradients that fit into a core's first cache are not prefetched. */
#define RF__SUM_ROWS(name, dtype)                                                                       \
    static void sum_rows_##name(const rf_fused_backward_params *params, const rf__entry *at,            \
                                const rf__entry *end, int64_t first_row, int64_t *rows, char *values) { \
        if (rf__elements_bytes(dtype, params->bags * params->output_dim) <= NEAR_BYTES) {               \
            sum_rows_from(params, at, end, first_row, rows, values, false, dtype);                      \
        } else {                                                                                        \
            sum_rows_from(params, at, end, first_row, rows, values, true, dtype);                       \
        }                                                                                               \
    }
RF__SUM_ROWS(f32, RF_FLOAT32)
RF__SUM_ROWS(f16, RF_FLOAT16)
RF__SUM_ROWS(bf16, RF_BFLOAT16)

/* `columns` elements as floats. */
static void load_block(const char *from, rf_dtype dtype, int64_t columns, float *block) {
    int64_t at = 0;
    for (; at + RF__WIDEST <= columns; at += RF__WIDEST) {
        const RF__N(vec) value = RF__N(load)(rf__element_at(from, dtype, at), dtype);
        memcpy(block + at, &value, sizeof value);
    }
    if (at < columns) {
        const RF__N(vec) value = RF__N(load_part)(rf__element_at(from, dtype, at), columns - at, dtype);
        memcpy(block + at, &value, (size_t)(columns - at) * sizeof(float));
    }
}

static void store_block(char *to, rf_dtype dtype, int64_t columns, const float *block) {
    for (int64_t at = 0; at < columns; at += RF__WIDEST) {
        const int64_t left = columns - at < RF__WIDEST ? columns - at : RF__WIDEST;
        RF__N(vec) value = {0};
        memcpy(&value, block + at, (size_t)left * sizeof(float));
        RF__N(store_part)(to + rf__elements_bytes(dtype, at), left, value, dtype);
    }
}

/* For a maximum, a column's gradient goes to the row that won it; once, however often the bag looked the row
 * up. */
static void mixed_row(const rf_fused_backward_params *params, const rf__entry *first, const rf__entry *last,
                      int64_t number, float divisor, char *row) {
    for (int64_t column = 0; column < params->dim; column += BLOCK) {
        const int64_t columns = params->dim - column < BLOCK ? params->dim - column : BLOCK;
        float sum[BLOCK] = {0}, value[BLOCK];
        for (const rf__entry *entry = first; entry < last; entry++) {
            const int64_t source = entry->source + column;
            const char *grad = rf__element_at(params->grad, params->grad_dtype, source);
            if ((entry->row & RF__ENTRY_MAX) == 0) {
                load_block(grad, params->grad_dtype, columns, value);
                for (int64_t c = 0; c < columns; c++) sum[c] += entry->factor * value[c];
                continue;
            }
            if (entry > first && entry[-1].source == entry->source)
                continue; /* the bag looked it up before */
            load_block(grad, params->grad_dtype, columns, value);
            const int64_t *winners = params->winners + source;
            const int64_t winner = number - params->features[entry->feature].weight_offset / params->dim;
            for (int64_t c = 0; c < columns; c++) sum[c] += winners[c] == winner ? value[c] : 0.0f;
        }
        for (int64_t c = 0; c < columns && divisor != 1.0f; c++) sum[c] /= divisor;
        store_block(row + rf__elements_bytes(params->dtype, column), params->dtype, columns, sum);
    }
}

/* The first of equal values wins, and a NaN wins if it comes first, as in the forward pass. */
static void bag_winners(const rf_fused_embedding_bag_params *params, int64_t number, int64_t bag,
                        int64_t *winners) {
    const rf_feature *feature = &params->features[number];
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    const char *weight = rf__feature_weight(params->buffers, feature);
    const int64_t from = rf__load_int(params->offsets, params->offset_type, number * params->bags + bag);
    const int64_t to = rf__load_int(params->offsets, params->offset_type, number * params->bags + bag + 1);
    const bool good = rf__is_bag(number * params->bags + bag, from, to, params->lookups);
    for (int64_t column = 0; column < feature->dim; column += BLOCK) {
        const int64_t columns = feature->dim - column < BLOCK ? feature->dim - column : BLOCK;
        float best[BLOCK] = {0}, value[BLOCK];
        int64_t won[BLOCK];
        bool none = true;
        for (int64_t c = 0; c < columns; c++) won[c] = -1;
        for (int64_t i = from; good && i < to; i++) {
            const int64_t index = rf__load_int(params->indices, params->index_type, i);
            if ((uint64_t)index >= (uint64_t)feature->rows || index == feature->padding_idx) continue;
            load_block(weight + rf__row_offset(&row, index, column), row.dtype, columns, value);
            for (int64_t c = 0; c < columns; c++) {
                const bool take = none || value[c] > best[c];
                best[c] = take ? value[c] : best[c];
                won[c] = take ? index : won[c];
            }
            none = false;
        }
        memcpy(winners + column, won, (size_t)columns * sizeof *won);
    }
}

static RF__INLINE void load_codes_of(const char *from, int64_t columns, rf__row_parameters parameters,
                                     float *block, const rf_dtype dtype) {
    for (int64_t at = 0; at < columns; at += RF__WIDEST) {
        const char *codes = rf__element_at(from, dtype, at);
        const int64_t left = columns - at < RF__WIDEST ? columns - at : RF__WIDEST;
        const RF__N(vec) value =
            left < RF__WIDEST ? RF__N(codes_part)(codes, left, dtype) : RF__N(codes)(codes, dtype);
        const RF__N(vec) number = parameters[0] * value + parameters[1];
        memcpy(block + at, &number, (size_t)left * sizeof(float));
    }
}

/* The values of `columns` codes of a row. */
static void load_codes(const char *from, rf_dtype dtype, const char *parameters, rf_dtype parameters_dtype,
                       int64_t columns, float *block) {
    const rf__row_parameters own = rf__row_parameters_at(parameters, parameters_dtype);
    if (dtype == RF_INT4_ROWS) {
        load_codes_of(from, columns, own, block, RF_INT4_ROWS);
    } else {
        load_codes_of(from, columns, own, block, RF_INT8_ROWS);
    }
}

static float dot_row(const char *grad, rf_dtype grad_dtype, const char *row, const char *parameters,
                     const rf__row_format *format) {
    float sums[BLOCK] = {0}, left[BLOCK], right[BLOCK], sum = 0;
    const int64_t count = format->dim;
    for (int64_t at = 0; at < count; at += BLOCK) {
        const int64_t columns = count - at < BLOCK ? count - at : BLOCK;
        const char *from = rf__element_at(row, format->dtype, at);
        load_block(rf__element_at(grad, grad_dtype, at), grad_dtype, columns, left);
        if (parameters == NULL) {
            load_block(from, format->dtype, columns, right);
        } else {
            load_codes(from, format->dtype, parameters, format->parameters_dtype, columns, right);
        }
        for (int64_t c = 0; c < columns; c++) sums[c] += left[c] * right[c];
    }
    for (int64_t c = 0; c < BLOCK && c < count; c++) sum += sums[c];
    return sum;
}

#undef RF__N
#undef RF__JOIN
#undef RF__JOIN_
