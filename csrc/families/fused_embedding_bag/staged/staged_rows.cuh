/* Rows of staged tables: four lookups of a lane are read from shared memory and added, and the sums of a bag are
 * reduced and stored. */
#ifndef RECFUSE_FUSED_STAGED_ROWS_CUH
#define RECFUSE_FUSED_STAGED_ROWS_CUH

#include "families/fused_embedding_bag/staged/producer.cuh"
#include "families/fused_embedding_bag/pool/pool.cuh"

template <int DTYPE, int ALIGN, int STORE_, int VECTORS_, int POOLING_, int PADDED_, int THREADS>
struct staged_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN> vector;
    static constexpr int STORE = STORE_, VECTORS = VECTORS_, POOLING = POOLING_, PADDED = PADDED_;
    static constexpr int GROUP = THREADS; /* lanes of a warp that share a bag */
    static constexpr int STRIDE = 4 * THREADS; /* lookups of a bag that one index load covers */
    static constexpr int ROW = ALIGN * VECTORS;
    static constexpr int VECTOR_ELEMENTS = ALIGN / element::BYTES,
                         ELEMENTS = VECTOR_ELEMENTS * VECTORS; /* per vector, per row */
    static constexpr int LANE_ELEMENTS =
        ELEMENTS > GROUP ? ELEMENTS / GROUP : 1; /* sum elements that a lane keeps */
    /* The fields of a shape that must equal the feature's: all except those that say how vectors are read. */
    static constexpr int SHAPE = rf_fused_shape_code({DTYPE, 0, STORE, 0, 0, 1, POOLING, PADDED});
    static constexpr int SHAPE_BITS = ~rf_fused_shape_code({0, 31, 0, 63, 3, 0, 0, 0});
    static_assert(VECTORS == 1 || (VECTORS == 2 && ALIGN == WORD && GROUP > 1), "as lanes take turns");
};

RF_INLINE rf_bytes<4> load_shared(rf_u32 from, const rf_bytes<4> &) {
    rf_bytes<4> to;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to.word[0]) : "r"(from));
    return to;
}
RF_INLINE rf_bytes<8> load_shared(rf_u32 from, const rf_bytes<8> &) {
    rf_bytes<8> to;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to.word[0]), "=r"(to.word[1]) : "r"(from));
    return to;
}
RF_INLINE rf_bytes<16> load_shared(rf_u32 from, const rf_bytes<16> &) {
    rf_bytes<16> to;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "r"(from));
    return to;
}

struct __align__(16) four_indices {
    RF_INDEX index[4];
};

/* Loads four indices from a position that is a multiple of four. Indices before the first lookup are in an
 * aligned word with it: they are read but not used. Memory may end with the last lookup. */
RF_INLINE void load_indices(const rf_fused_args &args, const RF_INDEX *from, four_indices &to) {
    const RF_POSITION position = (RF_POSITION)(from - args.indices);
    if (position + 4 > (RF_POSITION)args.end) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            to.index[k] = position + k < (RF_POSITION)args.end ? rf_load(from + k) : 0;
        return;
    }
    rf_load_words(to.index, from);
}

/* The remaining lookups of this lane in a bag, relative to the first index of the next batch: [skip,
 * left). */
struct staged_remaining {
    RF_POSITION position; /* a multiple of four */
    RF_POSITION count;
    int skip; /* at most 3, before the first lookup of the bag */

    RF_INLINE staged_remaining(const rf_bag &bag, int first_lookup) {
        position = (bag.begin & ~(RF_POSITION)3) + first_lookup;
        count = bag.end - position;
        skip = (int)(bag.begin & 3) - first_lookup;
    }
};

