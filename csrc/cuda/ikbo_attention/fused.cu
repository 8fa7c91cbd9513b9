/* Attention of candidates and of users over the users' keys and values in one launch.
 *
 *     out[row] = softmax(scale * q[row] . k[user]^T) . v[user]
 *
 * All queries of a user that share a head of keys are one long matrix of rows, cut into tiles of RF_GROUPS * 64: no key is
 * copied to candidates, and only a user's last tile has rows to spare. Warpgroups multiply 64 rows each by the same blocks
 * of RF_KEYS keys and values, which a thread copies a block ahead; two warps gather queries a tile ahead, from wherever
 * they are. Blocks take tiles from a common count, so that no block ends long before another.
 *
 * A warpgroup's work is one stream of blocks of keys, across tiles: the products of the next block with the queries
 * run beside those of this block's weights with the values, and the maximum, exponentials and sums of the next block
 * beside the latter. At a tile's end the next tile's first block takes the next one's place.
 *
 * A block: RF_GROUPS warpgroups that multiply, one that copies. A thread has, of scores and of sums, number 4 i + e: row
 * 16 warp + lane / 4 + e / 2 * 8, column 8 i + 2 (lane % 4) + e % 2.
 * Shared memory: RF_ATTENTION_SHARED_BYTES. Launch: grid [SMs or less], block [THREADS], behind group.cu.
 * Source: IKBO (in-kernel broadcast optimization), section 3; FlashAttention-2 and -3 for the online softmax and the
 * overlap of products and exponentials.
 */

#ifndef RF_DTYPE
#define RF_DTYPE 1
#endif
#ifndef RF_DIM
#define RF_DIM 128
#define RF_KEYS 128
#define RF_K_SLOTS 3
#define RF_V_SLOTS 2
#define RF_SEGMENT 64
#endif

#include "device/wgmma.cuh"
#include "ikbo_attention/fused_copy.cuh"
#include "ikbo_attention/softmax.cuh"

enum {
    STEPS = RF_DIM / 16,
    SOONER = SCORES / 2, /* scores that become weights while the products with values run */
};

/* The same in all lanes, as the compiler does not see: descriptors are then made in uniform registers, not moved to them. */
RF_INLINE rf_u32 same(rf_u32 x) { return __shfl_sync(RF_FULL_WARP, x, 0); }

/* scores = queries . keys^T: begun. */
RF_INLINE void multiply_keys(float (&scores)[SCORES], rf_u32 q, rf_u32 k) {
    const rf_u32 a = same(rf_wgmma_rows_of_128_bytes(q)), b = same(rf_wgmma_rows_of_128_bytes(k));
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        rf_wgmma_shared<RF_DTYPE>(scores, a + (i / 4 * Q_ATOM + i % 4 * 32) / 16,
                                  b + (i / 4 * KV_ATOM + i % 4 * 32) / 16, i > 0);
    rf_wgmma_commit();
}

/* sums += weights . values, or without what they were: begun. */
RF_INLINE void multiply_values(float (&sums)[SUMS], const rf_u32 (&weights)[KEYS / 16][4], rf_u32 v,
                               int add) {
    const rf_u32 b = same(rf_wgmma_columns_of_128_bytes(v, KV_ATOM));
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        rf_wgmma_columns<RF_DTYPE>(sums, weights[i], b + i * 128, i > 0 ? 1 : add);
    rf_wgmma_commit();
}

/* A slot has been read by the whole warpgroup. */
RF_INLINE void slot_free(rf_u32 empty, int slot, int thread) {
    if (thread == 0) rf_barrier_arrive(empty + slot * 8);
}

/* What a warpgroup has of a tile. */
struct work_t {
    int rows; /* 0 or less: none */
    int keys; /* below 0: there are no more tiles */
    int split; /* tile_t */
    RF_INLINE int blocks() const { return keys > 0 ? (keys + KEYS - 1) / KEYS : 0; }
};

/* The next tile, when its queries are there. */
RF_INLINE work_t next_tile(const shared_t &at, tiles_t &tiles, int group) {
    const volatile tile_t *tile = tiles.wait(at);
    const work_t work = {tile->rows - group * ROWS, tile->keys, tile->split};
    if (work.keys >= 0) rf_barrier_wait(at.q_full + tiles.number % Q_SLOTS * 8, tiles.number / Q_SLOTS & 1);
    tiles.done(at);
    return work;
}

/* A warpgroup without rows of a tile gives its slots back; by one warp, so that none falls behind. */
RF_INLINE void pass(const shared_t &at, int blocks, ring_t<RF_K_SLOTS> &k, ring_t<RF_V_SLOTS> &v, int group,
                    int thread) {
    rf_group_sync(group + 1, WARPGROUP);
    for (int block = 0; block < blocks; block++, k.next(), v.next()) {
        if (thread >= 32) continue;
        rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
        __syncwarp();
        slot_free(at.k_empty, k.slot, thread);
        rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
        __syncwarp();
        slot_free(at.v_empty, v.slot, thread);
    }
    rf_group_sync(group + 1, WARPGROUP);
}

