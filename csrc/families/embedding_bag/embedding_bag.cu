/* Embedding bag: gathers rows of one table and pools them bag by bag.
 *
 *   output[b] = pool(weight[indices[i]] for i in [offsets[b], offsets[b + 1]))      sum, mean or max
 *
 * weight [rows, RF_DIM] of RF_DTYPE, with a stride of RF_STRIDE elements; indices [lookups]; offsets [bags]
 * or [bags + 1]; sample_weights [lookups], optional; output [bags, RF_DIM]. Sums are in float32.
 *
 * Thread mapping. LANES lanes read a row, 16 bytes each (fewer if rows are not aligned to 16). RF_THREADS
 * threads share a bag: a warp reads SLOTS = 32 / LANES rows at once. If a bag has several warps, each takes
 * an equal, contiguous range of its lookups. Partial sums are reduced by shuffles, then in shared memory,
 * always in the same order: results are bit-identical from run to run. Rows wider than 32 lanes x 2 vectors
 * are cut into slices over gridDim.y.
 *
 * Latency. The warp checks the indices of RF_SEGMENT lookups and lists them in shared memory. Then each slot
 * has RF_DISTANCE rows in flight, at the station RF_STATION (station.cuh). The indices of the first segment
 * are loaded together with the offsets, from the position that they have if all bags are equally long.
 *
 * L2 reuse. With RF_PARTS > 1 a list is ordered by the part of the table that holds the row. All bags in
 * flight then sweep through the table together, so that a row that several of them need is read from memory
 * once and hits L2 afterwards. Without this the rows of a large table are evicted before they are used again.
 *
 * Safety. With RF_CHECK the lane that loads an offset or an index checks it, reports it if it is invalid, and
 * leaves it out of the list, like padding. The loops over rows see only valid rows.
 *
 * Launch: grid [ceil(bags / (RF_BLOCK / RF_THREADS)), slices], block [RF_BLOCK]. Dynamic shared memory, in
 * this order: the lists, the sums of the warps, the ring of the station `shared`. embedding_bag.c computes
 * its size.
 *
 * Sources: Jain et al., MICRO'24: stations and distance (IV-B), occupancy by registers (III-C).
 */

#ifndef RF_DTYPE /* default specialisation, if compiled without options */
#define RF_DTYPE RF_FLOAT32
#define RF_DIM 128
#define RF_STRIDE RF_DIM
#define RF_ALIGN 16 /* alignment of all addresses of rows and outputs, in bytes */
#define RF_ROW int /* type of a row index; rf_i64 for tables of 2^31 rows and more */
#define RF_POOLING RF_SUM
#define RF_WEIGHTED 0
#define RF_PADDED 0 /* the call has a padding_idx */
#define RF_CHECK 1
#define RF_PARTS 1 /* parts of the table: part = row >> part_shift; the last part takes the rest */
#define RF_SEGMENT 128 /* a multiple of the lanes of a warp that share a bag */
#define RF_THREADS 64
#define RF_BLOCK 512
#define RF_MIN_BLOCKS 2 /* blocks per SM for which the registers must suffice */
#endif
#ifndef RF_STATION
#define RF_STATION RF_STATION_REGISTER
#define RF_DISTANCE 8
#endif

#include "families/embedding_bag/bag.cuh"
#include "families/embedding_bag/station.cuh"

struct shape : rf_row_shape {
    static constexpr int BLOCK = RF_BLOCK, DISTANCE = RF_DISTANCE, WEIGHTED = RF_WEIGHTED;
    static constexpr int GROUP = smaller(RF_THREADS, 32); /* lanes of a warp that share a bag */
    static constexpr int WARPS = RF_THREADS / GROUP; /* warps that share a bag */
    static constexpr int SLOTS = GROUP / LANES; /* rows of a bag that a warp reads at once */
    static constexpr int INDICES = RF_SEGMENT / GROUP; /* indices of a segment that a lane loads */
    static constexpr int BATCH = DISTANCE * SLOTS; /* rows of a bag in flight */
};
static_assert(RF_THREADS >= shape::LANES && RF_BLOCK % RF_THREADS == 0,
              "a bag's threads hold a row and fit a block");

#include "families/embedding_bag/row_list.cuh"

/* Loads RF_DISTANCE rows per slot, then adds them. PARTIAL: some of them are past the end of the list. */
template <bool PARTIAL, class STATION>
RF_INLINE void pool_batch(const rf_columns<shape> &columns, int slot, STATION &station, const list &rows,
                          int first, int count, shape::sums &sum) {
#pragma unroll
    for (int u = 0; u < shape::DISTANCE; u++) {
        const int at = first + u * shape::SLOTS + slot;
        const bool valid = !PARTIAL || at < count;
        station.fetch(columns, u, valid ? rows.row[at] : 0, valid);
    }
#pragma unroll
    for (int u = 0; u < shape::DISTANCE; u++) {
        const int at = first + u * shape::SLOTS + slot;
        const bool valid = !PARTIAL || at < count;
        station.add(columns, u, 0, valid, valid ? scale_of(rows, at) : 0.0f, sum);
    }
}

