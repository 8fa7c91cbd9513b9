/* Lookups of the columns of tables, as bags of one fused call: counts rows per bag, or writes the indices and
 * their factors.
 *
 * Shapes: those of rf_columns_lookups_args. Thread mapping: a block has a task and some samples, as in
 * embedding_columns.cu. If each sample has one index, a thread has one column and some samples (rows.cuh);
 * otherwise a warp has one bag after another and handles 32 lookups at once, in their order. Only the tasks
 * of the first part of a wide column do work. Factors are the weights, divided by a norm according to the
 * pooling; lanes add the norm in a fixed order.
 *
 * RF_WRITE 0: writes counts; 1: writes indices and factors, from the prefix sums of the counts. No write
 * exceeds `capacity`. Shared memory, dynamic: the longest body. Launch: grid [bag_tasks * bag_tiles + other
 * tasks * tiles], block [BLOCK].
 */
#ifndef RF_WRITE
#define RF_WRITE 1
#endif

#include "families/embedding_columns/columns_bags.cuh"
#include "families/embedding_columns/rows.cuh"

/* Writes the lookups of a bag by one warp. */
struct rf_bag_writer {
    const rf_columns_lookups_args &args;
    const rf_column_work &work;
    const rf_columns_column &column;
    const rf_column_bag bag;
    rf_i64 sample;

    /* Returns the row of a lookup, or -1, and sets its weight. The counting pass has reported invalid
     * lookups. */
    RF_INLINE rf_i64 row(rf_i64 number, float &weight) const {
        rf_column_values<1> values = {};
        rf_i64 position = 0;
        rf_column_indices(
            args.call, work, column,
            [&](int right, const rf_columns_source &source, rf_i64(&at)[1]) {
                const rf_columns_tensor input = rf_column_tensor_of(args.call, source.input);
                at[0] = rf_column_element(column, source, input, bag, number, right);
                if (!right) position = at[0];
                return rf_column_array{input.values, rf_column_bytes(input.type), input.type};
            },
            values);
        int bad = -1;
        const rf_i64 row_number = rf_column_row(column, values.integer[0], 0, bad);
        const rf_columns_source &source = work.source(column.left);
        weight = 1.0f;
        if (column.weighted)
            weight = rf_load(rf_column_tensor_of(args.call, source.input).weights + position);
        if (RF_CHECK && !RF_WRITE && bad >= 0)
            rf_column_report(args.call.errors, RF_ARGUMENT_column_index, column.number,
                             source.width > 0 ? -1 : position, sample, values.integer[0], column.rows, 0);
        return row_number;
    }

    RF_INLINE void store(rf_i64 at, rf_i64 index, float factor) const {
        if (at >= args.capacity) return;
        args.indices[at] = index;
        if (args.factors != nullptr) args.factors[at] = factor;
    }

    /* Divides the factors [begin, end), the weights of `n_rows` rows, according to the pooling. The norm is in
     * float64, which holds the square of every float32. */
    RF_INLINE void divide(rf_i64 begin, rf_i64 end, rf_i64 n_rows) const {
        const int lane = threadIdx.x % 32;
        const bool squares = column.pooling == RF_COLUMN_SQRTN;
        double sum = 0.0;
        for (rf_i64 at = begin + lane; column.weighted && at < end; at += 32) {
            const double weight = args.factors[at];
            sum += squares ? weight * weight : weight;
        }
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) sum += __shfl_xor_sync(RF_FULL_WARP, sum, apart);
        if (!column.weighted) sum = (double)n_rows;
        const double by = squares ? sqrt(sum) : sum;
        __syncwarp(); /* lanes have read data that other lanes overwrite */
        for (rf_i64 at = begin + lane; at < end; at += 32) args.factors[at] = (float)(args.factors[at] / by);
    }

    RF_INLINE void write(rf_i64 number) const {
        const int lane = threadIdx.x % 32;
        const rf_i64 start = RF_WRITE ? rf_load(args.offsets + number) : 0;
        rf_i64 n_rows = 0;
#pragma unroll 1
        for (rf_i64 from = 0; from < bag.count; from += 32) {
            float weight = 0.0f;
            const rf_i64 row_number = from + lane < bag.count ? row(from + lane, weight) : -1;
            const rf_u32 valid_lanes = __ballot_sync(RF_FULL_WARP, row_number >= 0);
            if (RF_WRITE && row_number >= 0)
                store(start + n_rows + __popc(valid_lanes & ((1u << lane) - 1)), row_number, weight);
            n_rows += __popc(valid_lanes);
        }
        if (!RF_WRITE) {
            if (lane == 0) args.offsets[number + 1] = n_rows > 0 ? n_rows : column.empty >= 0;
            return;
        }
        if (n_rows == 0) {
            if (lane == 0 && column.empty >= 0) store(start, column.empty, 1.0f);
            return;
        }
        if (args.factors == nullptr || column.pooling == RF_COLUMN_SUM || column.pooling == RF_COLUMN_MAX)
            return;
        __syncwarp(); /* lanes have written data that other lanes read */
        divide(start, min(start + n_rows, args.capacity), n_rows);
    }
};

extern "C" __global__ void __launch_bounds__(RF_COLUMNS_BLOCK)
    rf_columns_lookups(const __grid_constant__ rf_columns_lookups_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    rf_wait_for_previous_kernel();
    const rf_column_work work = rf_column_work_of(args.call, memory);
    if (!RF_WRITE && blockIdx.x == 0 && threadIdx.x == 0) args.offsets[0] = 0;
    if (work.task().kind == RF_COLUMNS_NUMBERS) return;
    if (work.task().kind == RF_COLUMNS_ROWS) {
        rf_column_find_rows(args.call, work, [&](const rf_columns_column &column, int, int at, rf_i64 row) {
            const rf_i64 number = column.table * args.call.batch + work.first + at;
            if (column.table < 0) return;
            if (!RF_WRITE) {
                args.offsets[number + 1] = row >= 0;
            } else if (row >= 0) {
                const rf_i64 to = rf_load(args.offsets + number);
                if (to < args.capacity) args.indices[to] = row;
                if (to < args.capacity && args.factors != nullptr) args.factors[to] = 1.0f;
            }
        });
        return;
    }
    const rf_columns_column &column = work.column(0);
    if (column.table < 0) return;
#pragma unroll 1
    for (int at = threadIdx.x / 32; at < work.samples; at += WARPS) {
        const rf_bag_writer writer = {args, work, column, rf_column_bag_of(args.call, work, at),
                                      work.first + at};
        writer.write(column.table * args.call.batch + work.first + at);
    }
}
