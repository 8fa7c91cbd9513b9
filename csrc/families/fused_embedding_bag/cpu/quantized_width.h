/* Pools bags of quantised rows with vectors of RF__W floats. Included between vector.h and pool_width.h with the
 * same RF__W.
 *
 * A sum has two parts: the codes times their scales, and the biases, which are summed once a row and added at the
 * end of a bag. A half has 11 bits and a code 8, so their product is exact in float32: product and addition
 * give the same result as a fused multiply-add, on every instruction set.
 */
typedef uint8_t RF__N(bvec) __attribute__((vector_size(RF__W)));
typedef uint8_t RF__N(nvec) __attribute__((vector_size(RF__W / 2)));
typedef uint16_t RF__N(pvec) __attribute__((vector_size(RF__W)));

#if defined(__AVX2__)
#undef RF__OF_SET
#if RF__W == 16 && defined(__AVX512F__)
#define RF__OF_SET(name) _mm512_##name
typedef __m512i rf__ints16;
#elif RF__W == 8
#define RF__OF_SET(name) _mm256_##name
typedef __m256i rf__ints8;
#else
#define RF__OF_SET(name) _mm_##name
typedef __m128i rf__ints4;
#endif
#endif

/* The codes of RF__W adjacent elements. Of int4 the low half of a byte comes first. Compilers split conversions of
 * GNU vectors into single elements, so these are the instruction set's. */
static RF__INLINE RF__N(vec) RF__N(codes)(const char *from, const rf_dtype dtype) {
    const bool is_int4 = dtype == RF_INT4_ROWS;
#if defined(__AVX2__)
    if (is_int4) { /* byte i to elements 2 i and 2 i + 1, which take its halves */
        long long bytes = 0;
        memcpy(&bytes, from, RF__W / 2);
        RF__N(uvec) pairs, shifts;
        RF__N(rf__ints) spread;
        for (int i = 0; i < RF__W; i++) {
            pairs[i] = (uint32_t)(i / 2) | 0x80808000u; /* zeros above the byte */
            shifts[i] = i % 2 * 4;
        }
        spread = RF__OF_SET(shuffle_epi8)((RF__N(rf__ints)){0} | bytes, (RF__N(rf__ints))pairs);
        const RF__N(uvec) elements = (RF__N(uvec))spread >> shifts & 15u;
        return (RF__N(vec))RF__OF_SET(cvtepi32_ps)((RF__N(rf__ints))elements);
    }
    __m128i codes = _mm_setzero_si128();
    memcpy(&codes, from, RF__W);
    return (RF__N(vec))RF__OF_SET(cvtepi32_ps)(RF__OF_SET(cvtepu8_epi32)(codes));
#else
    RF__N(bvec) codes;
    if (is_int4) {
        RF__N(nvec) bytes;
        memcpy(&bytes, from, sizeof bytes);
        const RF__N(pvec) pairs = __builtin_convertvector(bytes, RF__N(pvec));
        codes = (RF__N(bvec))((pairs | pairs << 4) & 0x0f0f);
    } else {
        memcpy(&codes, from, sizeof codes);
    }
    return __builtin_convertvector(__builtin_convertvector(codes, RF__N(ivec)), RF__N(vec));
#endif
}

/* sum + scale * codes, for a scale that was a half. */
static RF__INLINE RF__N(vec) RF__N(add_codes)(RF__N(vec) sum, float scale, RF__N(vec) codes) {
#if defined(__AVX2__) && defined(__FMA__)
    return (RF__N(vec))RF__OF_SET(fmadd_ps)(RF__OF_SET(set1_ps)(scale), codes, sum);
#else
    return sum + scale * codes;
#endif
}

/* As above, of the first n elements; zeros after them. Nothing past them is read. */
static RF__INLINE RF__N(vec) RF__N(codes_part)(const char *from, int64_t n, const rf_dtype dtype) {
    char part[RF__W] = {0};
    memcpy(part, from, (size_t)rf__elements_bytes(dtype, n));
    return RF__N(codes)(part, dtype);
}

/* Adds lookups [from, to) to sum, and their biases to *biases; false at an invalid index. Parameters are halves.
 * `pairs`: in two chains, because in a single chain each addition would wait for the previous one. */
