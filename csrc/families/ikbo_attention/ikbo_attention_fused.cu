/* Attention of candidates and of users over the users' keys and values in one launch.
 *
 *     out[row] = softmax(scale * q[row] . k[user]^T) . v[user]
 *
 * All queries of a user that share a head of keys form one long matrix of rows, cut into tiles of RF_GROUPS *
 * 64: no key is copied for candidates, and only the last tile of a user has unused rows. Warpgroups multiply
 * 64 rows each by the same blocks of RF_KEYS keys and values. A thread copies these one block early, and two
 * warps gather queries one tile early, from any addresses. Blocks claim tiles by a common counter, so that
 * all blocks end at about the same time.
 *
 * The work of a warpgroup is one stream of blocks of keys, across tiles. The products of the next block of
 * keys with the queries overlap with the products of this block's weights with the values, and the
 * exponentials and sums of the next block overlap with the latter. At the end of a tile, the first block of
 * the next tile is the next block.
 *
 * Only the first block of a tile computes the maximum of its scores, because that takes as long as the
 * exponentials. The weights of later blocks are relative to this maximum, and softmax divides the common
 * factor out. If the weights of a row in a block become too large, its scores are computed again, its maximum
 * is raised, and its sums are scaled. So the keys of a block stay in their slot until its weights are known
 * to be valid. A warp does that alone, by mma.sync.
 *
 * A block has RF_GROUPS warpgroups that multiply and a warpgroup that copies. Element 4 i + e of a thread's
 * scores and sums is in row 16 warp + lane / 4 + e / 2 * 8, column 8 i + 2 (lane % 4) + e % 2.
 * Shared memory: RF_ATTENTION_SHARED_BYTES. Launch: grid [SMs or less], block [THREADS], after
 * ikbo_attention_group.cu. Source: IKBO (in-kernel broadcast optimization), section 3; FlashAttention-2 and
 * -3 for the online softmax and the overlap of products and exponentials; FlashDecoding++, section 3, for one
 * maximum for all blocks and the fallback.
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

#include "gpu/device/mma.cuh"
#include "gpu/device/wgmma.cuh"
#include "families/ikbo_attention/ikbo_attention_copy.cuh"
#include "families/ikbo_attention/softmax.cuh"

enum { STEPS = RF_DIM / 16 };

/* Returns a value that is equal in all lanes, in a way that the compiler recognises: it then builds
 * descriptors in uniform registers. */
RF_INLINE rf_u32 same(rf_u32 x) { return __shfl_sync(RF_FULL_WARP, x, 0); }

/* Starts scores = queries . keys^T. */
RF_INLINE void multiply_keys(float (&scores)[SCORES], rf_u32 q, rf_u32 k) {
    const rf_u32 a = same(rf_wgmma_rows_of_128_bytes(q)), b = same(rf_wgmma_rows_of_128_bytes(k));
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        rf_wgmma_shared<RF_DTYPE>(scores, a + (i / 4 * Q_ATOM + i % 4 * 32) / 16,
                                  b + (i / 4 * KV_ATOM + i % 4 * 32) / 16, i > 0);
    rf_wgmma_commit();
}

/* Starts sums += weights . values, or sums = weights . values. */
RF_INLINE void multiply_values(float (&sums)[SUMS], const rf_u32 (&weights)[KEYS / 16][4], rf_u32 v,
                               int add) {
    const rf_u32 b = same(rf_wgmma_columns_of_128_bytes(v, KV_ATOM));
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        rf_wgmma_columns<RF_DTYPE>(sums, weights[i], b + i * 128, i > 0 ? 1 : add);
    rf_wgmma_commit();
}

/* Computes again the scores of the rows `of` a thread's two rows, which weights have overwritten. By one
 * warp, because other warps may not need theirs. */
RF_INLINE void recompute_scores(float (&scores)[SCORES], const bool (&of)[2], rf_u32 q, rf_u32 k, int lane,
                                int warp) {
    const int row = warp * 16 + lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        float products[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            const int q_chunk = step % 4 * 2 + lane / 16, k_chunk = step % 4 * 2 + lane / 8 % 2;
            rf_u32 a[4], b[4];
            rf_load_matrices(a, q + step / 4 * Q_ATOM + row * ATOM_BYTES + (q_chunk ^ row % 8) * 16);
            rf_load_matrices(b,
                             k + step / 4 * KV_ATOM + (i * 16 + key) * ATOM_BYTES + (k_chunk ^ key % 8) * 16);
            rf_mma<RF_DTYPE>(products, a, b);
            rf_mma<RF_DTYPE>(products + 4, a, b + 2);
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (of[j / 2 % 2]) scores[8 * i + j] = products[j];
    }
}

