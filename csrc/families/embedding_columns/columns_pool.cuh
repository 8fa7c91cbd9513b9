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

#include "families/embedding_columns/columns_sum.cuh"

/* Threads that share a bag: `slots` slots of `lanes` lanes, each slot reading a row. */
struct rf_column_group {
    int lanes, slots, threads, lane, slot, number;

    RF_INLINE rf_column_group(const rf_column_work &work) {
        const int n_lanes = work.task().n_lanes;
        const bool is_max = work.column(0).pooling == RF_COLUMN_MAX;
        lanes = n_lanes > 1 ? 1 << (32 - __clz(n_lanes - 1)) : 1;
        slots = is_max ? 1 : max(1, min(BLOCK / (lanes * work.capacity), 32 / lanes));
        threads = lanes * slots;
        lane = (int)threadIdx.x % lanes;
        slot = (int)threadIdx.x / lanes % slots;
        number = (int)threadIdx.x / threads;
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

    /* `first_element`: the first of each lane's elements. */
    RF_INLINE rf_column_pool(const rf_columns_args &args_, const rf_column_work &work_, rf_column_bags &bags_,
                             int first_element)
        : args(args_), work(work_), bags(bags_), column(work_.column(0)), group(work_) {
        vector = rf_column_width(args, work);
        dtype = rf_column_table_of(args, column).dtype;
        active = group.lane < work.task().n_lanes;
        element = (active ? work.lane(group.lane).element : 0) + first_element;
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
    RF_INLINE void pool_short(int first, int last) const {
        const int groups = BLOCK / group.threads;
#pragma unroll 1
        for (int next = first; next < last; next += groups) {
            const int bag = next + group.number;
            const bool valid = bag < last && bags.bag[bag].count <= RF_COLUMNS_LONG;
            rf_column_sum sum(column.pooling);
            if (valid) {
                const int from = (int)(bags.start[bag] - bags.start[first]);
                add(from + group.slot, (int)(bags.start[bag + 1] - bags.start[first]), group.slots, true,
                    sum);
            }
            for (int apart = group.lanes; apart < group.threads; apart *= 2) { /* a maximum has one slot */
#pragma unroll
                for (int j = 0; j < MAX_VECTOR; j++)
                    sum.sum[j] += __shfl_xor_sync(RF_FULL_WARP, sum.sum[j], apart);
                sum.norm += __shfl_xor_sync(RF_FULL_WARP, sum.norm, apart);
                sum.count += __shfl_xor_sync(RF_FULL_WARP, sum.count, apart);
            }
            if (valid && group.slot == 0) finish(bag, sum, nullptr);
        }
    }

    /* Adds the listed rows of a long bag. Groups take them in turns and keep their sums in shared memory
     * between lists. */
    RF_INLINE void pool_long(int n_listed, bool is_first) const {
        const int thread = threadIdx.x;
        rf_column_sum sum(column.pooling);
        if (!is_first) {
#pragma unroll
            for (int j = 0; j < MAX_VECTOR; j++) sum.sum[j] = bags.sums[j][thread];
            sum.norm = bags.norms[thread];
            sum.count = bags.counts[thread];
        }
        add(thread / group.lanes, n_listed, BLOCK / group.lanes, false, sum);
#pragma unroll
        for (int j = 0; j < MAX_VECTOR; j++) bags.sums[j][thread] = sum.sum[j];
        bags.norms[thread] = sum.norm;
        bags.counts[thread] = sum.count;
    }

    /* Reduces the sums of all threads of a long bag, the upper half onto the lower half. `first` as in
     * rf_column_finish. */
    RF_INLINE void finish_long(int bag, const rf_u8 *first) const {
        const int thread = threadIdx.x;
#pragma unroll 1
        for (int half = BLOCK / 2; half >= group.lanes; half /= 2) {
            __syncthreads();
            if (thread >= half) continue;
#pragma unroll
            for (int j = 0; j < MAX_VECTOR; j++) {
                const float sum_lower = bags.sums[j][thread], sum_upper = bags.sums[j][thread + half];
                bags.sums[j][thread] = column.pooling != RF_COLUMN_MAX ? sum_lower + sum_upper
                                       : sum_upper > sum_lower         ? sum_upper
                                                                       : sum_lower;
            }
            bags.norms[thread] += bags.norms[thread + half];
            bags.counts[thread] += bags.counts[thread + half];
        }
        if (thread >= group.lanes) return;
        rf_column_sum sum(column.pooling);
#pragma unroll
        for (int j = 0; j < MAX_VECTOR; j++) sum.sum[j] = bags.sums[j][thread];
        sum.norm = bags.norms[thread];
        sum.count = bags.counts[thread];
        finish(bag, sum, column.pooling == RF_COLUMN_MAX ? first : nullptr);
    }
};

/* Returns the end of the bags from `first` on that fit into the list: whole bags, at least one. */
RF_INLINE int rf_column_list_end(const rf_column_bags &bags, int first, int samples) {
    int last = first + 1, limit = samples + 1;
    while (last + 1 < limit) {
        const int middle = (last + limit) / 2;
        if (bags.start[middle] - bags.start[first] <= RF_COLUMNS_LIST_LOOKUPS)
            last = middle;
        else
            limit = middle;
    }
    return last;
}

RF_INLINE int rf_column_next_long(const rf_column_bags &bags, int bag, int samples) {
    while (bag < samples && bags.bag[bag].count <= RF_COLUMNS_LONG) bag++;
    return bag;
}

/* Lists and pools the bags that are not long, then each long bag. An iteration of the loop pools one list.
 * `first_element` as above. */
RF_INLINE void rf_column_pool_elements(const rf_columns_args &args, const rf_column_work &work,
                                       rf_column_bags &bags, int first_element) {
    const rf_u8 *first_row = nullptr; /* of a long bag */
    int bag = 0;
    rf_i64 from = -1; /* next lookup of a long bag */
#pragma unroll 1
    while (bag < work.samples) {
        const int last = rf_column_list_end(bags, bag, work.samples);
        const rf_i64 count = from >= 0 ? bags.bag[bag].count - from : bags.start[last] - bags.start[bag];
        const int n_listed = (int)min(count, (rf_i64)RF_COLUMNS_LIST_LOOKUPS);
        if (threadIdx.x == 0) bags.first = RF_COLUMNS_LIST_LOOKUPS;
        __syncthreads();
        rf_column_list(args, work, bags,
                       {from >= 0 ? bag : -1, bag, last, from >= 0 ? from : bags.start[bag], n_listed});
        __syncthreads();
        const rf_column_pool pool(args, work, bags, first_element);
        if (from < 0) {
            pool.pool_short(bag, last);
            bag = last;
            if (bag == work.samples) {
                bag = rf_column_next_long(bags, 0, work.samples);
                from = 0;
            }
        } else {
            if (first_row == nullptr && bags.first < RF_COLUMNS_LIST_LOOKUPS)
                first_row = bags.rows[bags.first];
            pool.pool_long(n_listed, from == 0);
            from += n_listed;
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
    rf_i64 n_listed = 0, total;
    if (thread < work.samples) {
        const rf_column_bag bag = rf_column_bag_of(args, work, thread);
        bags.bag[thread] = bag;
        n_listed = bag.count <= RF_COLUMNS_LONG ? bag.count : 0;
    }
    const rf_i64 start = rf_sum_of_block_before<WARPS>(n_listed, bags.of_warps, total);
    if (thread <= work.samples) bags.start[thread] = start;
    __syncthreads();
#pragma unroll 1
    for (int first_element = 0; first_element < work.task().vector;
         first_element += rf_column_width(args, work))
        rf_column_pool_elements(args, work, bags, first_element);
}

#endif
