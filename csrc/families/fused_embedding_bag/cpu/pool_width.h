/* Pools bags with vectors of RF__W floats. Included after vector.h with the same RF__W.
 *
 * A bag is pooled in chunks of columns that stay in registers: 8, 4, 2 or 1 vectors, or a part of a vector.
 * Narrow rows are summed in several chains, because in a single chain each addition would wait for the
 * previous one.
 */

/* Columns [column, column + columns) of bags [first, last); false at an invalid index. `vectors` and `part`
 * (one vector, of which fewer columns are used), `dtype`, `index_type` and `op` are constants wherever this
 * is inlined. */
static RF__FOR_CONSTANTS bool RF__N(pool_chunk)(const rf__pool_call *call, const rf__table *table,
                                                int64_t first, int64_t last, int64_t column, int64_t columns,
                                                rf__ahead *ahead, const int vectors, const bool part,
                                                const rf_dtype dtype, const rf_int_type index_type,
                                                const int op) {
    if (rf_is_quantized((int)dtype))
        return RF__N(quantized_chunk)(call, table, first, last, column, columns, ahead, vectors, part, dtype,
                                      index_type, op);
    const int chains = op != RF__SUM || vectors > 2 ? 1 : vectors == 2 ? 2 : 4;
    const rf_dtype output_dtype = call->output_row.dtype;
    const int64_t vector_bytes = rf__elements_bytes(dtype, RF__W);
    const int64_t output_bytes = rf__elements_bytes(output_dtype, RF__W); /* of a vector */
    const int lines = vectors * (int)vector_bytes < 64 ? 1 : vectors * (int)vector_bytes / 64;
    const char *weight = rf__element_at(table->weight, dtype, column);
    char *output = table->output + rf__row_offset(&call->output_row, first, column);
    const int64_t pitch = table->row.pitch, padding_idx = table->padding_idx;
    const uint64_t limit = table->limit;
    const void *indices = call->indices;
    const float *sample_weights = op == RF__WEIGHTED ? call->sample_weights : NULL;
    rf__look look = rf__look_open(ahead);
    int64_t to = rf__bag_start(call, table->feature, first);
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t from = to;
        to = rf__bag_start(call, table->feature, bag + 1);
        RF__N(vec) sum[8] = {{0}};
        int64_t count = to - from, i = from;
#define RF__READ(row, v) \
    (part ? RF__N(load_part)(row, columns, dtype) : RF__N(load)((row) + (v) * vector_bytes, dtype))
        if (op == RF__SUM) {
            RF__N(vec) chain[4][2] = {{{0}}};
            for (; chains > 1 && i + chains <= to; i += chains) {
                RF__UNROLL
                for (int c = 0; c < chains; c++) {
                    rf__look_ahead(&look, indices, index_type, lines);
                    const int64_t at = rf__load_int(indices, index_type, i + c);
                    if (__builtin_expect((uint64_t)at >= limit, 0)) return false;
                    const char *row = weight + at * pitch;
                    chain[c][0] += RF__READ(row, 0);
                    if (vectors == 2) chain[c][1] += RF__READ(row, 1);
                }
            }
            for (; i < to; i++) {
                rf__look_ahead(&look, indices, index_type, lines);
                const int64_t at = rf__load_int(indices, index_type, i);
                if (__builtin_expect((uint64_t)at >= limit, 0)) return false;
                const char *row = weight + at * pitch;
                RF__UNROLL
                for (int v = 0; v < vectors; v++) sum[v] += RF__READ(row, v);
            }
            for (int v = 0; chains > 1 && v < (vectors < 2 ? vectors : 2); v++) {
                sum[v] += chain[0][v] + chain[1][v];
                if (chains == 4) sum[v] += chain[2][v] + chain[3][v];
            }
        } else {
            count = 0;
            for (; i < to; i++) {
                rf__look_ahead(&look, indices, index_type, lines);
                const int64_t at = rf__load_int(indices, index_type, i);
                if (__builtin_expect((uint64_t)at >= limit, 0)) return false;
                if (at == padding_idx) continue;
                const char *row = weight + at * pitch;
                const float scale = sample_weights != NULL ? sample_weights[i] : 1.0f;
                RF__UNROLL
                for (int v = 0; v < vectors; v++) {
                    RF__N(vec) value = RF__READ(row, v);
                    if (op == RF__WEIGHTED) {
                        sum[v] += scale * value;
                    } else {
                        sum[v] = count == 0 ? value : RF__N(larger)(value, sum[v]);
                    }
                }
                count++;
            }
        }
#undef RF__READ
        RF__UNROLL
        for (int v = 0; v < vectors; v++) {
            if (op != RF__MAX && count > 1 && table->pooling == RF_MEAN) sum[v] /= (float)count;
            RF__N(store_part)(output + v * output_bytes, part ? columns : RF__W, sum[v], output_dtype);
        }
        output += call->output_row.pitch;
    }
    rf__look_close(&look, ahead);
    return true;
}

#undef RF__N
#undef RF__JOIN
#undef RF__JOIN_
#undef RF__W
