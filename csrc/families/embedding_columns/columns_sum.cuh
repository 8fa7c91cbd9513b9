/* The sum of a bag of a column: adds rows to a thread's part, and writes the pooled row. */
#ifndef RECFUSE_COLUMNS_SUM_CUH
#define RECFUSE_COLUMNS_SUM_CUH

#include "families/embedding_columns/columns_bags.cuh"

enum { MAX_VECTOR = RF_COLUMNS_MOST_VECTOR };

/* The partial result of a thread for the row of a bag. */
struct rf_column_sum {
    float sum[MAX_VECTOR];
    double norm; /* sum of the weights or of their squares, as a divisor */
    rf_i64 count; /* number of rows */

    RF_INLINE rf_column_sum(int pooling) : norm(0.0), count(0) {
#pragma unroll
        for (int i = 0; i < MAX_VECTOR; i++)
            sum[i] = pooling == RF_COLUMN_MAX ? __int_as_float((int)0xff800000u) : 0.0f; /* -infinity */
    }
};

/* Adds the listed lookups at, at + step, ... before `end`, V elements of a lane from `element` on. `ordered`:
 * these are all lookups of the bag, so a maximum begins with its first row. Otherwise rf_column_finish reads
 * the first row. */
struct rf_column_add {
    const rf_columns_args &args;
    const rf_column_bags &bags;
    const rf_columns_column &column;
    int element, at, end, step;
    bool ordered;
    rf_column_sum &to;

    template <int V, int DTYPE> RF_INLINE void run() const {
        typedef rf_element<DTYPE> of;
        typedef rf_elements<DTYPE, V> vector;
        enum { IN_FLIGHT = 4 };
        const bool largest = column.pooling == RF_COLUMN_MAX, weighted = column.weighted;
        const bool squares = column.pooling == RF_COLUMN_SQRTN;
        const bool divides = weighted && (squares || column.pooling == RF_COLUMN_MEAN);
#pragma unroll 1
        for (int first = at; first < end; first += IN_FLIGHT * step) {
            bool valid[IN_FLIGHT];
            float weight[IN_FLIGHT];
            vector row[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const int lookup = min(first + i * step, end - 1);
                const rf_u8 *from = bags.rows[lookup];
                valid[i] = from != nullptr && first + i * step < end;
                weight[i] = weighted ? bags.weights[lookup] : 1.0f;
                row[i] = rf_load((const vector *)rf_column_readable(args, from, element * of::BYTES));
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                if (!valid[i]) continue;
#pragma unroll
                for (int j = 0; j < V; j++) {
                    const float value = of::get(row[i], j);
                    if (!largest)
                        to.sum[j] += weight[i] * value;
                    else if ((ordered && to.count == 0) || value > to.sum[j])
                        to.sum[j] = value;
                }
                if (divides) to.norm += squares ? (double)weight[i] * weight[i] : weight[i];
                to.count++;
            }
        }
    }
};

/* Writes the pooled row of a sample. `first`: its first row if a maximum needs it for NaNs, else NULL. */
struct rf_column_finish {
    const rf_columns_args &args;
    const rf_column_work &work;
    const rf_columns_column &column;
    int element, sample;
    const rf_column_sum &sum;
    const rf_u8 *first;

    template <int V, int DTYPE> RF_INLINE void run() const {
        typedef rf_element<DTYPE> of;
        typedef rf_elements<DTYPE, V> vector;
        const rf_column_table table = rf_column_table_of(args, column);
        const bool any = sum.count > 0;
        const rf_u8 *from = any                 ? first
                            : column.empty >= 0 ? table.rows + column.empty * table.pitch
                                                : nullptr;
        const bool squares = column.pooling == RF_COLUMN_SQRTN, mean = column.pooling == RF_COLUMN_MEAN;
        const double norm = squares ? sqrt(sum.norm) : sum.norm;
        float values[V], divisor = 1.0f;
        vector row = {};
        if (from != nullptr) row = rf_load((const vector *)(from + element * of::BYTES));
        if (mean) divisor = (float)sum.count;
        if (squares) divisor = sqrtf((float)sum.count);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float value = of::get(row, j);
            const bool is_row = !any || value != value; /* no value is larger than a NaN of the first row */
            if (is_row)
                values[j] = value * column.scale;
            else if (column.weighted && (squares || mean)) /* the norm may exceed float32 */
                values[j] = (float)(sum.sum[j] / norm) * column.scale;
            else
                values[j] = sum.sum[j] / divisor * column.scale;
            if (!any && column.empty < 0) values[j] = column.fill;
        }
        rf_column_store<V>(args.output + (work.first + sample) * args.output_pitch +
                               (rf_i64)(column.output_column + element) * OUTPUT_BYTES,
                           values, rf_column_is_whole<V>(args, column));
    }
};

#endif
