/* The kernels around torch's attention in the portable path: users of candidates, chunks, reordering of rows.
 *
 * rf_attention_prepare: users[i] = map[i], or the number of users if that is invalid; reports invalid values.
 * A thread has one
 *   candidate, one length and one offset. Grid [ceil(max(n_items, users + 1) / RF_BLOCK)].
 * rf_attention_cut: the chunks of attention_packed_args.h, as sequences for torch: begins of their rows,
 * keys, numbers of keys.
 *   A thread has one chunk. Grid [ceil(chunks / RF_BLOCK)].
 * rf_attention_pack: reorders rows of items, pads heads with zeros, and makes query heads that share keys
 * rows of one head:
 *   [item, query, kv_head, group, dim] becomes [item, query, group, kv_head, dim]. Also packs keys and values
 *   that torch's
 *   kernels cannot read in place. Grid [ceil(count * item_vectors / (RF_BLOCK * RF_STEPS))].
 * rf_attention_unpack: the inverse, with zeros and -inf for users without keys, where torch's results are
 * undefined; also the
 *   log-sum-exp. Grid [ceil(count * item_pieces / (RF_BLOCK * RF_STEPS))].
 * In both a thread has RF_STEPS vectors of RF_VECTOR bytes, RF_BLOCK apart: adjacent threads move adjacent
 * vectors, each read once and written once. No shared memory. Block [RF_BLOCK].
 * Source: the packed form of IKBO attention (in-kernel broadcast optimization), section 3.
 */
#ifndef RF_VECTOR
#define RF_VECTOR 16
#endif
#ifndef RF_BLOCK
#define RF_BLOCK 256
#endif
#ifndef RF_STEPS
#define RF_STEPS 4
#endif

#include "families/ikbo_attention/contents.cuh"
#include "families/ikbo_attention/packed/attention_packed_args.h"

