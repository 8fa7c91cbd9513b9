/* Broadcast-add: adds the user's product, the bias and the activation to each candidate's product, in place.
 *
 *     out[c] = activation(out[c] + base[parent[c]] + bias); with args.replace without out[c]: a gather;
 *     RF_TAIL: also adds the products of the last rows of k, which those in `out` lack
 *
 * out [count, item], base [parents, item]; an item is rows * columns elements in vectors of RF_VECTOR bytes.
 * A thread has RF_STEPS vectors, RF_BLOCK apart; those of a block are consecutive, so that adjacent threads
 * read adjacent vectors of one candidate and of one user. Each element is read once and written once, so the
 * kernel runs at memory speed; users stay in L2 while their candidates are consecutive. Sums are in float32
 * (float64 for float64) and rounded once. An invalid parent counts as zeros, and the thread of the item's
 * first vector reports it.
 * No shared memory. Launch: grid [ceil(count * item_vectors / (RF_BLOCK * RF_STEPS))], block [RF_BLOCK].
 * Source: the broadcast fusion of IKBO (in-kernel broadcast optimization), section 2.
 */

#ifndef RF_DTYPE
#define RF_DTYPE 1
#define RF_VECTOR 16
#endif
#ifndef RF_BLOCK
#define RF_BLOCK 256
#endif
#ifndef RF_STEPS
#define RF_STEPS 4
#endif
#ifndef RF_TAIL
#define RF_TAIL 0
#endif

#include "families/ikbo_linear/activation.cuh"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/parent.cuh"
#include "gpu/device/element.cuh"

typedef rf_element<RF_DTYPE> element;
typedef element::number sum_t;
typedef rf_elements<RF_DTYPE, 1> element_t;
typedef rf_bytes<RF_VECTOR> vector_t;
enum { ELEMENTS = RF_VECTOR / (int)element::BYTES }; /* per vector */

RF_INLINE sum_t bias_of(const rf_broadcast_add_args &args, rf_u32 at) {
    return element::get(rf_load((const element_t *)args.bias + at), 0);
}

template <int ACTIVATION> RF_INLINE void activate(sum_t (&sum)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum[i] = rf_activate<ACTIVATION>(sum[i]);
}

/* Adds the bias to vector `at` of an item. Rows and columns ascend within a vector. */
RF_INLINE void add_bias(const rf_broadcast_add_args &args, rf_u32 at, sum_t (&sum)[ELEMENTS]) {
    rf_u32 row = at * ELEMENTS / args.columns, column = at * ELEMENTS - row * args.columns;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        sum[i] += bias_of(args, args.bias_on_columns ? column : row);
        if (++column == args.columns) {
            column = 0;
            row++;
        }
    }
}

/* Adds the products of the last rows of k. A vector is within one row of m. Adjacent threads read the same
 * weights. */
RF_INLINE void add_tail(const rf_broadcast_add_args &args, rf_i64 item, rf_u32 at, sum_t (&sum)[ELEMENTS]) {
    const rf_u32 row = at * ELEMENTS / args.columns, column = at * ELEMENTS - row * args.columns;
    const element_t *weight = (const element_t *)args.tail_weight + row * args.tail_weight_pitch[0];
    const element_t *x = (const element_t *)args.tail_x + item * args.tail_x_pitch[0] + column;
    for (int k = 0; k < args.tail; k++) {
        const sum_t factor = element::get(rf_load(weight + k * args.tail_weight_pitch[1]), 0);
        const vector_t values = rf_load((const vector_t *)(x + k * args.tail_x_pitch[1]));
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) sum[i] += factor * element::get(values, i);
    }
}

/* Handles vector `at` of an item. Branches on arguments are uniform, and free compared with memory. */
RF_INLINE void add(const rf_broadcast_add_args &args, rf_i64 item, rf_u32 at) {
    const rf_i64 parent = args.parent == nullptr ? item : rf_load(args.parent + item);
    const bool good = (rf_u64)parent < (rf_u64)args.parents;
    if (!good && at == 0 && args.report)
        rf_report_parent(args.errors, args.map, item, parent, args.parents, args.count);
    vector_t *out = (vector_t *)args.out + item * args.item_vectors + at;
    vector_t base = {}, old = {}, result;
    if (good) base = rf_load((const vector_t *)args.base + parent * args.item_vectors + at);
    if (!args.replace) old = *out;
    sum_t sum[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum[i] = element::get(base, i) + element::get(old, i);
    if (RF_TAIL) add_tail(args, item, at, sum);
    if (args.bias != nullptr) add_bias(args, at, sum);
    if (args.activation == RF_ACTIVATION_RELU) activate<RF_ACTIVATION_RELU>(sum);
    if (args.activation == RF_ACTIVATION_GELU) activate<RF_ACTIVATION_GELU>(sum);
    if (args.activation == RF_ACTIVATION_SILU) activate<RF_ACTIVATION_SILU>(sum);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) element::set(result, i, sum[i]);
    *out = result;
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_broadcast_add(const __grid_constant__ rf_broadcast_add_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 first = (rf_i64)blockIdx.x * (RF_BLOCK * RF_STEPS);
    /* One long division per thread, for the block's first vector; the other divisions are short. */
    const rf_i64 first_item = first / args.item_vectors;
    const rf_u32 first_at = (rf_u32)(first - first_item * args.item_vectors);
#pragma unroll
    for (int step = 0; step < RF_STEPS; step++) {
        const rf_u32 at = first_at + step * RF_BLOCK + threadIdx.x;
        const rf_u32 items = at / args.item_vectors;
        if (first_item + items < args.count) add(args, first_item + items, at - items * args.item_vectors);
    }
}
