/* The rows in flight of a lane: they are loaded, then added to the lane's part of a bag. */
#ifndef RECFUSE_FUSED_POOL_ROWS_CUH
#define RECFUSE_FUSED_POOL_ROWS_CUH

#include "families/fused_embedding_bag/pool/pool_shape.cuh"

/* The partial result of a lane for a bag. */
template <class S> struct rf_pooled {
    float sum[S::VECTORS * S::ELEMENTS];
    int counted; /* lookups that are valid and not padding */
    bool any; /* a row was added, for a maximum */
    float bias; /* of quantised rows: the sum of their biases, each once, in all lanes of the slot */
};

/* The rows in flight of a lane. */
template <class S> struct rf_flight {
    typename S::vector row[S::DISTANCE][S::VECTORS];
    bool valid[S::DISTANCE];
    rf_bytes<4> parameters[S::QUANTIZED ? S::DISTANCE : 1]; /* halves: scale, bias */
};

/* The feature of a thread, and its position in the bag's group of threads. */
template <class S> struct rf_pool_source {
    const rf_u8 *table; /* this lane's first vector of row 0 */
    rf_rows rows;
    rf_u32 row_pitch;
    RF_INDEX padding = 0;
    rf_u8 *output; /* this lane's first vector of the output of bag 0 */
    int second; /* bytes from a lane's first vector to its second */
    const rf_u8 *of_parameters; /* of a quantised table: scale and bias of row 0 */
    rf_u32 parameters_pitch;

    RF_INLINE rf_pool_source(const rf_fused_args &args, const rf_fused_task &task) {
        const rf_fused_descriptor &feature = args.features[task.feature];
        const int column = column_of(task);
        table = rf_load(&feature.weight);
        rows = rf_rows_of(feature);
        output = args.output + rf_load(&feature.output_offset) +
                 (rf_i64)column * S::ELEMENTS * rf_element<RF_OUTPUT>::BYTES;
        if (S::WHOLE) {
            table += (rf_i64)column * S::ALIGN;
        } else {
            /* Lanes past the end of a narrow row read its last vector; their results are dropped. */
            const int last = rf_load(&feature.columns) - 1;
            table += (rf_i64)min(column, last) * S::ALIGN;
            second = (min(column + S::LANES, last) - min(column, last)) * S::ALIGN;
            row_pitch = rf_load(&feature.pitch);
        }
        if (S::PADDED) padding = (RF_INDEX)rf_load(&feature.padding_idx);
        if (S::QUANTIZED) {
            of_parameters = rf_load(&feature.parameters);
            parameters_pitch = rf_load(&feature.parameters_pitch);
        }
        /* One base address, to which one instruction adds the offset of a row. */
        asm volatile("" : "+l"(table));
    }
    RF_INLINE rf_u32 pitch() const { return S::WHOLE ? S::LANES * S::ALIGN : row_pitch; }
    /* Returns vector `i` of this lane in a row. */
    RF_INLINE typename S::vector row(rf_row_number number, int i) const {
        return rf_load((const typename S::vector *)(rf_row(table, number, pitch()) + i * second));
    }
    /* Returns the scale and the bias of a row. */
    RF_INLINE rf_bytes<4> parameters(rf_row_number number) const {
        return rf_load((const rf_bytes<4> *)rf_row(of_parameters, number, parameters_pitch));
    }
    static RF_INLINE int slot() { return threadIdx.x % S::GROUP / S::LANES; }
    /* Returns the lane's first vector of a row. */
    static RF_INLINE int column_of(const rf_fused_task &task) {
        return (S::WHOLE ? 0 : task.slice * S::LANES * S::VECTORS) + threadIdx.x % S::LANES;
    }
};

/* Loads the rows of a round. */
template <class S>
RF_INLINE void rf_fetch(const rf_pool_source<S> &from, int round, const rf_four_rows (&numbers)[S::BATCH / 4],
                        rf_flight<S> &flight) {
#pragma unroll
    for (int k = 0; k < S::DISTANCE; k++) {
        const int row_number = round * S::DISTANCE + k;
        const rf_row_number number = numbers[row_number / 4].number[row_number % 4];
        flight.valid[k] = number != RF_NO_ROW;
        if (S::QUANTIZED) {
            flight.parameters[k] = {};
            if (flight.valid[k]) flight.parameters[k] = from.parameters(number);
        }
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
            flight.row[k][i] = {};
            if (flight.valid[k]) flight.row[k][i] = from.row(number, i);
        }
    }
}

/* Adds the rows that rf_fetch loaded; missing rows are zeros. `position`: the slot's first lookup. */
template <class S>
RF_INLINE void rf_add_flight(const float *sample_weights, RF_POSITION position, int round,
                             const rf_flight<S> &flight, rf_pooled<S> &to) {
#pragma unroll
    for (int k = 0; k < S::DISTANCE; k++) {
        const int row_number = round * S::DISTANCE + k;
        const RF_POSITION at = position + row_number / S::CHUNK * S::LOAD_STEP + row_number % S::CHUNK;
        const bool valid = flight.valid[k];
        float scale = RF_WEIGHTED && valid ? rf_load(sample_weights + at) : 0.0f, bias = 0.0f;
        if (S::QUANTIZED) {
            const rf_element<RF_FLOAT16> half;
            const float row_scale = half.get(flight.parameters[k], 0);
            bias = half.get(flight.parameters[k], 1) * (RF_WEIGHTED ? scale : 1.0f);
            scale = row_scale * (RF_WEIGHTED ? scale : 1.0f);
            to.bias += bias;
        }
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
#pragma unroll
            for (int e = 0; e < S::ELEMENTS; e++) {
                float &sum = to.sum[i * S::ELEMENTS + e];
                float value = S::element::get(flight.row[k][i], e);
                if (S::POOLING == RF_MAX) {
                    if (S::QUANTIZED) value = fmaf(scale, value, bias);
                    if (valid && (!to.any || value > sum)) sum = value;
                } else if (RF_WEIGHTED || S::QUANTIZED) {
                    sum = fmaf(scale, value, sum);
                } else {
                    sum += value;
                }
            }
        }
        if (S::POOLING == RF_MAX) to.any |= valid;
    }
}

#endif
