/* The list of the valid rows of a segment, in the order of their reads: indices are loaded, checked and, with
 * RF_PARTS > 1, ordered by the part of the table. Requires `shape` and the macros of embedding_bag.cu. */
#ifndef RECFUSE_EMBEDDING_BAG_ROW_LIST_CUH
#define RECFUSE_EMBEDDING_BAG_ROW_LIST_CUH

#include "families/embedding_bag/bag.cuh"

/* The valid rows of a segment in the order of their reads. Each group of lanes that shares a bag has a
 * list. */
struct __align__(16) list {
    RF_ROW row[RF_SEGMENT];
#if RF_WEIGHTED
    float scale[RF_SEGMENT];
#endif
};

RF_INLINE float scale_of(const list &rows, int at) {
#if RF_WEIGHTED
    return rows.scale[at];
#else
    return 1.0f;
#endif
}

/* Reports the first invalid index among this lane's lookups of a segment. Reads them again, because this is
 * rare. */
RF_INLINE void report_index(const rf_embedding_bag_args &args, rf_i64 bag, rf_i64 position, rf_i64 end) {
    for (; position < end; position += shape::GROUP) {
        const rf_i64 index = rf_load(args.indices + position);
        if ((rf_u64)index < (rf_u64)args.rows) continue;
        rf_report_index(args, bag, position, index);
        return;
    }
}

/* The indices of a segment, unchecked. */
struct raw_indices {
    RF_INDEX index[shape::INDICES];
};

RF_INLINE raw_indices load_indices(const rf_embedding_bag_args &args, rf_i64 begin, rf_i64 end) {
    raw_indices raw;
#pragma unroll
    for (int i = 0; i < shape::INDICES; i++) {
        const rf_i64 position = begin + i * shape::GROUP + threadIdx.x % shape::GROUP;
        raw.index[i] = position < end ? rf_load(args.indices + position) : 0;
    }
    return raw;
}

/* Prefetches the indices of the next segment into L2. Registers would be taken from the rows in flight. */
RF_INLINE void prefetch_indices(const rf_embedding_bag_args &args, rf_i64 begin, rf_i64 end) {
    const rf_i64 position = begin + threadIdx.x % shape::GROUP * shape::INDICES;
    if (position < end) rf_prefetch(args.indices + position);
}

/* Lists the rows of at most a segment of lookups from `begin` on and returns their number. Adds to `counted`
 * the lookups of this lane that are not padding. */
RF_INLINE int make_list(const rf_embedding_bag_args &args, rf_i64 bag, const raw_indices &raw, rf_i64 begin,
                        rf_i64 end, list &rows, rf_i64 &counted) {
    const int lane = threadIdx.x % shape::GROUP, first_lane = threadIdx.x % 32 - lane;
    const rf_u32 group = shape::GROUP == 32 ? RF_FULL_WARP : ((1u << shape::GROUP % 32) - 1u) << first_lane;
    const rf_u32 lanes_before = group & ((1u << threadIdx.x % 32) - 1u);
    RF_ROW row[shape::INDICES]; /* -1: skipped */
    bool any_bad = false;
#if RF_WEIGHTED
    float scale[shape::INDICES];
#endif
#pragma unroll
    for (int i = 0; i < shape::INDICES; i++) {
        const rf_i64 position = begin + i * shape::GROUP + lane, index = raw.index[i];
        const bool inside = position < end, padding = RF_PADDED && index == args.padding_idx;
        const bool bad = RF_CHECK && inside && (rf_u64)index >= (rf_u64)args.rows;
        any_bad |= bad;
        if (RF_PADDED) counted += inside && !padding;
#if RF_WEIGHTED
        scale[i] = inside ? rf_load(args.sample_weights + position) : 0.0f;
#endif
        row[i] = inside && !bad && !padding ? (RF_ROW)index : -1;
    }
    if (any_bad) report_index(args, bag, begin + lane, end);
    int count = 0;
#pragma unroll
    for (int part = 0; part < RF_PARTS; part++) {
#pragma unroll
        for (int i = 0; i < shape::INDICES; i++) {
            const bool in_part = part < RF_PARTS - 1 ? row[i] >> args.part_shift == part
                                                     : row[i] >= (RF_ROW)part << args.part_shift;
            const rf_u32 lanes_in_part = __ballot_sync(RF_FULL_WARP, in_part) & group;
            if (in_part) {
                const int at = count + __popc(lanes_in_part & lanes_before);
                rows.row[at] = row[i];
#if RF_WEIGHTED
                rows.scale[at] = scale[i];
#endif
            }
            count += __popc(lanes_in_part);
        }
    }
    __syncwarp();
    return count;
}

#endif
