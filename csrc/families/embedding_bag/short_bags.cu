/* Short bags: gathers rows of one table and pools them, several bags a warp.
 *
 *   output[b] = pool(weight[indices[i]] for i in [offsets[b], offsets[b + 1]))      sum or mean
 *
 * weight [rows, RF_DIM] of RF_DTYPE, with a stride of RF_STRIDE elements; indices [lookups]; offsets [bags]
 * or [bags + 1], or NULL if all bags are equally long; output [bags, RF_DIM]. Sums are in float32.
 *
 * Thread mapping. A warp has RF_BAGS consecutive bags, at most 32; lane i reads the bounds of bag i. LANES
 * lanes read a row, 16 bytes each (fewer if rows are not aligned to 16); such a group of lanes has TURNS of
 * the bags. Rows wider than 32 lanes x 2 vectors are cut into slices over gridDim.y.
 *
 * If all bags of a warp have at most one lookup, lane i reads the index of bag i together with its offsets,
 * from the position that it has if all bags are equally long. Groups have adjacent bags, whose rows are
 * copied unchanged, all at once.
 *
 * Otherwise a group reads the lookups of its TURNS consecutive bags as one list, BATCH rows at a time, across
 * the boundaries of bags. So a warp waits for offsets once, and never for the first indices of a bag: the
 * indices of the next rows are loaded while the previous rows are. Lanes check the indices that they load,
 * and store them in shared memory for their group. When rows hit a cache, issue is the bound, not memory: a
 * batch whose rows are all valid and of one bag is loaded and added without branches. Rows are added in the
 * order of the lookups: results are bit-identical from run to run.
 *
 * Difference from embedding_bag.cu: there a group of lanes has one bag, and the warp ends with it. That
 * exposes the latencies of the offsets, the indices and the rows of a short bag, one after another.
 *
 * Launch: grid [ceil(bags / (RF_BAGS * RF_BLOCK / 32)), slices], block [RF_BLOCK], no dynamic shared memory.
 */

#ifndef RF_DTYPE /* default specialisation, if compiled without options */
#define RF_DTYPE RF_FLOAT32
#define RF_DIM 128
#define RF_STRIDE RF_DIM
#define RF_ALIGN 16 /* alignment of all addresses of rows and outputs, in bytes */
#define RF_ROW int /* type of a row index; rf_i64 for tables of 2^31 rows and more */
#define RF_POOLING RF_SUM /* or RF_MEAN */
#define RF_PADDED 0 /* the call has a padding_idx */
#define RF_CHECK 1
#define RF_BAGS 8 /* bags of a warp */
#define RF_BLOCK 256
#define RF_MIN_BLOCKS 4 /* blocks per SM for which the registers must suffice */
#endif

#include "families/embedding_bag/bag.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool OLDER_GPU = true; /* there the compiler takes more registers */
#else
constexpr bool OLDER_GPU = false;
#endif

struct shape : rf_row_shape {
    static constexpr int GROUPS = 32 / LANES, TURNS = RF_BAGS / GROUPS;
    /* Rows of a list in flight: as many as fit into the registers that the sums leave. */
    static constexpr int REGISTERS = 65536 / (RF_BLOCK * RF_MIN_BLOCKS); /* of a thread */
    static constexpr bool FEW = OLDER_GPU || LANES < 4 || RF_POOLING == RF_MEAN || REGISTERS < 64;
    static constexpr int BATCH = (FEW ? 4 : 8) / VECTORS;
    static constexpr int INDICES = larger(BATCH / LANES, 1); /* indices that a lane loads at once */
    static constexpr int CHUNK = INDICES * LANES; /* indices that a group loads at once */
    static constexpr int BATCHES = CHUNK / BATCH;
    static constexpr bool ALL_INSIDE = COLUMNS % (LANES * VECTORS) == 0; /* all vectors are inside the row */
};
static_assert(RF_BAGS <= 32 && shape::TURNS * shape::GROUPS == RF_BAGS && shape::TURNS * shape::VECTORS <= 8,
              "a lane a bag, and whole turns whose rows are in flight together");
static_assert(shape::CHUNK % shape::BATCH == 0, "whole batches");
static_assert(RF_POOLING != RF_MAX, "maxima are embedding_bag.cu's");

enum { NO_ROW = -1, PADDING = -2 }; /* special values of a row; padding does not count in a mean */

/* This lane's part of a row. */
struct part_of_row {
    shape::vector of[shape::VECTORS];