/* Releases a slot that the whole warpgroup has read. */
RF_INLINE void slot_free(rf_u32 empty, int slot, int thread) {
    if (thread == 0) rf_barrier_arrive(empty + slot * 8);
}
/* Releases a slot of keys that a warp has read. */
RF_INLINE void keys_free(const shared_t &at, int slot, int lane) {
    __syncwarp();
    if (lane == 0) rf_barrier_arrive(at.k_empty + slot * 8);
}

/* The work of a warpgroup in a tile. */
struct work_t {
    int rows; /* 0 or less: no rows */
    int keys; /* negative: no more tiles */
    RF_INLINE int blocks() const { return keys > 0 ? (keys + KEYS - 1) / KEYS : 0; }
};

/* Returns the next tile when its queries are loaded. */
RF_INLINE work_t next_tile(const shared_t &at, tiles_t &tiles, int group) {
    const volatile tile_t *tile = tiles.wait(at);
    const work_t work = {tile->rows - group * ROWS, tile->keys};
    if (work.keys >= 0) rf_barrier_wait(at.q_full + tiles.number % Q_SLOTS * 8, tiles.number / Q_SLOTS & 1);
    tiles.done(at);
    return work;
}

/* A warpgroup without rows in a tile releases its slots; one warp does, so that no warp falls behind. */
RF_INLINE void skip_tile(const shared_t &at, int blocks, ring_t<RF_K_SLOTS> &k, ring_t<RF_V_SLOTS> &v,
                         int group, int thread) {
    rf_group_sync(group + 1, WARPGROUP);
    for (int block = 0; block < blocks; block++, k.next(), v.next()) {
        if (thread >= 32) continue;
        rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
        __syncwarp();
        if (thread == 0) rf_barrier_arrive_times(at.k_empty + k.slot * 8, WARPGROUP / 32);
        rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
        __syncwarp();
        slot_free(at.v_empty, v.slot, thread);
    }
    rf_group_sync(group + 1, WARPGROUP);
}

/* One warpgroup, with its rows of each tile. */
struct attend_t {
    const rf_attention_args &args;
    const shared_t &at;
    const int group, thread, lane,
        first_row; /* the first of the thread's two rows; the other is 8 rows later */
    float scores[SCORES], sums[SUMS];
    rf_u32 weights[KEYS / 16][4];
    float block_sums[2];
    row_state_t state;
    ring_t<RF_K_SLOTS> k;
    ring_t<RF_V_SLOTS> v;
    tiles_t tiles;
    work_t tile;

    RF_INLINE attend_t(const rf_attention_args &args, const shared_t &at, int group)
        : args(args), at(at), group(group), thread(threadIdx.x % WARPGROUP), lane(threadIdx.x % 32),
          first_row(threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4), k{0, 0}, v{0, 0}, tiles{0} {}

    RF_INLINE rf_u32 q() const { return at.q + ((tiles.number - 1) % Q_SLOTS * GROUPS + group) * Q_BYTES; }
    RF_INLINE rf_u32 key_block() const { return at.k + k.slot * KV_BYTES; }

    /* Computes the scores of a block, overlapped with the products of the previous block's weights and
     * values. */
    RF_INLINE void begin(int add) {
        rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
        rf_wgmma_begin();
        multiply_keys(scores, q(), key_block());
        rf_wgmma_begin();
        multiply_values(sums, weights, at.v + v.slot * KV_BYTES, add);
        rf_wgmma_wait<1>();
    }
    /* Waits for the products with values, and for the block's own values. */
    RF_INLINE void end() {
        const int read = v.slot;
        v.next();
        /* Here, because the compiler moves the wait for products up to the last preceding loop. */
        rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
        rf_wgmma_wait<0>();
        slot_free(at.v_empty, read, thread);
    }
    RF_INLINE bool exceeded() const {
        return __any_sync(RF_FULL_WARP, state.exceeded(block_sums, 0) || state.exceeded(block_sums, 1));
    }
    /* Raises the maximum of rows whose weights are too large. */
    RF_INLINE void raise_shifts(int keys) {
        const bool of[2] = {row_any(state.exceeded(block_sums, 0)), row_any(state.exceeded(block_sums, 1))};
        float factor[2];
        recompute_scores(scores, of, q(), key_block(), lane, thread / 32);
        if (keys < KEYS) mask(scores, of, keys, lane);
        state.raise(scores, args.scale, tile.rows - first_row, of, factor);
        rescale(sums, factor);
        state.weigh_block(scores, args.scale, of, block_sums);
    }
    RF_INLINE void finish() {
        keys_free(at, k.slot, lane);
        k.next();
        state.add_block(block_sums);
        convert(weights, scores);
    }
    /* Computes the maxima of a tile's first block. */
    RF_INLINE void measure(int keys) {
        const bool of[2] = {true, true};
        float factor[2];
        if (keys < KEYS) mask(scores, of, keys, lane);
        state.begin();
        state.raise(scores, args.scale, tile.rows - first_row, of, factor);
    }

