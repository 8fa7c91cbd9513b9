/* Columns whose samples have any number of lookups: pooling of their rows.
 *
 * Thread mapping. All threads list the rows of lookups, as many at once as shared memory holds
 * (columns_bags.cuh). Bags that are not long are listed whole, and a group of threads pools each: `lanes`
 * threads read a row, and a group has several slots of lanes if there are fewer bags than groups. All groups
 * share a long bag and take its rows in turns; they add their sums in shared memory in a fixed order. So a
 * bag of any length keeps its block busy.
 */
#ifndef RECFUSE_COLUMNS_POOL_CUH
#define RECFUSE_COLUMNS_POOL_CUH

#include "families/embedding_columns/columns_bags.cuh"

enum { MOST = RF_COLUMNS_MOST_VECTOR };

/* The partial result of a thread for the row of a bag. */
struct rf_column_sum {
    float sum[MOST];
    double norm; /* sum of the weights or of their squares, as a divisor */
    rf_i64 count; /* number of rows */

    RF_INLINE rf_column_sum(int pooling) : norm(0.0), count(0) {
#pragma unroll
        for (int i = 0; i < MOST; i++)
            sum[i] = pooling == RF_COLUMN_MAX ? __int_as_float((int)0xff800000u) : 0.0f; /* -infinity */
    }
};

/* Threads that share a bag: `slots` slots of `lanes` lanes, each slot reading a row. */
struct rf_column_group {
    int lanes, slots, threads, lane, slot, number;

