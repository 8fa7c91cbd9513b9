/* Short bags: gathers rows of one table and pools them, several bags a warp.
 *
 *   output[b] = pool(weight[indices[i]] for i in [offsets[b], offsets[b + 1]))      sum or mean
 *
 * weight [rows, RF_DIM] of RF_DTYPE, with a stride of RF_STRIDE elements; indices [lookups]; offsets [bags]
 * or [bags + 1], or NULL if all bags are equally long; output [bags, RF_DIM]. Sums are in float32.
 *
 * Thread mapping. A warp has RF_BAGS consecutive bags, at most 32; lane i reads the bounds of bag i. LANES
 * lanes read a row, 16 bytes each (fewer if rows are not aligned to 16); such a group of lanes has BAGS_A_GROUP of
 * the bags. Rows wider than 32 lanes x 2 vectors are cut into slices over gridDim.y.
 *
 * If all bags of a warp have at most one lookup, lane i reads the index of bag i together with its offsets,
 * from the position that it has if all bags are equally long. Groups have adjacent bags, whose rows are
 * copied unchanged, all at once.
 *
 * Otherwise a group reads the lookups of its BAGS_A_GROUP consecutive bags as one list, BATCH rows at a time, across
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
    static constexpr int GROUPS = 32 / LANES, BAGS_A_GROUP = RF_BAGS / GROUPS;
    /* Rows of a list in flight: as many as fit into the registers that the sums leave. */
    static constexpr int REGISTERS = 65536 / (RF_BLOCK * RF_MIN_BLOCKS); /* of a thread */
    static constexpr bool FEW_ROWS = OLDER_GPU || LANES < 4 || RF_POOLING == RF_MEAN || REGISTERS < 64;
    static constexpr int BATCH = (FEW_ROWS ? 4 : 8) / VECTORS;
    static constexpr int INDICES = larger(BATCH / LANES, 1); /* indices that a lane loads at once */
    static constexpr int CHUNK = INDICES * LANES; /* indices that a group loads at once */
    static constexpr int BATCHES = CHUNK / BATCH;
    static constexpr bool ALL_INSIDE = COLUMNS % (LANES * VECTORS) == 0; /* all vectors are inside the row */
};
static_assert(RF_BAGS <= 32 && shape::BAGS_A_GROUP * shape::GROUPS == RF_BAGS &&
                  shape::BAGS_A_GROUP * shape::VECTORS <= 8,
              "a lane a bag, and whole turns whose rows are in flight together");
static_assert(shape::CHUNK % shape::BATCH == 0, "whole batches");
static_assert(RF_POOLING != RF_MAX, "maxima are embedding_bag.cu's");

#include "families/embedding_bag/bag_sum.cuh"

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
    row_part rows[shape::BAGS_A_GROUP];
    RF_ROW batch_rows[shape::BAGS_A_GROUP];
#pragma unroll
    for (int t = 0; t < shape::BAGS_A_GROUP; t++)
        batch_rows[t] = __shfl_sync(RF_FULL_WARP, row, t * shape::GROUPS + group);
#pragma unroll
    for (int t = 0; t < shape::BAGS_A_GROUP; t++) rows[t].load(columns, table, batch_rows[t]);
