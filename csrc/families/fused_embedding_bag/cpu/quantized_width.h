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

/* The codes of RF__W adjacent elements. Of int4 the low half of a byte comes first. Compilers split conversions of
 * GNU vectors into single elements, so these are the instruction set's. */
static RF__INLINE RF__N(vec) RF__N(codes)(const char *from, const rf_dtype dtype) {
    const bool is_int4 = dtype == RF_INT4_ROWS;
#if defined(__AVX2__)
    __m128i codes = _mm_setzero_si128();
    memcpy(&codes, from, is_int4 ? RF__W / 2 : RF__W);
    if (is_int4) {
        const __m128i pairs = _mm_cvtepu8_epi16(codes);
        codes = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)), _mm_set1_epi16(0x0f0f));
    }
#if RF__W == 16 && defined(__AVX512F__)
    return (vec16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
#elif RF__W == 8
    return (vec8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
#else
    return (vec4)_mm_cvtepi32_ps(_mm_cvtepu8_epi32(codes));
#endif
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

/* As above, of the first n elements; zeros after them. Nothing past them is read. */
static RF__INLINE RF__N(vec) RF__N(codes_part)(const char *from, int64_t n, const rf_dtype dtype) {
    char part[RF__W] = {0};
    memcpy(part, from, (size_t)rf__elements_bytes(dtype, n));
    return RF__N(codes)(part, dtype);
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
    rf__look look = rf__look_open(ahead);
    int64_t to = rf__bag_start(call, table->feature, first);
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t from = to;
        to = rf__bag_start(call, table->feature, bag + 1);
        RF__N(vec) sum[8] = {{0}};
        int64_t count = 0;
        float bias = 0.0f;
        for (int64_t i = from; i < to; i++) {
            rf__look_ahead_quantized(&look, indices, index_type, lines);
            const int64_t at = rf__load_int(indices, index_type, i);
            if (__builtin_expect((uint64_t)at >= limit, 0)) return false;
            if (op != RF__SUM && at == padding_idx) continue;
            const char *row = weight + at * pitch;
            rf__row_parameters of_row =
                rf__row_parameters_at(parameters + at * parameters_pitch, parameters_dtype);
            if (sample_weights != NULL) {
                of_row.scale *= sample_weights[i];
                of_row.bias *= sample_weights[i];
            }
            RF__UNROLL
            for (int v = 0; v < vectors; v++) {
                const RF__N(vec) codes = part ? RF__N(codes_part)(row, columns, dtype)
                                              : RF__N(codes)(row + v * vector_bytes, dtype);
                if (op != RF__MAX) {
                    sum[v] += of_row.scale * codes;
                } else {
                    const RF__N(vec) value = of_row.scale * codes + of_row.bias;
                    sum[v] = count == 0 ? value : RF__N(larger)(value, sum[v]);
                }
            }
            if (op != RF__MAX) bias += of_row.bias;
            count++;
        }
        RF__UNROLL
        for (int v = 0; v < vectors; v++) {
            sum[v] += bias;
            if (op != RF__MAX && count > 1 && table->pooling == RF_MEAN) sum[v] /= (float)count;
            RF__N(store_part)(output + v * output_bytes, part ? columns : RF__W, sum[v], output_dtype);
        }
        output += call->output_row.pitch;
    }
    rf__look_close(&look, ahead);
    return true;
}