static RF__INLINE bool RF__N(quantized_sum)(const rf__place *rows, rf__look *look, int64_t from, int64_t to,
                                            RF__N(vec) * sum, rf__row_parameters *biases, const int vectors,
                                            const bool part, const bool pairs, const int lines,
                                            const rf_dtype dtype, const rf_int_type index_type) {
    RF__N(vec) chain[2][8] = {{{0}}};
    rf__row_parameters of_chain[2] = {{0}};
    int64_t i = from;
#define RF__ADD(c)                                                                                      \
    do {                                                                                                \
        rf__look_ahead_quantized(look, rows->indices, index_type, lines);                               \
        const int64_t at = rf__load_int(rows->indices, index_type, i + (c));                            \
        if (__builtin_expect((uint64_t)at >= rows->limit, 0)) return false;                             \
        const char *row = rows->weight + at * rows->pitch;                                              \
        const rf__row_parameters of_row =                                                               \
            rf__row_parameters_at(rows->parameters + at * rows->parameters_pitch, RF_FLOAT16);          \
        of_chain[c] += of_row;                                                                          \
        RF__UNROLL                                                                                      \
        for (int v = 0; v < vectors; v++) {                                                             \
            const RF__N(vec) codes = part ? RF__N(codes_part)(row, rows->columns, dtype)                \
                                          : RF__N(codes)(rf__element_at(row, dtype, v * RF__W), dtype); \
            chain[c][v] = RF__N(add_codes)(chain[c][v], of_row[0], codes);                              \
        }                                                                                               \
    } while (0)
    for (; pairs && i + 2 <= to; i += 2) {
        RF__ADD(0);
        RF__ADD(1);
    }
    for (; i < to; i++) RF__ADD(0);
#undef RF__ADD
    RF__UNROLL
    for (int v = 0; v < vectors; v++) sum[v] = pairs ? chain[0][v] + chain[1][v] : chain[0][v];
    *biases = of_chain[0] + of_chain[1];
    return true;
}

/* Columns [column, column + columns) of bags [first, last), as pool_chunk; false at an invalid index. */
static RF__INLINE bool RF__N(quantized_chunk)(const rf__pool_call *call, const rf__table *table,
                                              int64_t first, int64_t last, int64_t column, int64_t columns,
                                              rf__ahead *ahead, const int vectors, const bool part,
                                              const rf_dtype dtype, const rf_int_type index_type,
                                              const int op) {
    const rf_dtype output_dtype = call->output_row.dtype;
    const int64_t vector_bytes = rf__elements_bytes(dtype, RF__W);
    const int64_t output_bytes = rf__elements_bytes(output_dtype, RF__W); /* of a vector */
    const int lines = vectors * (int)vector_bytes < 64 ? 1 : vectors * (int)vector_bytes / 64;
    const char *weight = rf__element_at(table->weight, dtype, column);
    char *output = table->output + rf__row_offset(&call->output_row, first, column);
    const rf_dtype parameters_dtype = table->row.parameters_dtype;
    const char *parameters = table->parameters;
    const int64_t pitch = table->row.pitch, parameters_pitch = table->row.parameters_pitch;
    const int64_t padding_idx = table->padding_idx;
    const uint64_t limit = table->limit;
    const void *indices = call->indices;
    const float *sample_weights = op == RF__WEIGHTED ? call->sample_weights : NULL;
    const rf__place rows = {weight, parameters, pitch, parameters_pitch, columns, limit, indices};
    /* The same columns for every width: those after the last whole 64 of a row. */
    const bool pairs = vectors * RF__W < 64 && (RF__W > 4 || column >= table->row.dim / 64 * 64);
    rf__look look = rf__look_open(ahead);
    int64_t to = rf__bag_start(call, table->feature, first);
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t from = to;
        to = rf__bag_start(call, table->feature, bag + 1);
        RF__N(vec) sum[8] = {{0}};
        int64_t count = 0;
        rf__row_parameters biases = {0};
        if (op == RF__SUM && parameters_dtype == RF_FLOAT16) {
            if (!RF__N(quantized_sum)(&rows, &look, from, to, sum, &biases, vectors, part, pairs, lines,
                                      dtype, index_type))
                return false;
            count = to - from;
        }
        for (int64_t i = from + count; i < to; i++) {
            rf__look_ahead_quantized(&look, indices, index_type, lines);
            const int64_t at = rf__load_int(indices, index_type, i);
            if (__builtin_expect((uint64_t)at >= limit, 0)) return false;
            if (op != RF__SUM && at == padding_idx) continue;
            const char *row = weight + at * pitch;
            rf__row_parameters of_row =
                rf__row_parameters_at(parameters + at * parameters_pitch, parameters_dtype);
            if (sample_weights != NULL) of_row *= sample_weights[i];
            RF__UNROLL
            for (int v = 0; v < vectors; v++) {
                const RF__N(vec) codes = part ? RF__N(codes_part)(row, columns, dtype)
                                              : RF__N(codes)(row + v * vector_bytes, dtype);
                if (op != RF__MAX) {
                    sum[v] += of_row[0] * codes;
                } else {
                    const RF__N(vec) value = of_row[0] * codes + of_row[1];
                    sum[v] = count == 0 ? value : RF__N(larger)(value, sum[v]);
                }
            }
            if (op != RF__MAX) biases += of_row;
            count++;
        }
        RF__UNROLL
        for (int v = 0; v < vectors; v++) {
            sum[v] += biases[1];
            if (op != RF__MAX && count > 1 && table->pooling == RF_MEAN) sum[v] /= (float)count;
            RF__N(store_part)(output + v * output_bytes, part ? columns : RF__W, sum[v], output_dtype);
        }
        output += call->output_row.pitch;
    }
    rf__look_close(&look, ahead);
    return true;
}
