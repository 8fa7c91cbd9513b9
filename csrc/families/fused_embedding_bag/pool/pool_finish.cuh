/* The end of a bag: reduces the sums of slots, warps and blocks, and stores the result. */
#ifndef RECFUSE_FUSED_POOL_FINISH_CUH
#define RECFUSE_FUSED_POOL_FINISH_CUH

#include "families/fused_embedding_bag/pool/pool_rows.cuh"

/* Returns this block's part of a bag. */
template <class S>
RF_INLINE rf_bag rf_load_part(const rf_fused_args &args, const rf_fused_task &task, const RF_OFFSET *offsets,
                              int bag, int &bad) {
    const rf_bag whole_bag = rf_load_bag(args, offsets, bag, task.last_bag, bad);
    if (!S::SPLIT) return whole_bag;
    const int splits = rf_fused_splits(task.split);
    const RF_POSITION split_lookups = (whole_bag.end - whole_bag.begin + splits - 1) / splits;
    const RF_POSITION begin =
        min(whole_bag.begin + (rf_fused_split_part(task.split)) * split_lookups, whole_bag.end);
    return {begin, min(begin + split_lookups, whole_bag.end)};
}

/* Returns a sum or its mean. */
template <class S> RF_INLINE float rf_pooled_value(float sum, rf_i64 count) {
    return S::POOLING == RF_MEAN && count > 1 ? rf_divide(sum, (float)count) : sum;
}

/* The sums of blocks that share bags: [parts][bags][LANES * VECTORS * ELEMENTS + 1] floats. The last is the
 * number of lookups counted. */
template <class S> struct rf_shared_bags {
    static constexpr int WIDTH = S::LANES * S::VECTORS * S::ELEMENTS;
    float *sums;
    int bags;

    RF_INLINE rf_shared_bags(const rf_fused_args &args, const rf_fused_task &task)
        : sums(args.partials + (rf_i64)task.partials * 32), bags(task.last_bag - task.first_bag) {}
    RF_INLINE float *of(int split_number, int bag) const {
        return sums + ((rf_i64)split_number * bags + bag) * (WIDTH + 1);
    }
};

/* Writes the sums of this block's split of a bag, for the reduction over blocks. `first`: the first of the N
 * elements of each vector that this lane has. */
template <class S, int N>
RF_INLINE void rf_write_split(const rf_fused_args &args, const rf_fused_task &task, int bag,
                              const rf_pooled<S> &pooled, int first, rf_i64 count) {
    const rf_shared_bags<S> shared(args, task);
    float *to = shared.of(rf_fused_split_part(task.split), bag - task.first_bag);
#pragma unroll
    for (int i = 0; i < S::VECTORS; i++) {
#pragma unroll
        for (int e = 0; e < N; e++)
            to[(threadIdx.x % S::LANES + i * S::LANES) * S::ELEMENTS + first + e] =
                pooled.sum[i * S::ELEMENTS + e];
    }
    if (threadIdx.x % S::GROUP == 0) to[rf_shared_bags<S>::WIDTH] = (float)count;
}

/* Finishes a bag: reduces the sums of slots and warps; one lane per range of elements stores it, or writes it
 * for the reduction over blocks. */
