/* Pools bags of quantised rows with vectors of RF__W floats. Included between quantized_codes.h and pool_width.h
 * with the same RF__W.
 *
 * A sum has two parts: the codes times their scales, and the biases, which are summed once a row and added at the
 * end of a bag. A half has 11 bits and a code 8, so their product is exact in float32: product and addition
 * give the same result as a fused multiply-add, on every instruction set. Rows are summed in two chains, because
 * in a single chain each addition would wait for the previous one.
 */

/* True where a chunk's vectors hold even and odd columns in turn. */
static RF__INLINE bool RF__N(is_apart)(const int vectors, const rf_dtype dtype) {
    return dtype == RF_INT4_ROWS && vectors % 2 == 0;
}

/* The vectors `v` and `v + 1` of a row's codes; of an odd number of vectors only `v`. */
static RF__INLINE void RF__N(two_codes)(const char *row, int64_t columns, const int v, const int vectors,
                                        const bool part, const rf_dtype dtype, RF__N(vec) * codes) {
    const char *from = rf__element_at(row, dtype, v * RF__W);
    if (RF__N(is_apart)(vectors, dtype)) {
        RF__N(even_and_odd)(from, &codes[0], &codes[1]);
        return;
    }
    codes[0] = part ? RF__N(codes_part)(from, columns, dtype) : RF__N(codes)(from, dtype);
    if (vectors > 1) codes[1] = RF__N(codes)(rf__element_at(row, dtype, (v + 1) * RF__W), dtype);
}

/* What a bag has so far: sums or maxima. */
typedef struct RF__N(pooled) {
    RF__N(vec) chain[2][8];
    rf__row_parameters sums[2]; /* of scales, which nothing reads, and of biases */
    int64_t count; /* lookups, but for padding */
} RF__N(pooled);

/* Adds lookups [from, to), whose parameters are halves; false at an invalid index. `pairs`: in two chains.
 * `planar`: parameters have no gaps. */
static RF__INLINE bool RF__N(quantized_sum)(const rf__place *rows, int64_t from, int64_t to,
                                            RF__N(pooled) * pooled, const int vectors, const bool part,
                                            const bool pairs, const bool planar, const rf_dtype dtype,
                                            const rf_int_type index_type) {
    int64_t i = from;
#define RF__ADD(c)                                                                                       \
    do {                                                                                                 \
        const int64_t at = rf__load_int(rows->indices, index_type, i + (c));                             \
        if (__builtin_expect((uint64_t)at >= rows->limit, 0)) return false;                              \
        const char *row = rows->weight + at * rows->pitch;                                               \
        const int64_t pitch = planar ? rf__parameters_bytes(RF_FLOAT16) : rows->parameters_pitch;        \
        const rf__row_parameters own = rf__row_parameters_at(rows->parameters + at * pitch, RF_FLOAT16); \
        pooled->sums[c] += own;                                                                          \
        RF__UNROLL                                                                                       \
        for (int v = 0; v < vectors; v += 2) {                                                           \
            RF__N(vec) codes[2], *sum = &pooled->chain[c][v];                                            \
            RF__N(two_codes)(row, rows->columns, v, vectors, part, dtype, codes);                        \
            sum[0] = RF__N(add_codes)(sum[0], own[0], codes[0]);                                         \
            if (vectors > 1) sum[1] = RF__N(add_codes)(sum[1], own[0], codes[1]);                        \
        }                                                                                                \
    } while (0)
    for (; pairs && i + 2 <= to; i += 2) {
        RF__ADD(0);
        RF__ADD(1);
    }
    for (; i < to; i++) RF__ADD(0);
#undef RF__ADD
    pooled->count += to - from;
    return true;
}

/* As above, of sums with weights or a padding index, and of maxima. `sample_weights` may be NULL. */
static RF__INLINE bool RF__N(quantized_lookups)(const rf__place *rows, int64_t from, int64_t to,
                                                const float *sample_weights, int64_t padding_idx,
                                                RF__N(pooled) * pooled, const int vectors, const bool part,
                                                const rf_dtype dtype, const rf_int_type index_type,
                                                const int op) {
    for (int64_t i = from; i < to; i++) {
        const int64_t at = rf__load_int(rows->indices, index_type, i);
        if (__builtin_expect((uint64_t)at >= rows->limit, 0)) return false;
        if (at == padding_idx) continue;
        const char *row = rows->weight + at * rows->pitch;
        rf__row_parameters own =
            rf__row_parameters_at(rows->parameters + at * rows->parameters_pitch, rows->parameters_dtype);
        if (sample_weights != NULL) own *= sample_weights[i];
        RF__UNROLL
        for (int v = 0; v < vectors; v += 2) {
            RF__N(vec) codes[2], *sum = &pooled->chain[0][v];
            RF__N(two_codes)(row, rows->columns, v, vectors, part, dtype, codes);
            for (int one = 0; one < (vectors > 1 ? 2 : 1); one++) {
                if (op != RF__MAX) {
                    sum[one] += own[0] * codes[one];
                } else {
                    const RF__N(vec) value = own[0] * codes[one] + own[1];
                    sum[one] = pooled->count == 0 ? value : RF__N(larger)(value, sum[one]);
                }
            }
        }
        if (op != RF__MAX) pooled->sums[0] += own;
        pooled->count++;
    }
    return true;
}