/* Pools the rows of a list. The lists of the bags of a warp may differ in length. */
template <class STATION>
RF_INLINE void pool_list(const rf_columns<shape> &columns, int slot, STATION &station, const list &rows,
                         int count, shape::sums &sum) {
    if constexpr (!STATION::ROLLING) {
#pragma unroll 1
        for (int first = 0; __any_sync(RF_FULL_WARP, first < count); first += shape::BATCH) {
            if (__all_sync(RF_FULL_WARP, first + shape::BATCH <= count)) {
                pool_batch<false>(columns, slot, station, rows, first, count, sum);
            } else {
                pool_batch<true>(columns, slot, station, rows, first, count, sum);
            }
        }
    } else {
#pragma unroll
        for (int u = 0; u < shape::DISTANCE; u++) {
            const int at = u * shape::SLOTS + slot;
            station.fetch(columns, u, at < count ? rows.row[at] : 0, at < count);
            station.fetched();
        }
#pragma unroll 1
        for (int first = 0; __any_sync(RF_FULL_WARP, first < count); first += shape::BATCH) {
#pragma unroll
            for (int u = 0; u < shape::DISTANCE; u++) {
                const int at = first + u * shape::SLOTS + slot, later = at + shape::BATCH;
                station.wait();
                station.add(columns, u, at < count ? rows.row[at] : 0, at < count,
                            at < count ? scale_of(rows, at) : 0.0f, sum);
                station.fetch(columns, u, later < count ? rows.row[later] : 0, later < count);
                station.fetched();
            }
        }
    }
}

RF_INLINE float merge(float a, float b) { return RF_POOLING == RF_MAX ? fmaxf(a, b) : a + b; }

/* The partial sums of a warp, for the first warp of its bag. */
struct __align__(16) warp_sums {
    float of[shape::VECTORS * shape::ELEMENTS][shape::LANES];
    rf_i64 counted;
};

/* Reduces `sum` and `counted` of the bag's slots and warps into slot 0 of its first warp. */
RF_INLINE void merge_bag(warp_sums *partial_sums, int slot, int warp, int lane_column, shape::sums &sum,
                         rf_i64 &counted) {
    constexpr int FLOATS = shape::VECTORS * shape::ELEMENTS;
#pragma unroll
    for (int apart = shape::LANES; apart < shape::GROUP; apart *= 2) {
#pragma unroll
        for (int i = 0; i < FLOATS; i++)
            sum.of[i] = merge(sum.of[i], __shfl_xor_sync(RF_FULL_WARP, sum.of[i], apart));
    }
    if (RF_PADDED) {
#pragma unroll
        for (int apart = 1; apart < shape::GROUP; apart *= 2)
            counted += __shfl_xor_sync(RF_FULL_WARP, counted, apart);
    }
    if constexpr (shape::WARPS > 1) {
        warp_sums *warp_sum = partial_sums + threadIdx.x / 32;
        if (slot == 0 && warp > 0) {
#pragma unroll
            for (int i = 0; i < FLOATS; i++) warp_sum->of[i][lane_column] = sum.of[i];
            if (RF_PADDED && lane_column == 0) warp_sum->counted = counted;
        }
        __syncthreads();
        if (slot == 0 && warp == 0) {
#pragma unroll 1
            for (int w = 1; w < shape::WARPS; w++) {
#pragma unroll
                for (int i = 0; i < FLOATS; i++) sum.of[i] = merge(sum.of[i], warp_sum[w].of[i][lane_column]);
                if (RF_PADDED) counted += warp_sum[w].counted;
            }
        }
    }
}

/* fmaxf drops NaNs. As in torch, the maximum is NaN only if the first row of the bag has the NaN. */
RF_INLINE void max_of_first_row(const rf_embedding_bag_args &args, const rf_columns<shape> &columns,
                                const rf_bag &bag, shape::sums &sum) {
    rf_i64 row = -1;
    for (rf_i64 i = bag.begin; i < bag.end && row < 0; i++) {
        const rf_i64 index = rf_load(args.indices + i);
        if ((rf_u64)index < (rf_u64)args.rows && !(RF_PADDED && index == args.padding_idx)) row = index;
    }
#pragma unroll
    for (int i = 0; i < shape::VECTORS * shape::ELEMENTS; i++) {
        if (row < 0) sum.of[i] = 0.0f;
    }
    if (row < 0) return;
    const shape::vector *from = (const shape::vector *)columns.address(row);
#pragma unroll
    for (int v = 0; v < shape::VECTORS; v++) {
        if (!columns.inside(v)) continue;
        const shape::vector first = rf_load(from + v * shape::LANES);
#pragma unroll
        for (int e = 0; e < shape::ELEMENTS; e++) {
            const float value = shape::element::get(first, e);
            if (value != value) sum.of[v * shape::ELEMENTS + e] = value;
        }
    }
}