#pragma unroll
    for (int t = 0; t < shape::BAGS_A_GROUP; t++) {
        if (bag + t * shape::GROUPS < args.bags)
            rows[t].store(columns, to + t * shape::GROUPS * args.output_pitch);
    }
}

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

    static RF_INLINE int position_of(int from, int i) {
        return from + i * shape::LANES + (int)threadIdx.x % shape::LANES;
    }
    RF_INLINE void load(const rf_embedding_bag_args &args, int from, int end) {
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++)
            index[i] = position_of(from, i) < end ? rf_load(args.indices + position_of(from, i)) : 0;
    }
    /* Converts indices to rows and reports this lane's first invalid index. `number`: a bag of the warp at or
     * before them. */
    RF_INLINE void rows(const rf_embedding_bag_args &args, int from, int end, int number,
                        RF_ROW (&row)[shape::INDICES]) const {
        bool any_bad = false;
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++) {
            const bool valid = position_of(from, i) < end;
            row[i] = valid ? row_of(args, index[i]) : NO_ROW;
            any_bad |= valid && row[i] == NO_ROW;
        }
        if (!RF_CHECK || !any_bad) return;
        rf_i64 bag = first_of_warp() + number;
        for (int i = 0; i < shape::INDICES; i++) { /* reads the indices again, because this is rare */
            const int position = position_of(from, i);
            const rf_i64 bad = position < end ? (rf_i64)rf_load(args.indices + position) : 0;
            if (position >= end || (rf_u64)bad < (rf_u64)args.rows) continue;
            while (bag + 1 < args.bags && rf_bag_at(args, bag).end <= position) bag++;
            rf_report_index(args, bag, position, bad);
            return;
        }
    }
};

/* Adds one batch, whose lookups end before `batch_end`. ONE_BAG: all rows are valid, and no bag ends before the last
 * row. */