/* Writes the columns of a bag. */
static RF__INLINE void RF__N(store_pooled)(const RF__N(pooled) * pooled, char *output, int64_t columns,
                                           rf_pooling pooling, const int vectors, const bool part,
                                           const bool pairs, const rf_dtype dtype, rf_dtype output_dtype) {
    RF__N(vec) sum[8];
    const float biases = pooled->sums[0][1] + pooled->sums[1][1];
    RF__UNROLL
    for (int v = 0; v < vectors; v++) {
        sum[v] = pairs ? pooled->chain[0][v] + pooled->chain[1][v] : pooled->chain[0][v];
        sum[v] += biases;
        if (pooled->count > 1 && pooling == RF_MEAN) sum[v] /= (float)pooled->count;
    }
    RF__UNROLL
    for (int v = 0; v < vectors; v++) {
        if (RF__N(is_apart)(vectors, dtype) && v % 2 == 0) RF__N(interleave)(&sum[v], &sum[v + 1]);
        RF__N(store_part)(output + rf__elements_bytes(output_dtype, v * RF__W), part ? columns : RF__W,
                          sum[v], output_dtype);
    }
}

/* Columns [column, column + columns) of bags [first, last), as pool_chunk; false at an invalid index. */
static RF__INLINE bool RF__N(quantized_bags)(const rf__pool_call *call, const rf__table *table, int64_t first,
                                             int64_t last, int64_t column, int64_t columns, rf__ahead *ahead,
                                             const int vectors, const bool part, const bool fast,
                                             const bool planar, const rf_dtype dtype,
                                             const rf_int_type index_type, const int op) {
    char *output = table->output + rf__row_offset(&call->output_row, first, column);
    const float *sample_weights = op == RF__WEIGHTED ? call->sample_weights : NULL;
    const int64_t chunk_bytes = rf__elements_bytes(dtype, vectors * RF__W);
    const int lines = chunk_bytes < 64 ? 1 : (int)(chunk_bytes / 64);
    const rf__place rows = {rf__element_at(table->weight, dtype, column),
                            table->parameters,
                            table->row.pitch,
                            table->row.parameters_pitch,
                            columns,
                            table->limit,
                            call->indices,
                            table->row.parameters_dtype};
    /* The same columns for every width: those after the last whole 64 of a row. */
    const bool pairs = fast && vectors * RF__W < 64 && (RF__W > 4 || column >= table->row.dim / 64 * 64);
    int64_t to = rf__bag_start(call, table->feature, first);
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t from = to;
        to = rf__bag_start(call, table->feature, bag + 1);
        RF__N(pooled) pooled = {0};
        rf__sweep_on(ahead);
        for (int64_t i = from, end; i < to; i = end) {
            end = to - i < 2 * LOOKED_TOGETHER ? to : i + LOOKED_TOGETHER;
            rf__look_on(ahead, call->indices, index_type, end - i, lines);
            const bool good = fast ? RF__N(quantized_sum)(&rows, i, end, &pooled, vectors, part, pairs,
                                                          planar, dtype, index_type)
                                   : RF__N(quantized_lookups)(&rows, i, end, sample_weights,
                                                              op == RF__SUM ? -1 : table->padding_idx,
                                                              &pooled, vectors, part, dtype, index_type, op);
            if (!good) return false;
        }
        RF__N(store_pooled)(&pooled, output, columns, op == RF__MAX ? RF_MAX : table->pooling, vectors, part,
                            pairs, dtype, call->output_row.dtype);
        output += call->output_row.pitch;
    }
    return true;
}

static RF__INLINE bool RF__N(quantized_chunk)(const rf__pool_call *call, const rf__table *table,
                                              int64_t first, int64_t last, int64_t column, int64_t columns,
                                              rf__ahead *ahead, const int vectors, const bool part,
                                              const rf_dtype dtype, const rf_int_type index_type,
                                              const int op) {
#define RF__BAGS(fast, planar)                                                                           \
    RF__N(quantized_bags)(call, table, first, last, column, columns, ahead, vectors, part, fast, planar, \
                          dtype, index_type, op)
    if (op != RF__SUM || table->row.parameters_dtype != RF_FLOAT16) return RF__BAGS(false, false);
    if (table->row.parameters_pitch != rf__parameters_bytes(RF_FLOAT16)) return RF__BAGS(true, false);
    return RF__BAGS(true, true);
#undef RF__BAGS
}