    /* `table`: the address of this lane's columns of row 0. */
    RF_INLINE void load_there(const rf_columns<shape> &columns, const rf_u8 *table, RF_ROW row) {
        const shape::vector *from = (const shape::vector *)(table + (rf_i64)row * shape::ROW_PITCH);
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++)
            of[v] = shape::ALL_INSIDE ? rf_load(from + v * shape::LANES)
                                      : rf_load_if(columns.inside(v) ? 0 : -1, from + v * shape::LANES);
    }
    /* Loads a row, or zeros for NO_ROW and PADDING. */
    RF_INLINE void load(const rf_columns<shape> &columns, const rf_u8 *table, RF_ROW row) {
        const shape::vector *from = (const shape::vector *)(table + (rf_i64)row * shape::ROW_PITCH);
        const int there = (int)(row >> (8 * sizeof(RF_ROW) - 32));
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++)
            of[v] = rf_load_if(columns.inside(v) ? there : -1, from + v * shape::LANES);
    }
    RF_INLINE void add_to(shape::sums &sum) const {
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) {
#pragma unroll
            for (int e = 0; e < shape::ELEMENTS; e++)
                sum.of[v * shape::ELEMENTS + e] += shape::element::get(of[v], e);
        }
    }
    /* `to`: the address of this lane's columns in the output of a bag. */
    RF_INLINE void store(const rf_columns<shape> &columns, rf_u8 *to) const {
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) {
            if (columns.inside(v)) ((shape::vector *)to)[v * shape::LANES] = of[v];
        }
    }
};

/* Returns the first bag of this warp. */
RF_INLINE rf_i64 first_of_warp() {
    return ((rf_i64)blockIdx.x * (RF_BLOCK / 32) + threadIdx.x / 32) * RF_BAGS;
}

/* Returns the row of an index, PADDING, or NO_ROW for an invalid index. */
RF_INLINE RF_ROW row_of(const rf_embedding_bag_args &args, rf_i64 index) {
    if (RF_PADDED && index == args.padding_idx) return PADDING;
    return RF_CHECK && (rf_u64)index >= (rf_u64)args.rows ? NO_ROW : (RF_ROW)index;
}

/* Stores the rows of bags with at most one lookup. `row` is the row of this lane's bag. */
RF_INLINE void copy_rows(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, RF_ROW row) {
    const int group = threadIdx.x % 32 / shape::LANES;
    const rf_i64 bag = first_of_warp() + group;
    rf_u8 *to = (rf_u8 *)rf_output_of(args, bag, columns.column);
    const rf_u8 *table = columns.address(0);
    rf_keep(table);
    part_of_row rows[shape::TURNS];
    RF_ROW now[shape::TURNS];
#pragma unroll
    for (int t = 0; t < shape::TURNS; t++) now[t] = __shfl_sync(RF_FULL_WARP, row, t * shape::GROUPS + group);
#pragma unroll
    for (int t = 0; t < shape::TURNS; t++) rows[t].load(columns, table, now[t]);
#pragma unroll
    for (int t = 0; t < shape::TURNS; t++) {
        if (bag + t * shape::GROUPS < args.bags)
            rows[t].store(columns, to + t * shape::GROUPS * args.output_pitch);
    }
}

/* The bag that a group of lanes is adding to. A group has one bag after another. */
struct summed_bag {
    int number, last; /* numbers within the warp; `last` belongs to the next group */
    int end; /* end of its lookups; the largest int after the last bag */
    int counted; /* lookups that are not padding */
    rf_u8 *to; /* its row of the output */
    shape::sums sum;

    RF_INLINE summed_bag(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int number_)
        : number(number_), last(0), end(0), counted(0),
          to((rf_u8 *)rf_output_of(args, first_of_warp() + number_, columns.column)), sum() {}
    /* `ends`: the end of each lane's bag. */
    RF_INLINE summed_bag(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int number_,
                         int last_, int ends)
        : summed_bag(args, columns, number_) {
        last = last_;
        find_end(ends);
    }
    RF_INLINE void find_end(int ends) {
        end = __shfl_sync(RF_FULL_WARP, ends, number & 31);
        if (number >= last) end = 0x7fffffff;
    }
    RF_INLINE void store(const rf_columns<shape> &columns) {
        if (RF_POOLING == RF_MEAN) {
            const float divisor = counted > 0 ? (float)counted : 1.0f;
#pragma unroll
            for (int i = 0; i < shape::VECTORS * shape::ELEMENTS; i++) sum.of[i] /= divisor;
        }
        part_of_row pooled;
#pragma unroll
        for (int v = 0; v < shape::VECTORS; v++) pooled.of[v] = rf_pooled(sum, v);
        pooled.store(columns, to);
    }
    /* Stores the bags whose lookups end before `position`. */
    RF_INLINE void finish(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int ends,
                          int position) {
        while (__any_sync(RF_FULL_WARP, end <= position)) {
            if (end <= position) {
                store(columns);
                number++;
                to += args.output_pitch;
                counted = 0;
                sum = {};
            }
            find_end(ends);
        }
    }
};