/* A warpgroup's queries of the tile before number `next`. */
RF_INLINE rf_u32 q_at(const shared_t &at, int group, int next) {
    return at.q + ((next - 1) % Q_SLOTS * GROUPS + group) * Q_BYTES;
}

/* One warpgroup: its rows of every tile. */
RF_INLINE void attend(const rf_attention_args &args, const shared_t &at, int group) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    float scores[SCORES], sums[SUMS];
    rf_u32 weights[KEYS / 16][4];
    float shift[2], factor[2];
    row_state_t state;
    ring_t<RF_K_SLOTS> k = {0, 0};
    ring_t<RF_V_SLOTS> v = {0, 0};
    tiles_t tiles = {0};
    work_t tile = next_tile(at, tiles, group);
    while (tile.keys >= 0) {
        int blocks = tile.blocks();
        if (tile.rows <= 0 || blocks == 0) { /* nothing to multiply */
            pass(at, blocks, k, v, group, thread);
            store_zeros(args, at, group, (tiles.number - 1) % Q_SLOTS, thread);
            tile = next_tile(at, tiles, group);
            continue;
        }
        rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
        rf_wgmma_begin();
        multiply_keys(scores, q_at(at, group, tiles.number), at.k + k.slot * KV_BYTES);
        rf_wgmma_wait<0>();
        slot_free(at.k_empty, k.slot, thread);
        k.next();
        if (tile.keys < KEYS) mask(scores, tile.keys, lane);
        state.begin();
        state.raise(scores, args.scale, shift, factor);
        state.take<0, SOONER>(scores, args.scale, shift); /* in the order of the loop: the same bits */
        state.take<SOONER, SCORES>(scores, args.scale, shift);
        convert<0, SCORES>(weights, scores);
        rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
        int last = 0; /* tile_t's split of the tile whose sums these are, at the end */
        int add = 0, left = blocks - 1; /* blocks of this tile beyond the one whose weights there are */
        if (left > 0) rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
        for (;;) {
            const bool ends = left == 0;
            const int split = tile.split;
            int keys = tile.keys - (blocks - left) * KEYS; /* of the next block and those behind it */
            if (ends) {
                tile = next_tile(at, tiles, group);
                blocks = left = tile.blocks();
                keys = tile.keys;
                if (tile.rows <= 0 || blocks == 0) {
                    last = split;
                    break;
                }
                rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
            }
            rf_wgmma_begin();
            multiply_keys(scores, q_at(at, group, tiles.number), at.k + k.slot * KV_BYTES);
            rf_wgmma_begin();
            multiply_values(sums, weights, at.v + v.slot * KV_BYTES, add);
            rf_wgmma_wait<1>();
            slot_free(at.k_empty, k.slot, thread);
            k.next();
            if (keys < KEYS) mask(scores, keys, lane);
            const row_state_t ended = state;
            if (ends) state.begin();
            state.raise(scores, args.scale, shift, factor);
            state.take<0, SOONER>(scores, args.scale, shift);
            const int read = v.slot;
            v.next();
            left--;
            /* Here, since the compiler moves the wait for products up to the last loop before it. */
            rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
            if (left > 0) rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
            rf_wgmma_wait<0>();
            slot_free(at.v_empty, read, thread);
            if (ends) {
                store(args, at, sums, ended, split, group, tiles.number % Q_SLOTS, thread);
                factor[0] = factor[1] = 0;
            }
            add = !ends;
            rescale(sums, factor);
            convert<0, SOONER>(weights, scores);
            state.take<SOONER, SCORES>(scores, args.scale, shift);
            convert<SOONER, SCORES>(weights, scores);
        }
        rf_wgmma_begin();
        multiply_values(sums, weights, at.v + v.slot * KV_BYTES, add);
        rf_wgmma_wait<0>();
        slot_free(at.v_empty, v.slot, thread);
        v.next();
        store(args, at, sums, state, last, group, tiles.number % Q_SLOTS, thread);
    }
}

extern "C" __global__ void __launch_bounds__(RF_ATTENTION_THREADS, 1)
    rf_ikbo_attention(const __grid_constant__ rf_attention_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) barriers_init(at);
    __syncthreads();
    rf_wait_for_previous_kernel();
    /* 40 and twice 232 are three times the 168 that a thread of so many starts with; with more, all would wait for ever. */
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0 && lane == 0) copy_keys(args, at);
        if (warp == 1) take_tiles(args, at, lane);
        if (warp >= 2 && warp < 2 + LOADERS) copy_rows(args, at, warp - 2, lane);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        attend(args, at, group);
    }
}
