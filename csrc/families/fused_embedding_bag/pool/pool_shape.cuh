/* The shape of a class of features, as constants, and sums over the slots of a bag. */
#ifndef RECFUSE_FUSED_POOL_SHAPE_CUH
#define RECFUSE_FUSED_POOL_SHAPE_CUH

#include "families/fused_embedding_bag/pool/indices.cuh"

template <int DTYPE, int ALIGN_, int STORE_, int LANES_, int VECTORS_, int WHOLE_, int POOLING_, int PADDED_,
          int THREADS_, int DISTANCE_, int SPLIT_>
struct rf_fused_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN_> vector;
    static constexpr int ALIGN = ALIGN_, STORE = STORE_, LANES = LANES_, VECTORS = VECTORS_;
    static constexpr int POOLING = POOLING_, PADDED = PADDED_, DISTANCE = DISTANCE_;
    static constexpr bool SPLIT = SPLIT_ > 1; /* blocks share bags */
    static constexpr bool WHOLE = WHOLE_; /* LANES lanes read the whole row at once */
    static constexpr bool QUANTIZED = rf_is_quantized(DTYPE); /* codes, with a scale and a bias a row */
    static constexpr int ELEMENTS = ALIGN_ * 8 / element::BITS; /* per vector */
    static constexpr int GROUP = THREADS_ < 32 ? THREADS_ : 32; /* lanes of a warp that share a bag */
    static constexpr int WARPS = THREADS_ / GROUP;              /* warps that share a bag */
    static constexpr int SLOTS = GROUP / LANES_;                /* slots of a bag in a warp */
    static constexpr int BATCH = rf_fused_indices_at_once(DISTANCE_); /* indices that a slot loads at once */
    static constexpr int CHUNK = LANES_ < BATCH ? LANES_ : BATCH; /* consecutive indices of a load */
    static constexpr int LOADS = BATCH / CHUNK;
    static constexpr int LOAD_STEP = CHUNK * SLOTS; /* lookups between two loads */
    static constexpr int STRIDE = BATCH * SLOTS * WARPS; /* lookups between two batches */
    static constexpr int SHAPE =
        rf_fused_shape_code({DTYPE, ALIGN_, STORE_, LANES_, VECTORS_, WHOLE_, POOLING_, PADDED_});
    static constexpr int LANE_ELEMENTS =
        ELEMENTS > SLOTS ? ELEMENTS / SLOTS : 1; /* elements of a sum that a lane keeps */
    /* Returns the index of a chunk that this lane loads; surplus lanes load an index again. */
    static RF_INLINE int index_of_lane() { return threadIdx.x % LANES % CHUNK; }
};

/* Adds the sums of the slots. This lane keeps S::KEPT elements of the result, from element `first` on. */
template <class S, int N, int LOAD_STEP> RF_INLINE void rf_merge_slots(float *sum, int &first) {
    if constexpr (LOAD_STEP < S::GROUP) {
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & LOAD_STEP;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float own_half = upper ? sum[i + N / 2] : sum[i],
                            other_half = upper ? sum[i] : sum[i + N / 2];
                sum[i] = own_half + __shfl_xor_sync(RF_FULL_WARP, other_half, LOAD_STEP);
            }
            first += upper ? N / 2 : 0;
            rf_merge_slots<S, N / 2, 2 * LOAD_STEP>(sum, first);
        } else {
            sum[0] += __shfl_xor_sync(RF_FULL_WARP, sum[0], LOAD_STEP);
            rf_merge_slots<S, 1, 2 * LOAD_STEP>(sum, first);
        }
    }
}

/* Sums a value over the lanes of a warp that share a bag. */
template <class S> RF_INLINE int rf_sum_of_group(int value) {
#pragma unroll
    for (int stride = 1; stride < S::GROUP; stride *= 2)
        value += __shfl_xor_sync(RF_FULL_WARP, value, stride);
    return value;
}

#endif