/* The rows of a group's list. */
constexpr int BATCH_BYTES = shape::BATCH * (int)sizeof(RF_ROW);
struct __align__(BATCH_BYTES < 16 ? BATCH_BYTES : 16) batch_of_rows {
    RF_ROW row[shape::BATCH];
};
struct chunk_of_rows {
    batch_of_rows batch[shape::BATCHES];
};

/* CHUNK indices of a group's list, from position `from` on. */
struct chunk {
    RF_INDEX index[shape::INDICES];

    static RF_INLINE int place(int from, int i) {
        return from + i * shape::LANES + (int)threadIdx.x % shape::LANES;
    }
    RF_INLINE void load(const rf_embedding_bag_args &args, int from, int end) {
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++)
            index[i] = place(from, i) < end ? rf_load(args.indices + place(from, i)) : 0;
    }
    /* Converts indices to rows and reports this lane's first invalid index. `number`: a bag of the warp at or
     * before them. */
    RF_INLINE void rows(const rf_embedding_bag_args &args, int from, int end, int number,
                        RF_ROW (&row)[shape::INDICES]) const {
        bool any_bad = false;
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++) {
            const bool there = place(from, i) < end;
            row[i] = there ? row_of(args, index[i]) : NO_ROW;
            any_bad |= there && row[i] == NO_ROW;
        }
        if (!RF_CHECK || !any_bad) return;
        rf_i64 bag = first_of_warp() + number;
        for (int i = 0; i < shape::INDICES; i++) { /* reads the indices again, because this is rare */
            const int position = place(from, i);
            const rf_i64 bad = position < end ? (rf_i64)rf_load(args.indices + position) : 0;
            if (position >= end || (rf_u64)bad < (rf_u64)args.rows) continue;
            while (bag + 1 < args.bags && rf_bag_at(args, bag).end <= position) bag++;
            rf_report_index(args, bag, position, bad);
            return;
        }
    }
};

/* Adds one batch, whose lookups end before `after`. SURE: all rows are valid, and no bag ends before the last
 * row. */