RF_INLINE void store(const rf_embedding_bag_args &args, const rf_columns<shape> &columns, rf_i64 bag,
                     const shape::sums &sum) {
    shape::vector *to = rf_output_of(args, bag, columns.column);
#pragma unroll
    for (int v = 0; v < shape::VECTORS; v++) {
        if (columns.inside(v)) to[v * shape::LANES] = rf_pooled(sum, v);
    }
}

/* The lookups of one warp of a bag. */
RF_INLINE rf_bag part_of(const rf_bag &bag, int warp) {
    if (shape::WARPS == 1) return bag;
    const rf_i64 lookups_a_warp = (bag.end - bag.begin + shape::WARPS - 1) / shape::WARPS;
    const rf_i64 from = min(bag.begin + warp * lookups_a_warp, bag.end);
    return {from, min(from + lookups_a_warp, bag.end)};
}

typedef rf_station_of<shape, RF_STATION>::type station_type;

extern "C" __global__ void __launch_bounds__(RF_BLOCK, RF_MIN_BLOCKS)
    rf_embedding_bag(const __grid_constant__ rf_embedding_bag_args args) {
    extern __shared__ __align__(16) rf_u8 shared[];
    list *lists = (list *)shared;
    warp_sums *partial_sums = (warp_sums *)(lists + RF_BLOCK / shape::GROUP);
    const int lane = threadIdx.x % shape::GROUP, slot = lane / shape::LANES,
              lane_column = lane % shape::LANES;
    const int warp = threadIdx.x % RF_THREADS / shape::GROUP;
    const rf_i64 bag = (rf_i64)blockIdx.x * (RF_BLOCK / RF_THREADS) + threadIdx.x / RF_THREADS;
    const rf_columns<shape> columns = {args.weight,
                                       (int)blockIdx.y * shape::LANES * shape::VECTORS + lane_column};
    station_type station((rf_u8 *)(partial_sums + (shape::WARPS > 1 ? RF_BLOCK / 32 : 0)));
    rf_wait_for_previous_kernel();

    /* Loads the offsets and, at the same time, the first indices from the position that they have if all bags
     * are equally long. */
    const rf_bag guessed = rf_bag_if_even(args, bag), guessed_part = part_of(guessed, warp);
    raw_indices raw = load_indices(args, guessed_part.begin, guessed_part.end);
    const rf_bag whole_bag = bag < args.bags ? rf_bag_at(args, bag) : rf_bag{0, 0};
    shape::sums sum;
#pragma unroll
    for (int i = 0; i < shape::VECTORS * shape::ELEMENTS; i++)
        sum.of[i] = RF_POOLING == RF_MAX ? -__int_as_float(0x7f800000) : 0.0f;

    const rf_bag warp_bag = part_of(whole_bag, warp);
    if (!__all_sync(RF_FULL_WARP, whole_bag.begin == guessed.begin && whole_bag.end == guessed.end))
        raw = load_indices(args, warp_bag.begin, warp_bag.end);
    rf_i64 counted = 0;
    list &rows = lists[threadIdx.x / shape::GROUP];
#pragma unroll 1
    for (rf_i64 base = warp_bag.begin;;) {
        const int count = make_list(args, bag, raw, base, warp_bag.end, rows, counted);
        base += RF_SEGMENT;
        if (base < warp_bag.end) prefetch_indices(args, base, warp_bag.end);
        pool_list(columns, slot, station, rows, count, sum);
        if (!__any_sync(RF_FULL_WARP, base < warp_bag.end)) break;
        raw = load_indices(args, base, warp_bag.end);
        __syncwarp(); /* all lanes must have read the list before it is overwritten */
    }
    merge_bag(partial_sums, slot, warp, lane_column, sum, counted);
    if (bag >= args.bags || slot != 0 || warp != 0) return;
    if (RF_POOLING == RF_MAX) max_of_first_row(args, columns, whole_bag, sum);
    if (RF_POOLING == RF_MEAN) {
        const rf_i64 count = RF_PADDED ? counted : whole_bag.end - whole_bag.begin;
        const float divisor = count > 0 ? (float)count : 1.0f;
#pragma unroll
        for (int i = 0; i < shape::VECTORS * shape::ELEMENTS; i++) sum.of[i] /= divisor;
    }
    store(args, columns, bag, sum);
}
