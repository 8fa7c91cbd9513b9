/* The gradient of sample weights: for each lookup that counts, the dot product of its row and its bag's
 * gradient. Other elements keep their value, zero.
 *
 * Thread mapping. A warp has a bag, of which it takes every gridDim.y-th round of lookups; LANES lanes have a
 * lookup, at most a quarter of the columns, so a round has 32 / LANES lookups, with UNROLL rounds in flight.
 * A lane adds its columns in their order, then lanes are reduced pairwise: a fixed order of additions.
 * Launch: grid [ceil(n_features * bags / warps), parts], block [RF_BAGS_BLOCK].
 */
#include "families/fused_backward/bags/backward_bags.cuh"

#ifndef RF_GRAD_DTYPE
#define RF_GRAD_DTYPE RF_FLOAT32
#endif
#ifndef RF_QUANTIZED /* whether a table is quantised, or its rows have gaps */
#define RF_QUANTIZED 0
#endif

enum { UNROLL = 2 /* lookups in flight per lane */ };

/* A bag's gradient, and the lanes of a row. */
struct bag_grad_t {
    const rf_u8 *grad; /* of the bag's first column */
    rf_i64 first; /* first column of the lane */
    int lanes;
    bool is_aligned, grad_is_aligned;

    RF_INLINE columns_t grad_of(rf_i64 column, int count) const {
        return columns_of<RF_GRAD_DTYPE>(grad, column, count, grad_is_aligned);
    }
};

/* Returns four codes of a row from column `first` on, as numbers without scale and bias. */
template <int DTYPE>
RF_INLINE columns_t codes_of(const rf_u8 *row, rf_i64 first, int count, bool is_aligned) {
    enum { BITS = rf_element<DTYPE>::BITS };
    const rf_u8 *from = row + first * BITS / 8;
    rf_bytes<4> codes = {};
    columns_t to;
    if (is_aligned) {
        codes.word[0] = rf_load((const rf_bytes<LANE_COLUMNS * BITS / 8> *)from).word[0];
    } else {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS * BITS / 8; i++)
            if (i * 8 < count * BITS)
                codes.word[0] |= (rf_u32)rf_load((const rf_bytes<1> *)(from + i)).word[0] << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) to.of[i] = rf_element<DTYPE>::get(codes, i);
    return to;
}

/* As are_aligned, of a table whose rows may have gaps. */
RF_INLINE bool are_rows_aligned(const rf_bags_feature &feature) {
    if (!RF_QUANTIZED) return are_aligned(feature.weight, feature.dtype, feature.dim, feature.dim);
    const int bytes = LANE_COLUMNS * rf_element_bits(feature.dtype) / 8;
    return ((rf_u64)feature.weight | (rf_u64)feature.pitch) % bytes == 0 && feature.dim % LANE_COLUMNS == 0;
}

/* Returns four columns of a row. Columns after the last have no meaning. */
RF_INLINE columns_t row_columns(const rf_bags_feature &feature, rf_i64 number, rf_i64 column, int count,
                                bool is_aligned) {
    if (!RF_QUANTIZED)
        return columns_of(feature.weight, feature.dtype, number * feature.dim + column, count, is_aligned);
    const rf_u8 *row = feature.weight + number * feature.pitch;
    if (!rf_is_quantized(feature.dtype)) return columns_of(row, feature.dtype, column, count, is_aligned);
    columns_t values = feature.dtype == RF_INT8_ROWS ? codes_of<RF_INT8_ROWS>(row, column, count, is_aligned)
                                                     : codes_of<RF_INT4_ROWS>(row, column, count, is_aligned);
    const rf_bytes<4> parameters =
        rf_load((const rf_bytes<4> *)(feature.parameters + number * feature.parameters_pitch));
    const float scale = rf_element<RF_FLOAT16>::get(parameters, 0);
    const float bias = rf_element<RF_FLOAT16>::get(parameters, 1);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) values.of[i] = fmaf(scale, values.of[i], bias);
    return values;
}

/* Adds the products of four columns of some lookups. */
RF_INLINE void products_add(const rf_bags_feature &feature, const bag_grad_t &bag, rf_i64 column, int count,
                            const columns_t &grad, const rf_i64 (&rows)[UNROLL], float (&sums)[UNROLL]) {
    columns_t values[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
        if (rows[k] >= 0) values[k] = row_columns(feature, rows[k], column, count, bag.is_aligned);
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        if (rows[k] < 0) continue;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) sums[k] = fmaf(grad.of[i], values[k].of[i], sums[k]);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BAGS_BLOCK, RF_QUANTIZED ? 6 : 8)
    rf_sample_weights(const __grid_constant__ rf_bags_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 slot = (rf_i64)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    if (slot >= args.n_features * args.bags) return;
    const rf_i64 number = slot / args.bags, bag = slot - number * args.bags;
    const rf_bags_feature feature = args.features[number];
    const bag_t lookups = bag_of(args, number, bag);
    bag_grad_t at;
    at.lanes = lanes_of(feature.dim, 32);
    at.first = threadIdx.x % at.lanes * LANE_COLUMNS;
    const rf_u8 *grad = args.grad + feature.output_column * rf_element<RF_GRAD_DTYPE>::BYTES;
    at.grad = grad + bag * args.output_dim * rf_element<RF_GRAD_DTYPE>::BYTES;
    at.is_aligned = are_rows_aligned(feature);
    at.grad_is_aligned = are_aligned(grad, RF_GRAD_DTYPE, args.output_dim, feature.dim);
    const bool is_narrow = feature.dim <= 32 * LANE_COLUMNS;
    const int count = (int)min(max(feature.dim - at.first, (rf_i64)0), (rf_i64)LANE_COLUMNS);
    columns_t narrow_grad = {};
    if (is_narrow && count > 0 && lookups.from < lookups.to) narrow_grad = at.grad_of(at.first, count);
    const int at_once = 32 / at.lanes, own_slot = (int)threadIdx.x % 32 / at.lanes;
    const rf_i64 stride = (rf_i64)at_once * UNROLL;
    for (rf_i64 round = lookups.from + blockIdx.y * stride; round < lookups.to; round += gridDim.y * stride) {
        rf_i64 rows[UNROLL];
        float sums[UNROLL] = {};
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const rf_i64 lookup = round + k * at_once + own_slot;
            rows[k] = lookup < lookups.to ? row_of(args, feature, lookup) : -1;
        }
#pragma unroll 1
        for (rf_i64 column = at.first; column < feature.dim; column += 32 * LANE_COLUMNS) {
            const int some = (int)min(feature.dim - column, (rf_i64)LANE_COLUMNS);
            products_add(feature, at, column, some, is_narrow ? narrow_grad : at.grad_of(column, some), rows,
                         sums);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            for (int apart = at.lanes / 2; apart > 0; apart /= 2)
                sums[k] += __shfl_xor_sync(RF_FULL_WARP, sums[k], apart);
            const rf_i64 lookup = round + k * at_once + own_slot;
            if (threadIdx.x % at.lanes == 0 && rows[k] >= 0) args.output[lookup] = sums[k];
        }
    }
}