template <bool ONE_BAG>
RF_INLINE void sum_batch(const rf_embedding_bag_args &args, const rf_columns<shape> &columns,
                         const rf_u8 *table, int bag_ends, const batch_of_rows &batch_rows, int batch_end,
                         summed_bag &bag) {
    row_part rows[shape::BATCH];
#pragma unroll
    for (int u = 0; u < shape::BATCH; u++) {
        if (ONE_BAG) {
            rows[u].load_valid(columns, table, batch_rows.row[u]);
        } else {
            rows[u].load(columns, table, batch_rows.row[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < shape::BATCH; u++) {
        rows[u].add_to(bag.sum);
        bag.counted += ONE_BAG || batch_rows.row[u] != PADDING;
        if (!ONE_BAG && u < shape::BATCH - 1)
            bag.finish(args, columns, bag_ends, batch_end - shape::BATCH + u + 1);
    }
    bag.finish(args, columns, bag_ends, batch_end);
}

/* Sums the bags [number, last) of a group, whose lookups [from, end) are one list. `next` holds the first
 * chunk of the list, already loaded. `bag_ends`: the end of each lane's bag. */
RF_INLINE void sum_bags(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, int bag_ends,
                        int number, int last, int from, int end, chunk next) {
    __shared__ chunk_of_rows of_groups[RF_BLOCK / shape::LANES];
    chunk_of_rows &rows = of_groups[threadIdx.x / shape::LANES];
    const rf_u8 *table = columns.address(0);
    rf_keep(table);
    summed_bag bag(args, columns, number, last, bag_ends);
    bag.finish(args, columns, bag_ends, from);
#pragma unroll 1
    for (; __any_sync(RF_FULL_WARP, from < end); from += shape::CHUNK) {
        RF_ROW row[shape::INDICES];
        next.rows(args, from, end, bag.number, row);
        next.load(args, from + shape::CHUNK, end);
        bool valid = true;
        __syncwarp(); /* the previous rows have been read */
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++) {
            ((RF_ROW *)&rows)[i * shape::LANES + threadIdx.x % shape::LANES] = row[i];
            valid &= row[i] >= 0;
        }
        const bool all_valid = __all_sync(RF_FULL_WARP, valid);
        __syncwarp();
#pragma unroll 1
        for (int batch = 0; batch < shape::BATCHES; batch++) {
            const int batch_end = from + (batch + 1) * shape::BATCH;
            const batch_of_rows batch_rows = rows.batch[batch];
            if (__all_sync(RF_FULL_WARP, bag.end >= batch_end) && all_valid) {
                sum_batch<true>(args, columns, table, bag_ends, batch_rows, batch_end, bag);
            } else {
                if (batch > 0 && !__any_sync(RF_FULL_WARP, batch_end - shape::BATCH < end)) break;
                sum_batch<false>(args, columns, table, bag_ends, batch_rows, batch_end, bag);
            }
        }
    }
}

/* Sums bags that are not consecutive, row by row. Only invalid offsets lead here. `bag_begins`: the begin of each
 * lane's bag. */
RF_INLINE void sum_scattered_bags(const rf_embedding_bag_args &args, const rf_columns<shape> &columns,
                                  int bag_begins, int bag_ends, int number, int last) {
#pragma unroll 1
    for (int turn = 0; turn < shape::BAGS_A_GROUP; turn++, number++) {
        const int from = __shfl_sync(RF_FULL_WARP, bag_begins, number),
                  end = __shfl_sync(RF_FULL_WARP, bag_ends, number);
        if (number >= last) continue;
        summed_bag bag(args, columns, number);
#pragma unroll 1
        for (int position = from; position < end; position++) {
            const rf_i64 index = rf_load(args.indices + position);
            const RF_ROW row = row_of(args, index);
            if (RF_CHECK && row == NO_ROW) rf_report_index(args, first_of_warp() + number, position, index);
            row_part part;
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
    const bool has_bag = lane < RF_BAGS && bag < args.bags, single = args.mean_lookups <= 1;
    const rf_i64 guess = (single ? bag : first + group * shape::BAGS_A_GROUP) * args.mean_lookups;
    const int guessed = (int)min(guess, args.lookups); /* there may be fewer bags than turns */

    /* Prefetches the first indices into L2 while the previous kernel ends. */
    const int prefetched = guessed + (single ? 0 : lane % shape::LANES);
    if (prefetched < args.lookups && (has_bag || !single)) rf_prefetch(args.indices + prefetched);
    if (has_bag && args.offsets != nullptr) rf_prefetch(args.offsets + bag);
    rf_wait_for_previous_kernel();
    if (first >= args.bags) return;

    /* Loads the offsets and, at the same time, indices from the position that they have if all bags are
     * equally long. */
    rf_i64 index = 0;
    chunk next = {};
    if (single && has_bag && guessed < args.lookups) index = rf_load(args.indices + guessed);
    if (!single) next.load(args, guessed, (int)args.lookups);
    const rf_bag lookups = has_bag ? rf_bag_at(args, bag) : rf_bag{0, 0};
    const int bag_begins = (int)lookups.begin, bag_ends = (int)lookups.end;

    if (__all_sync(RF_FULL_WARP, bag_ends - bag_begins <= 1)) {
        RF_ROW row = NO_ROW;
        if (bag_begins < bag_ends) {
            if (!single || bag_begins != guessed) index = rf_load(args.indices + bag_begins);
            row = row_of(args, index);
            if (RF_CHECK && row == NO_ROW) rf_report_index(args, bag, bag_begins, index);
        }
        copy_rows(args, columns, row);
        return;
    }
    const int previous_end = __shfl_up_sync(RF_FULL_WARP, bag_ends, 1);
    const bool consecutive = __all_sync(RF_FULL_WARP, !has_bag || lane == 0 || bag_begins == previous_end);
    const int bags_in_warp = (int)min(args.bags - first, (rf_i64)RF_BAGS);
    const int number = group * shape::BAGS_A_GROUP,
              last = max(min(number + shape::BAGS_A_GROUP, bags_in_warp), number);
    if (!consecutive) {
        sum_scattered_bags(args, columns, bag_begins, bag_ends, number, last);
        return;
    }
    const int from = __shfl_sync(RF_FULL_WARP, bag_begins, number);
    const int end_of_last = __shfl_sync(RF_FULL_WARP, bag_ends, max(last - 1, 0));
    const int end = last > number ? end_of_last : from;
    if (__any_sync(RF_FULL_WARP, single || from != guessed)) next.load(args, from, end);
    sum_bags(args, columns, bag_ends, number, last, from, end, next);
}
