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
    static constexpr int APART = CHUNK * SLOTS; /* lookups between two loads */
    static constexpr int STRIDE = BATCH * SLOTS * WARPS; /* lookups between two batches */
    static constexpr int SHAPE =
        rf_fused_shape_code({DTYPE, ALIGN_, STORE_, LANES_, VECTORS_, WHOLE_, POOLING_, PADDED_});
    static constexpr int KEPT =
        ELEMENTS > SLOTS ? ELEMENTS / SLOTS : 1; /* elements of a sum that a lane keeps */
    /* Returns the index of a chunk that this lane loads; surplus lanes load an index again. */
    static RF_INLINE int index_of_lane() { return threadIdx.x % LANES % CHUNK; }
};

/* Adds the sums of the slots. This lane keeps S::KEPT elements of the result, from element `first` on. */
template <class S, int N, int APART> RF_INLINE void rf_merge_slots(float *sum, int &first) {
    if constexpr (APART < S::GROUP) {
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & APART;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float kept = upper ? sum[i + N / 2] : sum[i], given = upper ? sum[i] : sum[i + N / 2];
                sum[i] = kept + __shfl_xor_sync(RF_FULL_WARP, given, APART);
            }
            first += upper ? N / 2 : 0;
            rf_merge_slots<S, N / 2, 2 * APART>(sum, first);
        } else {
            sum[0] += __shfl_xor_sync(RF_FULL_WARP, sum[0], APART);
            rf_merge_slots<S, 1, 2 * APART>(sum, first);
        }
    }
}

/* Sums a value over the lanes of a warp that share a bag. */
template <class S> RF_INLINE int rf_sum_of_group(int value) {
#pragma unroll
    for (int apart = 1; apart < S::GROUP; apart *= 2) value += __shfl_xor_sync(RF_FULL_WARP, value, apart);
    return value;
}

#endif
