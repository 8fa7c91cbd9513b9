/* Columns of numbers, and columns whose samples have one index each. */
#ifndef RECFUSE_COLUMNS_ROWS_CUH
#define RECFUSE_COLUMNS_ROWS_CUH

#include "families/embedding_columns/columns.cuh"

enum { VALUES = 4, ROWS_IN_FLIGHT = RF_TABLES >= 0 ? 8 : 4 /* per thread */ };

/* The addresses of rows by column and sample; NULL: no row. The pitch of a column is samples + 1, so that
 * lanes with adjacent columns access different banks. */
RF_INLINE const rf_u8 **rf_column_addresses(rf_u8 *scratch, int samples, int column) {
    return (const rf_u8 **)scratch + column * (samples + 1);
}

/* Computes the rows of a task and calls found(column, number of the column in the task, sample of the block,
 * row or -1). A thread has one column and VALUES samples at a time, so that it reads the steps once for all
 * of them. Adjacent threads have samples of one column, or, if adjacent columns are adjacent in memory and
 * take the same steps, columns of one sample. */
template <class F>
RF_INLINE void rf_column_find_rows(const rf_columns_args &args, const rf_column_work &work, const F &write) {
    const int n_columns = work.task().n_columns;
    const int log_columns = n_columns > 1 ? 32 - __clz(n_columns - 1) : 0;
    const int threads = BLOCK >> log_columns; /* threads of a column */
    const rf_columns_tensor first = rf_column_tensor_of(args, work.source(work.column(0).left).input);
    const bool across = work.task().alike && first.value_stride < first.sample_stride;
    const int column_number =
        across ? (int)threadIdx.x & ((1 << log_columns) - 1) : (int)threadIdx.x / threads;
    const int array = across ? (int)threadIdx.x >> log_columns : (int)threadIdx.x & (threads - 1);
    if (column_number >= n_columns) return;
    const rf_columns_column &column = work.column(column_number);
#pragma unroll 1
    for (int base = array; base < work.samples; base += VALUES * threads) {
        rf_column_values<VALUES> values = {};
        const auto sample = [&](int i) { /* repeats the last sample past the end */
                                         return work.first + min(base + i * threads, work.samples - 1);
        };
        rf_column_indices(
            args, work, column,
            [&](int, const rf_columns_source &source, rf_i64(&at)[VALUES]) {
#pragma unroll
                for (int i = 0; i < VALUES; i++) at[i] = sample(i);
                return rf_column_dense(args, source, 0);
            },
            values);
        int bad = -1;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int at = base + i * threads;
            if (at >= work.samples) break;
            const rf_i64 row = rf_column_row(column, values.integer[i], i, bad);
            write(column, column_number, at, row < 0 ? column.empty : row);
        }
        if (RF_CHECK && bad >= 0)
            rf_column_report(args.errors, RF_ARGUMENT_column_index, column.number, -1, sample(bad),
                             values.of(bad), column.rows, 0);
    }
}

/* Copies rows: a lane has one position in the output's rows, a warp some samples. */
struct rf_column_copy {
    const rf_columns_args &args;
    const rf_column_work &work;
    rf_u8 *scratch;
    const rf_columns_column &column;
    int column_number, element; /* the lane's column, and its first element in that column */

    template <int V, int DTYPE> RF_INLINE void run() const {
        typedef rf_element<DTYPE> of;
        typedef rf_elements<DTYPE, V> vector;
        const rf_u8 *const *addresses = rf_column_addresses(scratch, work.capacity, column_number);
        const int warp = threadIdx.x / 32;
#pragma unroll 1
        for (int e = element; e < element + work.task().vector; e += V) {
            rf_u8 *output = args.output + work.first * args.output_pitch +
                            (rf_i64)(column.output_column + e) * OUTPUT_BYTES;
            asm volatile("" : "+l"(output)); /* keeps the address in one register pair instead of a sum */
            const bool is_whole = rf_column_is_whole<V>(args, column);
            const int row_offset = e * of::BYTES, last = work.samples - 1;
#pragma unroll 1
            for (int base = warp; base <= last; base += WARPS * ROWS_IN_FLIGHT) {
                bool there[ROWS_IN_FLIGHT];
                vector row[ROWS_IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; i++) {
                    const rf_u8 *from = addresses[min(base + i * WARPS, last)];
                    there[i] = from != nullptr;
                    row[i] = rf_load_first((const vector *)rf_column_readable(args, from, row_offset));
                }
                /* Reads the scale after the rows are requested. Otherwise the compiler waits for the first
                 * row and scales it before it requests the last ones. */
                if (RF_TABLES >= 0) __syncwarp();
                const float scale = *(const volatile float *)&column.scale, fill = column.fill;
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; i++) { /* repeats the last sample past the end */
                    float values[V];
#pragma unroll
                    for (int j = 0; j < V; j++) values[j] = there[i] ? of::get(row[i], j) * scale : fill;
                    const rf_u32 at = (rf_u32)min(base + i * WARPS, last);
                    rf_column_store<V>(output + (rf_u64)at * (rf_u32)args.output_pitch, values, is_whole);
                }
            }
        }
    }
};

RF_INLINE void rf_column_rows(const rf_columns_args &args, const rf_column_work &work, rf_u8 *scratch) {
    rf_column_find_rows(args, work,
                        [&](const rf_columns_column &write, int column_number, int at, rf_i64 row) {
                            const rf_column_table table = rf_column_table_of(args, write);
                            rf_column_addresses(scratch, work.capacity, column_number)[at] =
                                row < 0 ? nullptr : table.rows + row * table.pitch;
                        });
    __syncthreads();
    const int n_lanes = work.task().n_lanes;
    if (n_lanes == 0) return;
    const rf_columns_lane own = work.lane(
        min((int)threadIdx.x % 32, n_lanes - 1)); /* surplus lanes repeat the work of the last lane */
    const rf_columns_column &column = work.column(own.column);
    const rf_column_copy copy = {args, work, scratch, column, own.column, own.element};
    rf_column_for(rf_column_width(args, work), rf_column_table_of(args, column).dtype, copy);
}

/* Writes numbers: a lane has one position in the output's rows, a warp some samples. */
RF_INLINE void rf_column_numbers(const rf_columns_args &args, const rf_column_work &work) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane >= work.task().n_lanes) return;
    const rf_columns_lane own = work.lane(lane);
    const rf_columns_column &column = work.column(own.column);
    const rf_columns_source &source = work.source(column.left);
    const rf_column_array array = rf_column_dense(args, source, own.element);
    rf_u8 *output = args.output + work.first * args.output_pitch +
                    (rf_i64)(column.output_column + own.element) * OUTPUT_BYTES;
#pragma unroll 1
    for (int base = warp; base < work.samples; base += VALUES * WARPS) {
        rf_column_values<VALUES> values;
        rf_i64 sample[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++) sample[i] = work.first + min(base + i * WARPS, work.samples - 1);
        values.load(array, sample);
        const bool floats = rf_column_steps(args, work, source, array.type, values);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int at = base + i * WARPS;
            const float number[1] = {floats ? values.number(i) : (float)values.integer[i]};
            if (at < work.samples) rf_column_store<1>(output + at * args.output_pitch, number, true);
        }
    }
}

#endif