template <class S>
RF_INLINE void rf_finish_bag(const rf_fused_args &args, const rf_fused_task &task, const RF_OFFSET *offsets,
                             int bag, const rf_pool_source<S> &source, rf_pooled<S> &pooled,
                             float *partial_sums) {
    constexpr int FLOATS = S::VECTORS * S::ELEMENTS, STORING_SLOTS = S::ELEMENTS / S::LANE_ELEMENTS;
    int first = 0;
    rf_i64 count = 0;
    if (S::QUANTIZED && S::POOLING != RF_MAX) {
#pragma unroll
        for (int i = 0; i < FLOATS; i++) pooled.sum[i] += pooled.bias;
    }
    if constexpr (S::SLOTS > 1) rf_merge_slots<S, S::ELEMENTS, S::LANES>(pooled.sum, first);
    if (S::PADDED) {
        pooled.counted = rf_sum_of_group<S>(pooled.counted);
        count = pooled.counted;
    } else if (S::SPLIT || S::POOLING == RF_MEAN) {
        /* Read again: keeping it would take registers from the rows in flight. */
        int bad = 0;
        const rf_bag lookups = rf_load_part<S>(args, task, offsets, bag, bad);
        count = lookups.end - lookups.begin;
    }
    if constexpr (S::WARPS > 1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        __syncthreads(); /* the previous bag has been read */
#pragma unroll
        for (int i = 0; i < FLOATS; i++) partial_sums[(warp * (FLOATS + 1) + i) * 32 + lane] = pooled.sum[i];
        partial_sums[(warp * (FLOATS + 1) + FLOATS) * 32 + lane] = __int_as_float(pooled.counted);
        __syncthreads();
        if (warp % S::WARPS != 0) return;
#pragma unroll 1
        for (int other = warp + 1; other < warp + S::WARPS; other++) {
#pragma unroll
            for (int i = 0; i < FLOATS; i++)
                pooled.sum[i] += partial_sums[(other * (FLOATS + 1) + i) * 32 + lane];
            if (S::PADDED) count += __float_as_int(partial_sums[(other * (FLOATS + 1) + FLOATS) * 32 + lane]);
        }
    }
    if (bag >= task.last_bag || source.slot() >= STORING_SLOTS) return;
    constexpr int LANE_ELEMENTS = S::SLOTS > 1 ? S::LANE_ELEMENTS : S::ELEMENTS;
    if constexpr (S::SPLIT) {
        rf_write_split<S, LANE_ELEMENTS>(args, task, bag, pooled, first, count);
        return;
    }
    rf_u8 *to = source.output + (rf_u64)(rf_u32)bag * args.output_pitch;
#pragma unroll
    for (int i = 0; i < S::VECTORS; i++) {
        if (!S::WHOLE &&
            source.column_of(task) + i * S::LANES >= rf_load(&args.features[task.feature].columns))
            continue;
        float values[LANE_ELEMENTS];
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; e++)
            values[e] = rf_pooled_value<S>(pooled.sum[i * S::ELEMENTS + e], count);
        rf_store<S::STORE, LANE_ELEMENTS>(
            to + (i * S::LANES * S::ELEMENTS + first) * rf_element<RF_OUTPUT>::BYTES, values);
    }
}

/* The last of the blocks that share bags adds their sums in the order of the parts. */
template <class S> RF_INLINE void rf_finish_shared(const rf_fused_args &args, const rf_fused_task &task) {
    typedef rf_shared_bags<S> shared_bags;
    __shared__ bool last;
    const int splits = rf_fused_splits(task.split);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(args.semaphores + task.group, 1u) == (rf_u32)splits - 1;
        if (last) args.semaphores[task.group] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const rf_fused_descriptor &feature = args.features[task.feature];
    const shared_bags shared(args, task);
    const int first = task.slice * shared_bags::WIDTH;
    const int width = min(shared_bags::WIDTH, rf_load(&feature.columns) * S::ELEMENTS - first);
    for (int at = threadIdx.x; at < shared.bags * width; at += RF_BLOCK) {
        const int bag = at / width, column = at % width;
        float sum = 0.0f, count = 0.0f;
        for (int split_number = 0; split_number < splits; split_number++) {
            const float *from = shared.of(split_number, bag);
            sum += __ldcg(from + column);
            count += __ldcg(from + shared_bags::WIDTH);
        }
        const float value = rf_pooled_value<S>(sum, (rf_i64)count);
        constexpr int BYTES = rf_element<RF_OUTPUT>::BYTES;
        rf_store<BYTES, 1>(args.output + (rf_u64)(task.first_bag + bag) * args.output_pitch +
                               rf_load(&feature.output_offset) + (rf_i64)(first + column) * BYTES,
                           &value);
    }
}

#endif
