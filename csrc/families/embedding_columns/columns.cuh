/* Shared by the kernels of embedding columns: inputs, tables, indices of lookups and stores of the output. */
#ifndef RECFUSE_COLUMNS_CUH
#define RECFUSE_COLUMNS_CUH

#include "families/embedding_columns/columns_steps.cuh"

/* Returns an input of any form as rf_columns_tensor. */
RF_INLINE rf_columns_tensor rf_column_tensor_of(const rf_columns_args &args, int number) {
    if (number >= args.n_dense)
        return ((const rf_columns_tensor *)(args.tensors + args.n_dense))[number - args.n_dense];
    const rf_columns_dense &dense = args.tensors[number];
    return {(const rf_u8 *)(dense.values & (((rf_u64)1 << RF_COLUMNS_HIGH_BYTE) - 1)),
            nullptr,
            nullptr,
            (rf_i64)dense.sample_stride,
            (rf_i64)dense.value_stride,
            (rf_i32)(dense.values >> RF_COLUMNS_HIGH_BYTE),
            0};
}

/* Returns the place of the dense values `value` of all samples. */
RF_INLINE rf_column_array rf_column_dense(const rf_columns_args &args, const rf_columns_source &source,
                                          int value) {
    const rf_columns_tensor input = rf_column_tensor_of(args, source.input);
    const int bytes = rf_column_bytes(input.type);
    return {input.values + (source.slot + value) * input.value_stride * bytes, input.sample_stride * bytes,
            input.type};
}

static __device__ __noinline__ void rf_column_report(rf_error_word errors, rf_argument argument, int column,
                                                     rf_i64 position, rf_i64 sample, rf_i64 value,
                                                     rf_i64 limit, rf_i64 lookups) {
    const rf_offender offender = {argument, position, sample, value, limit, lookups};
    rf_report<RF_OPERATOR_embedding_columns>(errors, offender, column);
}

/* Returns the row of an index, or -1. Sets `bad` to `number` if the index is an error. */
RF_INLINE rf_i64 rf_column_row(const rf_columns_column &column, rf_i64 index, int number, int &bad) {
    if ((rf_u64)index < (rf_u64)column.rows) return index;
    if (column.invalid != RF_COLUMN_INVALID_ERROR) return column.invalid;
    bad = number;
    return -1;
}

/* The rows of a table from the first element that is written on. */
struct rf_column_table {
    const rf_u8 *rows;
    rf_i64 pitch;
    int dtype;
};
RF_INLINE rf_column_table rf_column_table_of(const rf_columns_args &args, const rf_columns_column &column) {
    const rf_columns_buffer buffer =
        ((const rf_columns_buffer *)(args.tensors + args.buffers_at))[column.buffer];
    const int dtype = RF_TABLES >= 0 ? RF_TABLES : (int)(buffer >> RF_COLUMNS_HIGH_BYTE);
    const int bytes = rf_table_element_bytes(dtype);
    const rf_u8 *data = (const rf_u8 *)(buffer & (((rf_u64)1 << RF_COLUMNS_HIGH_BYTE) - 1));
    return {data + (column.weight_offset + column.first_dim) * bytes, (rf_i64)column.dim * bytes, dtype};
}

/* Computes the indices of N lookups, not yet checked against the table: of one value, or of the hash of two
 * values. where(right, source, at) returns the place of the values of a source and sets their numbers. */
template <int N, class W>
RF_INLINE void rf_column_indices(const rf_columns_args &args, const rf_column_work &work,
                                 const rf_columns_column &column, const W &where,
                                 rf_column_values<N> &values) {
    rf_column_values<N> left = {};
    const int sides = column.right >= 0 ? 2 : 1;
#pragma unroll 1
    for (int side = 0; side < sides; side++) { /* both sides share the code of the steps */
        const rf_columns_source &source = work.source(side == 0 ? column.left : column.right);
        rf_i64 at[N];
        const rf_column_array array = where(side, source, at);
        left = values;
        values.load(array, at);
        rf_column_steps(args, work, source, array.type, values);
    }
    if (sides == 1) return;
#pragma unroll
    for (int i = 0; i < N; i++)
        values.integer[i] =
            (rf_i64)rf_column_high(rf_column_hash_pair(left.integer[i], values.integer[i], column.cross_seed),
                                   (rf_u64)column.cross_buckets);
}

/* Returns true if the output takes V elements of a column at once. Otherwise elements are written singly: the
 * rows of the output may have any length, and narrow columns of numbers may lie between others. */
template <int V>
RF_INLINE bool rf_column_is_whole(const rf_columns_args &args, const rf_columns_column &column) {
    return V == 1 || (args.output_vector >= V && column.output_column % V == 0);
}
template <int V> RF_INLINE void rf_column_store(rf_u8 *to, const float (&values)[V], bool is_whole) {
    if (!is_whole) {
#pragma unroll
        for (int i = 0; i < V; i++)
            *(rf_elements<RF_OUTPUT, 1> *)(to + i * OUTPUT_BYTES) = rf_elements_of<RF_OUTPUT, 1>(values + i);
        return;
    }
    *(rf_elements<RF_OUTPUT, V> *)to = rf_elements_of<RF_OUTPUT, V>(values);
}

/* Returns an address in a row, or a readable address if there is no row. Loads then need no branch, and loads
 * of several rows are issued back to back. */
RF_INLINE const rf_u8 *rf_column_readable(const rf_columns_args &args, const rf_u8 *row, int offset) {
    return row != nullptr ? row + offset : (const rf_u8 *)args.program;
}

/* Calls work.operator()<V, DTYPE>() for the vector of a task and the dtype of a table. */
template <int V, class W> RF_INLINE void rf_column_for_dtype(int dtype, const W &work) {
    if (RF_TABLES >= 0) return work.template run<V, RF_TABLES >= 0 ? RF_TABLES : 0>();
    if (dtype == RF_FLOAT32) work.template run<V, RF_FLOAT32>();
    if (dtype == RF_FLOAT16) work.template run<V, RF_FLOAT16>();
    if (dtype == RF_BFLOAT16) work.template run<V, RF_BFLOAT16>();
}
template <class W> RF_INLINE void rf_column_for(int vector, int dtype, const W &work) {
    if (vector == 4) return rf_column_for_dtype<4>(dtype, work);
    if (RF_TABLES >= 0 && vector == 2) return rf_column_for_dtype<2>(dtype, work);
    rf_column_for_dtype<1>(dtype, work);
}
/* Returns the vector that the lanes of a task read and write. For mixed dtypes it is 4 or 1, to limit the
 * compile time. */
RF_INLINE int rf_column_width(const rf_columns_args &args, const rf_column_work &work) {
    const int vector = min(work.task().vector, args.vector);
    return RF_TABLES >= 0 || vector == 4 ? vector : 1;
}

#endif