typedef rf_bytes<RF_VECTOR> vector_t;

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_attention_prepare(const __grid_constant__ rf_attention_prepare_args args) {
    const rf_i64 at = (rf_i64)blockIdx.x * RF_BLOCK + threadIdx.x;
    const reporter_t to = {args.errors, args.report != 0};
    if (at < args.n_items) {
        args.users[at] = user_at(args.map, args.keys, at);
        check_map(args.map, args.keys, at, args.n_items, to);
    }
    check_keys(args.keys, at, to);
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_attention_cut(const __grid_constant__ rf_attention_cut_args args) {
    const rf_i64 at = (rf_i64)blockIdx.x * RF_BLOCK + threadIdx.x;
    const rf_i64 chunks = rf_attention_chunks(&args.items);
    if (at >= chunks) return;
    const rf_attention_chunk chunk = rf_attention_chunk_at(&args.items, at);
    const rf_attention_keys keys = rf_attention_keys_of(&args.keys, chunk.user);
    args.rows[chunk.number] = (rf_i32)(chunk.begin * args.items.rows);
    args.first[chunk.number] = (rf_i32)keys.first;
    args.lengths[chunk.number] = (rf_i32)keys.count;
    if (at > 0) return;
    args.rows[chunks] = (rf_i32)(args.items.count * args.items.rows);
    args.first[chunks] = 0;
}

/* Packs vector `at` of item `item`. */
RF_INLINE void pack(const rf_attention_pack_args &args, rf_i64 item, rf_u32 at) {
    const rf_u32 row_heads = at / args.head_vectors, vector = at - row_heads * args.head_vectors;
    const rf_u32 query = row_heads / args.heads, place = row_heads - query * args.heads;
    const rf_u32 kv_heads = args.heads / args.group;
    const rf_u32 head = place % kv_heads * args.group + place / kv_heads;
    const rf_i64 source = args.order == nullptr ? item : args.order[item];
    vector_t moved = {};
    if (vector < args.used_vectors)
        moved = rf_load((const vector_t *)args.from + source * args.pitch[0] + query * args.pitch[1] +
                        head * args.pitch[2] + vector);
    ((vector_t *)args.to)[item * args.item_vectors + at] = moved;
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK, 4)
    rf_attention_pack(const __grid_constant__ rf_attention_pack_args args) {
    const rf_i64 first = (rf_i64)blockIdx.x * (RF_BLOCK * RF_STEPS);
    /* One long division per thread, for the block's first vector; the other divisions are short. */
    const rf_i64 first_item = first / args.item_vectors;
    const rf_u32 first_at = (rf_u32)(first - first_item * args.item_vectors);
#pragma unroll
    for (int step = 0; step < RF_STEPS; step++) {
        const rf_u32 at = first_at + step * RF_BLOCK + threadIdx.x, items = at / args.item_vectors;
        if (first_item + items < args.count) pack(args, first_item + items, at - items * args.item_vectors);
    }
}

RF_INLINE float lse_of(const rf_attention_unpack_args &args, rf_i64 item, rf_i64 user, rf_i64 n_keys,
                       rf_i64 row, rf_u32 kv_head) {
    if (n_keys == 0) return -__int_as_float(0x7f800000);
    if (args.from == nullptr) return logf((float)n_keys); /* without a dim all scores are 0 */
    if (!args.lse_by_chunk) return args.lse_from[kv_head * args.lse_pitch[1] + row * args.lse_pitch[2]];
    const rf_i64 chunk = rf_attention_chunk_of(&args.items, item, user);
    return args.lse_from[(chunk - args.first_chunk) * args.lse_pitch[0] + kv_head * args.lse_pitch[1] +
                         (row - args.rows[chunk]) * args.lse_pitch[2]];
}

/* Unpacks vector `at` of item `item`: a vector of a head, and with its first vector the log-sum-exp of the
 * head. */
RF_INLINE void unpack(const rf_attention_unpack_args &args, rf_i64 item, rf_u32 at) {
    const rf_i64 user = rf_attention_user_of(&args.items, item);
    if (args.from != nullptr) {
        const rf_i64 chunk = rf_attention_chunk_of(&args.items, item, user);
        if (chunk < args.first_chunk || chunk >= args.end_chunk) return;
    }
    const rf_u32 vectors = args.head_vectors > 0 ? args.head_vectors : 1;
    const rf_u32 row_heads = at / vectors, vector = at - row_heads * vectors;
    const rf_u32 query = row_heads / args.heads, head = row_heads - query * args.heads;
    const rf_u32 kv_head = head / args.group;
    const rf_i64 row = (item * args.queries + query) * args.group + (head - kv_head * args.group);
    const rf_i64 to = args.order == nullptr ? item : args.order[item];
    const rf_i64 n_keys = rf_attention_keys_of(&args.keys, user).count;
    if (args.head_vectors > 0) {
        vector_t moved = {};
        if (n_keys > 0)
            moved = rf_load((const vector_t *)args.from + row * args.from_pitch[0] +
                            kv_head * args.from_pitch[1] + vector);
        const rf_i64 item_vectors = (rf_i64)args.item_pieces; /* equal if there is a dim */
        ((vector_t *)args.out)[to * item_vectors + at] = moved;
    }
    if (vector == 0 && args.lse != nullptr)
        args.lse[(to * args.heads + head) * args.queries + query] =
            lse_of(args, item, user, n_keys, row, kv_head);
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK, 4)
    rf_attention_unpack(const __grid_constant__ rf_attention_unpack_args args) {
    const rf_i64 first = (rf_i64)blockIdx.x * (RF_BLOCK * RF_STEPS);
    const rf_i64 first_item = first / args.item_pieces;
    const rf_u32 first_at = (rf_u32)(first - first_item * args.item_pieces);
#pragma unroll
    for (int step = 0; step < RF_STEPS; step++) {
        const rf_u32 at = first_at + step * RF_BLOCK + threadIdx.x, items = at / args.item_pieces;
        if (first_item + items < args.items.count)
            unpack(args, first_item + items, at - items * args.item_pieces);
    }
}