template <bool SURE>
RF_INLINE void sum_batch(const rf_embedding_bag_args &args, const rf_columns<shape> &columns,
                         const rf_u8 *table, int ends, const batch_of_rows &now, int after, summed_bag &bag) {
    part_of_row rows[shape::BATCH];
#pragma unroll
    for (int u = 0; u < shape::BATCH; u++) {
        if (SURE) {
            rows[u].load_there(columns, table, now.row[u]);
        } else {
            rows[u].load(columns, table, now.row[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < shape::BATCH; u++) {
        rows[u].add_to(bag.sum);
        bag.counted += SURE || now.row[u] != PADDING;
        if (!SURE && u < shape::BATCH - 1) bag.finish(args, columns, ends, after - shape::BATCH + u + 1);
    }
    bag.finish(args, columns, ends, after);
}

/* Sums the bags [number, last) of a group, whose lookups [from, end) are one list. `next` holds the first
 * chunk of the list, already loaded. `ends`: the end of each lane's bag. */
RF_INLINE void sum_bags(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int ends,
                        int number, int last, int from, int end, chunk next) {
    __shared__ chunk_of_rows of_groups[RF_BLOCK / shape::LANES];
    chunk_of_rows &rows = of_groups[threadIdx.x / shape::LANES];
    const rf_u8 *table = columns.address(0);
    rf_keep(table);
    summed_bag bag(args, columns, number, last, ends);
    bag.finish(args, columns, ends, from);
#pragma unroll 1
    for (; __any_sync(RF_FULL_WARP, from < end); from += shape::CHUNK) {
        RF_ROW row[shape::INDICES];
        next.rows(args, from, end, bag.number, row);
        next.load(args, from + shape::CHUNK, end);
        bool there = true;
        __syncwarp(); /* the previous rows have been read */
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++) {
            ((RF_ROW *)&rows)[i * shape::LANES + threadIdx.x % shape::LANES] = row[i];
            there &= row[i] >= 0;
        }
        const bool all_there = __all_sync(RF_FULL_WARP, there);
        __syncwarp();
#pragma unroll 1
        for (int batch = 0; batch < shape::BATCHES; batch++) {
            const int after = from + (batch + 1) * shape::BATCH;
            const batch_of_rows now = rows.batch[batch];
            if (__all_sync(RF_FULL_WARP, bag.end >= after) && all_there) {
                sum_batch<true>(args, columns, table, ends, now, after, bag);
            } else {
                if (batch > 0 && !__any_sync(RF_FULL_WARP, after - shape::BATCH < end)) break;
                sum_batch<false>(args, columns, table, ends, now, after, bag);
            }
        }
    }
}

/* Sums bags that are not consecutive, row by row. Only invalid offsets lead here. `begins`: the begin of each
 * lane's bag. */
RF_INLINE void sum_bags_apart(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int begins,
                              int ends, int number, int last) {
#pragma unroll 1
    for (int turn = 0; turn < shape::TURNS; turn++, number++) {
        const int from = __shfl_sync(RF_FULL_WARP, begins, number),
                  end = __shfl_sync(RF_FULL_WARP, ends, number);
        if (number >= last) continue;
        summed_bag bag(args, columns, number);
#pragma unroll 1
        for (int position = from; position < end; position++) {
            const rf_i64 index = rf_load(args.indices + position);
            const RF_ROW row = row_of(args, index);
            if (RF_CHECK && row == NO_ROW) rf_report_index(args, first_of_warp() + number, position, index);
            part_of_row part;
            part.load(columns, columns.address(0), row);
            part.add_to(bag.sum);
            bag.counted += row != PADDING;
        }
        bag.store(columns);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK, RF_MIN_BLOCKS)
    rf_short_bags(const __grid_constant__ rf_embedding_bag_args args) {
    const int lane = threadIdx.x % 32, group = lane / shape::LANES;
    const rf_i64 first = first_of_warp(), bag = first + lane;
    const rf_columns<shape> columns = {args.weight,
                                       (int)blockIdx.y * shape::LANES * shape::VECTORS + lane % shape::LANES};
    const bool mine = lane < RF_BAGS && bag < args.bags, one_each = args.mean_lookups <= 1;
    const rf_i64 guess = (one_each ? bag : first + group * shape::TURNS) * args.mean_lookups;
    const int guessed = (int)min(guess, args.lookups); /* there may be fewer bags than turns */

    /* Prefetches the first indices into L2 while the previous kernel ends. */
    const int asked = guessed + (one_each ? 0 : lane % shape::LANES);
    if (asked < args.lookups && (mine || !one_each)) rf_prefetch(args.indices + asked);
    if (mine && args.offsets != nullptr) rf_prefetch(args.offsets + bag);
    rf_wait_for_previous_kernel();
    if (first >= args.bags) return;

    /* Loads the offsets and, at the same time, indices from the position that they have if all bags are
     * equally long. */
    rf_i64 index = 0;
    chunk next = {};
    if (one_each && mine && guessed < args.lookups) index = rf_load(args.indices + guessed);
    if (!one_each) next.load(args, guessed, (int)args.lookups);
    const rf_bag lookups = mine ? rf_bag_at(args, bag) : rf_bag{0, 0};
    const int begins = (int)lookups.begin, ends = (int)lookups.end;

    if (__all_sync(RF_FULL_WARP, ends - begins <= 1)) {
        RF_ROW row = NO_ROW;
        if (begins < ends) {
            if (!one_each || begins != guessed) index = rf_load(args.indices + begins);
            row = row_of(args, index);
            if (RF_CHECK && row == NO_ROW) rf_report_index(args, bag, begins, index);
        }
        copy_rows(args, columns, row);
        return;
    }
    const int end_before = __shfl_up_sync(RF_FULL_WARP, ends, 1);
    const bool follow = __all_sync(RF_FULL_WARP, !mine || lane == 0 || begins == end_before);
    const int left = (int)min(args.bags - first, (rf_i64)RF_BAGS);
    const int number = group * shape::TURNS, last = max(min(number + shape::TURNS, left), number);
    if (!follow) {
        sum_bags_apart(args, columns, begins, ends, number, last);
        return;
    }
    const int from = __shfl_sync(RF_FULL_WARP, begins, number);
    const int end_of_last = __shfl_sync(RF_FULL_WARP, ends, max(last - 1, 0));
    const int end = last > number ? end_of_last : from;
    if (__any_sync(RF_FULL_WARP, one_each || from != guessed)) next.load(args, from, end);
    sum_bags(args, columns, ends, number, last, from, end, next);
}