/* A table as seen by a lane. */
template <class S> struct staged_table {
    rf_rows rows;
    RF_INDEX padding = 0;
    rf_u32 base; /* position in the ring of this lane's first vector of row 0 */

    RF_INLINE staged_table(const staged_task &task)
        : rows(task.rows), base(task.base + (S::VECTORS == 2 ? threadIdx.x % 2 * WORD : 0)) {
        if (S::PADDED) padding = task.padding;
    }
    /* Returns the address of a row in shared memory, or that of the row of zeros. */
    RF_INLINE rf_u32 address(RF_INDEX index, bool valid) const {
        const rf_u32 at = base + (rf_u32)index * S::ROW;
        const rf_u32 round =
            min(at, at - RF_FUSED_STAGED_RING); /* unsigned: without a wrap the difference is larger */
        return address_of(the_ring().bytes) + (valid ? round : RF_FUSED_STAGED_RING);
    }
};

/* The partial result of a lane for a bag. */
template <class S> struct staged_sum {
    float sum[S::ELEMENTS]; /* of two vectors, the one read first is first */
    int counted; /* lookups that are not padding */
};

/* Adds the rows of the four lookups of a lane. */
template <class S>
RF_INLINE void add_rows(const rf_fused_args &args, const staged_table<S> &table,
                        const staged_remaining &remaining, const four_indices &indices, staged_sum<S> &to,
                        int &missing) {
    rf_u32 at[4];
    float scale[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const RF_INDEX index = indices.index[k];
        const bool valid = k < remaining.count && (k == 3 || k >= remaining.skip);
        bool outside;
        const bool is_read = rf_is_row_read<S>(index, valid, table.rows, table.padding, outside, to.counted);
        missing += outside;
        at[k] = table.address(index, is_read);
        scale[k] = RF_WEIGHTED && is_read ? rf_load(args.sample_weights + remaining.position + k) : 0.0f;
    }
    typename S::vector row[4][S::VECTORS];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        row[k][0] = load_shared(at[k], row[k][0]);
        if (S::VECTORS == 2) row[k][S::VECTORS - 1] = load_shared(at[k] ^ WORD, row[k][0]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int e = 0; e < S::ELEMENTS; e++) {
            const float value = S::element::get(row[k][e / S::VECTOR_ELEMENTS], e % S::VECTOR_ELEMENTS);
            to.sum[e] = RF_WEIGHTED ? fmaf(scale[k], value, to.sum[e]) : to.sum[e] + value;
        }
    }
}

/* Finishes a bag: reduces the sums of the lanes; each lane stores its elements. Without padding the mean
 * divides by `lookups`. */
template <class S>
RF_INLINE void finish_bag(const rf_fused_args &args, rf_u8 *output, bool valid, staged_sum<S> &pooled,
                          rf_i64 lookups) {
    int first = 0;
    if constexpr (S::VECTORS == 2) {
        /* Each lane keeps the vector that it read first, which the other lane read second. */
#pragma unroll
        for (int i = 0; i < S::VECTOR_ELEMENTS; i++)
            pooled.sum[i] += __shfl_xor_sync(RF_FULL_WARP, pooled.sum[i + S::VECTOR_ELEMENTS], 1);
        first = threadIdx.x % 2 * S::VECTOR_ELEMENTS;
        rf_merge_slots<S, S::VECTOR_ELEMENTS, 2>(pooled.sum, first);
    } else {
        rf_merge_slots<S, S::ELEMENTS, 1>(pooled.sum, first);
    }
    if (S::PADDED) {
        lookups = rf_sum_of_group<S>(pooled.counted);
    }
    if (!valid || threadIdx.x % S::GROUP >= S::ELEMENTS / S::LANE_ELEMENTS) return;
    float values[S::LANE_ELEMENTS];
#pragma unroll
    for (int e = 0; e < S::LANE_ELEMENTS; e++) values[e] = rf_pooled_value<S>(pooled.sum[e], lookups);
    rf_store<S::STORE, S::LANE_ELEMENTS>(output + first * rf_element<RF_OUTPUT>::BYTES, values);
}

#endif