    RF_INLINE void run() {
        tile = next_tile(at, tiles, group);
        while (tile.keys >= 0) {
            int blocks = tile.blocks();
            if (tile.rows <= 0 || blocks == 0) { /* no products */
                skip_tile(at, blocks, k, v, group, thread);
                store_zeros(args, at, group, (tiles.number - 1) % Q_SLOTS, thread);
                tile = next_tile(at, tiles, group);
                continue;
            }
            rf_barrier_wait(at.k_full + k.slot * 8, k.parity);
            rf_wgmma_begin();
            multiply_keys(scores, q(), key_block());
            rf_wgmma_wait<0>();
            measure(tile.keys);
            state.weigh_block(scores, args.scale, block_sums);
            finish();
            /* Keys of this tile after the block whose weights are computed. */
            int remaining_keys = tile.keys - KEYS;
            int add = 0;
            rf_barrier_wait(at.v_full + v.slot * 8, v.parity);
            for (;; remaining_keys -= KEYS) {
                bool exceeds = false;
                /* The next block is complete and of the same tile. */
                for (; remaining_keys >= KEYS; remaining_keys -= KEYS) {
                    begin(add);
                    state.weigh_block(scores, args.scale, block_sums);
                    end();
                    add = 1;
                    exceeds = exceeded();
                    if (exceeds) break;
                    finish();
                }
                if (!exceeds) {
                    const bool ends = remaining_keys <= 0;
                    if (ends) {
                        tile = next_tile(at, tiles, group);
                        remaining_keys = tile.keys;
                        if (tile.rows <= 0 || remaining_keys <= 0) break;
                    }
                    begin(add);
                    const row_state_t before = state;
                    if (ends)
                        measure(remaining_keys);
                    else
                        mask(scores, {true, true}, remaining_keys, lane);
                    state.weigh_block(scores, args.scale, block_sums);
                    end();
                    if (ends) store(args, at, sums, before, group, tiles.number % Q_SLOTS, thread);
                    add = !ends;
                    exceeds = !ends && exceeded();
                }
                if (exceeds) raise_shifts(remaining_keys);
                finish();
            }
            rf_wgmma_begin();
            multiply_values(sums, weights, at.v + v.slot * KV_BYTES, add);
            rf_wgmma_wait<0>();
            slot_free(at.v_empty, v.slot, thread);
            v.next();
            store(args, at, sums, state, group, tiles.number % Q_SLOTS, thread);
        }
    }
};

extern "C" __global__ void __launch_bounds__(RF_ATTENTION_THREADS, 1)
    rf_ikbo_attention(const __grid_constant__ rf_attention_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) barriers_init(at);
    if (threadIdx.x == 32) {
        rf_prefetch_map(&args.k);
        rf_prefetch_map(&args.v);
        if (RF_SEGMENT > 1 && args.candidates.queries > 0) rf_prefetch_map(&args.q);
    }
    if (threadIdx.x / 32 == 2) prefetch_first_keys(args, lane);
    __syncthreads();
    rf_wait_for_previous_kernel();
    /* 40 + 2 * 232 is three times the 168 registers with which each thread starts; more would deadlock. */
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0 && lane == 0) copy_keys(args, at);
        if (warp == 1) claim_tiles(args, at, lane);
        if (warp >= 2 && warp < 2 + LOADERS) copy_rows(args, at, warp - 2, lane);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        attend_t(args, at, group).run();
    }
}