    RF_INLINE rf_column_group(const rf_column_work &work) {
        const int n_lanes = work.task().n_lanes;
        const bool one_slot = work.column(0).pooling == RF_COLUMN_MAX;
        lanes = n_lanes > 1 ? 1 << (32 - __clz(n_lanes - 1)) : 1;
        slots = one_slot ? 1 : max(1, min(BLOCK / (lanes * work.most), 32 / lanes));
        threads = lanes * slots;
        lane = (int)threadIdx.x % lanes;
        slot = (int)threadIdx.x / lanes % slots;
        number = (int)threadIdx.x / threads;
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
            bool there[IN_FLIGHT];
            float weight[IN_FLIGHT];
            vector row[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                const int lookup = min(first + i * step, end - 1);
                const rf_u8 *from = bags.rows[lookup];
                there[i] = from != nullptr && first + i * step < end;
                weight[i] = weighted ? bags.weights[lookup] : 1.0f;
                row[i] = rf_load((const vector *)rf_column_or_any(args, from, element * of::BYTES));
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                if (!there[i]) continue;
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

/* Pools one list of lookups. Created anew for each list, so that it occupies no registers in between. */
struct rf_column_pool {
    const rf_columns_args &args;
    const rf_column_work &work;
    rf_column_bags &bags;
    const rf_columns_column &column;
    const rf_column_group group;
    int vector, dtype, element;
    bool active; /* false for lanes past the end of the row */

    /* `part`: the first of each lane's elements. */
    RF_INLINE rf_column_pool(const rf_columns_args &args_, const rf_column_work &work_, rf_column_bags &bags_,
                             int part)
        : args(args_), work(work_), bags(bags_), column(work_.column(0)), group(work_) {
        vector = rf_column_width(args, work);
        dtype = rf_column_table_of(args, column).dtype;
        active = group.lane < work.task().n_lanes;
        element = (active ? work.lane(group.lane).element : 0) + part;
    }

    RF_INLINE void add(int at, int end, int step, bool ordered, rf_column_sum &to) const {
        rf_column_for(vector, dtype,
                      rf_column_add{args, bags, column, element, at, active ? end : 0, step, ordered, to});
    }
    RF_INLINE void finish(int sample, const rf_column_sum &sum, const rf_u8 *first) const {
        if (active)
            rf_column_for(vector, dtype, rf_column_finish{args, work, column, element, sample, sum, first});
    }

    /* Pools the listed bags [first, last). */
    RF_INLINE void pool_listed(int first, int last) const {
        const int groups = BLOCK / group.threads;
#pragma unroll 1
        for (int next = first; next < last; next += groups) {
            const int bag = next + group.number;
            const bool there = bag < last && bags.bag[bag].count <= RF_COLUMNS_LONG;
            rf_column_sum sum(column.pooling);
            if (there) {
                const int from = (int)(bags.start[bag] - bags.start[first]);
                add(from + group.slot, (int)(bags.start[bag + 1] - bags.start[first]), group.slots, true,
                    sum);
            }
            for (int apart = group.lanes; apart < group.threads; apart *= 2) { /* a maximum has one slot */
#pragma unroll
                for (int j = 0; j < MOST; j++) sum.sum[j] += __shfl_xor_sync(RF_FULL_WARP, sum.sum[j], apart);
                sum.norm += __shfl_xor_sync(RF_FULL_WARP, sum.norm, apart);
                sum.count += __shfl_xor_sync(RF_FULL_WARP, sum.count, apart);
            }
            if (there && group.slot == 0) finish(bag, sum, nullptr);
        }
    }

    /* Adds the listed rows of a long bag. Groups take them in turns and keep their sums in shared memory
     * between lists. */
    RF_INLINE void pool_long(int listed, bool begins) const {
        const int thread = threadIdx.x;
        rf_column_sum sum(column.pooling);
        if (!begins) {
#pragma unroll
            for (int j = 0; j < MOST; j++) sum.sum[j] = bags.sums[j][thread];
            sum.norm = bags.norms[thread];
            sum.count = bags.counts[thread];
        }
        add(thread / group.lanes, listed, BLOCK / group.lanes, false, sum);
#pragma unroll
        for (int j = 0; j < MOST; j++) bags.sums[j][thread] = sum.sum[j];
        bags.norms[thread] = sum.norm;
        bags.counts[thread] = sum.count;
    }

    /* Reduces the sums of all threads of a long bag, the upper half onto the lower half. `first` as in
     * rf_column_finish. */
    RF_INLINE void finish_long(int bag, const rf_u8 *first) const {
        const int thread = threadIdx.x;
#pragma unroll 1
        for (int near = BLOCK / 2; near >= group.lanes; near /= 2) {
            __syncthreads();
            if (thread >= near) continue;
#pragma unroll
            for (int j = 0; j < MOST; j++) {
                const float own = bags.sums[j][thread], other = bags.sums[j][thread + near];
                bags.sums[j][thread] = column.pooling != RF_COLUMN_MAX ? own + other
                                       : other > own                   ? other
                                                                       : own;
            }
            bags.norms[thread] += bags.norms[thread + near];
            bags.counts[thread] += bags.counts[thread + near];
        }
        if (thread >= group.lanes) return;
        rf_column_sum sum(column.pooling);
#pragma unroll
        for (int j = 0; j < MOST; j++) sum.sum[j] = bags.sums[j][thread];
        sum.norm = bags.norms[thread];
        sum.count = bags.counts[thread];
        finish(bag, sum, column.pooling == RF_COLUMN_MAX ? first : nullptr);
    }
};

/* Returns the end of the bags from `first` on that fit into the list: whole bags, at least one. */
RF_INLINE int rf_column_room(const rf_column_bags &bags, int first, int samples) {
    int last = first + 1, behind = samples + 1;
    while (last + 1 < behind) {
        const int middle = (last + behind) / 2;
        if (bags.start[middle] - bags.start[first] <= RF_COLUMNS_LISTED)
            last = middle;
        else
            behind = middle;
    }
    return last;
}

RF_INLINE int rf_column_next_long(const rf_column_bags &bags, int bag, int samples) {
    while (bag < samples && bags.bag[bag].count <= RF_COLUMNS_LONG) bag++;
    return bag;
}

/* Lists and pools the bags that are not long, then each long bag. An iteration of the loop pools one list.
 * `part` as above. */
RF_INLINE void rf_column_pool_part(const rf_columns_args &args, const rf_column_work &work,
                                   rf_column_bags &bags, int part) {
    const rf_u8 *first_row = nullptr; /* of a long bag */
    int bag = 0;
    rf_i64 from = -1; /* next lookup of a long bag */
#pragma unroll 1
    while (bag < work.samples) {
        const int last = rf_column_room(bags, bag, work.samples);
        const rf_i64 count = from >= 0 ? bags.bag[bag].count - from : bags.start[last] - bags.start[bag];
        const int listed = (int)min(count, (rf_i64)RF_COLUMNS_LISTED);
        if (threadIdx.x == 0) bags.first = RF_COLUMNS_LISTED;
        __syncthreads();
        rf_column_list(args, work, bags, from >= 0 ? bag : -1, bag, last, from >= 0 ? from : bags.start[bag],
                       listed);
        __syncthreads();
        const rf_column_pool pool(args, work, bags, part);
        if (from < 0) {
            pool.pool_listed(bag, last);
            bag = last;
            if (bag == work.samples) {
                bag = rf_column_next_long(bags, 0, work.samples);
                from = 0;
            }
        } else {
            if (first_row == nullptr && bags.first < RF_COLUMNS_LISTED) first_row = bags.rows[bags.first];
            pool.pool_long(listed, from == 0);
            from += listed;
            if (from == bags.bag[bag].count) {
                pool.finish_long(bag, first_row);
                first_row = nullptr;
                bag = rf_column_next_long(bags, bag + 1, work.samples);
                from = 0;
            }
        }
        __syncthreads(); /* all threads have read the list */
    }
}

RF_INLINE void rf_column_bags_pooled(const rf_columns_args &args, const rf_column_work &work,
                                     rf_column_bags &bags) {
    const int thread = threadIdx.x;
    rf_i64 listed = 0, all;
    if (thread < work.samples) {
        const rf_column_bag bag = rf_column_bag_of(args, work, thread);
        bags.bag[thread] = bag;
        listed = bag.count <= RF_COLUMNS_LONG ? bag.count : 0;
    }
    const rf_i64 start = rf_sum_of_block_before<WARPS>(listed, bags.of_warps, all);
    if (thread <= work.samples) bags.start[thread] = start;
    __syncthreads();
#pragma unroll 1
    for (int part = 0; part < work.task().vector; part += rf_column_width(args, work))
        rf_column_pool_part(args, work, bags, part);
}

#endif
