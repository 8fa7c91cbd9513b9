/* The warps of ikbo_attention_fused.cu that claim tiles and copy keys and values. */
#ifndef RECFUSE_IKBO_ATTENTION_FUSED_COPY_CUH
#define RECFUSE_IKBO_ATTENTION_FUSED_COPY_CUH

#include "families/ikbo_attention/ikbo_attention_fused.cuh"

/* Copies a block of KEYS keys or values of tile n. Reads the tile's description again, because registers are
 * scarce here. Data that no other tile reads leave L2 first; otherwise they would evict data that all blocks
 * read, instructions included. */
RF_INLINE void copy_block(const rf_attention_args &args, const shared_t &at, const rf_tensor_map *map, int n,
                          int block, rf_u32 to, rf_u32 barrier) {
    const volatile tile_t *tile = &at.tiles[n % TILES];
    const rf_u64 policy =
        tile->row == 0 && tile->rows < TILE_ROWS && !args.same_keys ? RF_L2_FIRST : RF_L2_NORMAL;
    const int first = tile->key + block * KEYS, head = tile->head, user = args.one_user ? 0 : tile->user;
    rf_barrier_expect(barrier, KV_BYTES);
#pragma unroll
    for (int i = 0; i < ATOMS; i++)
        rf_copy_box(to + i * KV_ATOM, map, i * RF_ATTENTION_ATOM, head, first, user, barrier, policy);
}

/* One warp prefetches the first keys and values into L2 while candidates are still being grouped, because
 * they usually miss. It does not if lengths decide which keys count. This is only a hint: L2 stays coherent
 * with kernels that write there. */
RF_INLINE void prefetch_first_keys(const rf_attention_args &args, int lane) {
    const int blocks = (args.positions + KEYS - 1) / KEYS, users = args.one_user ? 1 : args.n_users;
    const rf_i64 boxes = (rf_i64)users * blocks * args.kv_heads * ATOMS;
    const int most = RF_ATTENTION_FIRST_BYTES / (2 * KV_ATOM), count = boxes < most ? (int)boxes : most;
    for (int box = (int)blockIdx.x + lane * (int)gridDim.x; box < count; box += 32 * (int)gridDim.x) {
        const int column = box % ATOMS * RF_ATTENTION_ATOM, line = box / ATOMS, head = line % args.kv_heads,
                  block = line / args.kv_heads, user = block / blocks;
        rf_prefetch_box(&args.k, column, head, (block - user * blocks) * KEYS, user);
        rf_prefetch_box(&args.v, column, head, (block - user * blocks) * KEYS, user);
    }
}

/* Restricts the keys of a tile to a part. A tile with few blocks has fewer parts, and the surplus parts are
 * empty. */
RF_INLINE void cut_keys(tile_t &tile, int item, int part, int parts) {
    const int blocks = (tile.keys + KEYS - 1) / KEYS;
    parts = max(min(parts, blocks / RF_ATTENTION_LEAST_BLOCKS), 1);
    if (part >= parts) {
        tile.rows = tile.keys = 0;
        return;
    }
    const int from = blocks * part / parts * KEYS, to = min(blocks * (part + 1) / parts * KEYS, tile.keys);
    tile.key += from;
    tile.keys = to - from;
    tile.split = split_t{item, part, parts}.packed();
}

/* The users as searched by one warp: a lane keeps the first tiles of two users out of 64, `stride` users
 * apart. */
struct users_t {
    rf_attention_plan plan;
    int stride, near, far;

    RF_INLINE users_t(const rf_attention_args &args, int lane) {
        const int users = args.n_users + 1;
        stride = (users + 63) / 64;
        const int near_user = lane * stride, far_user = (lane + 32) * stride;
        near = near_user < users ? args.work[near_user].tile : 0x7fffffff;
        far = far_user < users ? args.work[far_user].tile : 0x7fffffff;
        plan = *args.plan;
    }
    /* Returns the last user whose tiles begin at or before `tile`, comparing 32 users at once. */
    RF_INLINE int of_tile(const rf_attention_args &args, int tile, int lane) const {
        const int before = __popc(__ballot_sync(RF_FULL_WARP, near <= tile)) +
                           __popc(__ballot_sync(RF_FULL_WARP, far <= tile));
        int low = (before - 1) * stride;
        for (int size = min(stride, args.n_users + 1 - low); size > 1;) {
            const int step = (size + 31) / 32, at = lane * step;
            const bool begins = at < size && args.work[low + at].tile <= tile;
            const int most = (31 - __clz(__ballot_sync(RF_FULL_WARP, begins))) * step;
            low += most;
            size = min(step, size - most);
        }
        return low;
    }
};

/* Describes the task with this number, by all lanes. Negative `keys`: no more work. */
RF_INLINE void tile_write(const rf_attention_args &args, const users_t &users, tile_t *tile, int number,
                          int lane) {
    tile_t description = {0, -1, 0, 0, 0, 0, 0, 0};
    const int item = number - users.plan.whole_tiles, parts = users.plan.parts,
              part = item > 0 ? item % parts : 0;
    if (item > 0) number = users.plan.whole_tiles + item / parts;
    if (number < users.plan.tiles) {
        const rf_attention_work user = args.work[users.of_tile(args, number, lane)];
        const int of_head = (user.rows + TILE_ROWS - 1) / TILE_ROWS, in_user = number - user.tile;
        description.head = in_user / of_head;
        description.row = (in_user - description.head * of_head) * TILE_ROWS;
        description.rows = min(user.rows - description.row, (int)TILE_ROWS);
        description.keys = user.keys;
        description.key = user.key;
        description.user = user.user;
        description.first = user.first;
        if (item >= 0 && parts > 1) cut_keys(description, item, part, parts);
    }
    if (lane == 0) *tile = description;
}

/* One warp writes zeros after the last of a tile's values, in block number `block`. There a weight of zero
 * times NaN or infinity would spoil the result. */
RF_INLINE void clear_values(const shared_t &at, int keys, int block, rf_u32 &parities, int lane) {
    const int slot = block % RF_V_SLOTS, from = keys % KEYS;
    rf_barrier_wait(at.v_raw + slot * 8, parities >> slot & 1);
    parities ^= 1u << slot;
    for (int i = from * 8 + lane; i < KEYS * 8; i += 32)
#pragma unroll
        for (int atom = 0; atom < ATOMS; atom++)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at.v + slot * KV_BYTES +
                                                                          atom * KV_ATOM + i * 16),
                         "r"(0)
                         : "memory");
    rf_async_fence();
    __syncwarp();
    if (lane == 0) rf_barrier_arrive(at.v_full + slot * 8);
}

/* One warp completes a tile's values; returns false after the last tile. `blocks`: blocks of keys before the
 * tile. */
RF_INLINE bool tile_end(const shared_t &at, int n, int &blocks, rf_u32 &parities, int lane) {
    const int keys = at.tiles[n % TILES].keys;
    if (keys < 0) return false;
    blocks += (keys + KEYS - 1) / KEYS;
    if (keys % KEYS != 0) clear_values(at, keys, blocks - 1, parities, lane);
    rf_barrier_arrive(at.tile_empty + n % TILES * 8);
    return true;
}

/* Returns true if a block with n tiles has its share. If all tiles are alike it claims no more, because a
 * block slightly earlier than others would take a tile that another could begin at the same time. */
RF_INLINE bool has_share(const rf_attention_args &args, const rf_attention_plan &plan, int n) {
    return args.positions > 0 && plan.parts == 1 && n * (int)gridDim.x >= plan.tiles;
}

/* One warp claims tiles, and clears the values of tiles that are AHEAD of them. A long tile is claimed when
 * the previous tile begins, otherwise a block would hold a tile that others could begin at once. After a
 * short tile, except for parts, this would leave no time to load the queries. */
RF_INLINE void claim_tiles(const rf_attention_args &args, const shared_t &at, int lane) {
    enum { AHEAD = 2, SHORT = 4 * KEYS };
    const users_t users(args, lane);
    rf_u32 parities = 0;
    int blocks = 0;
    bool more = true, late = false;
    for (int n = 0;; n++) {
        if (n >= AHEAD && late) {
            if (!tile_end(at, n - AHEAD, blocks, parities, lane)) return;
            rf_barrier_wait(at.tile_empty + (n - AHEAD) % TILES * 8, (n - AHEAD) / TILES & 1);
        }
        const bool was_late = late;
        if (more) {
            tile_t *tile = &at.tiles[n % TILES];
            int number = blockIdx.x;
            rf_barrier_wait(at.tile_empty + n % TILES * 8, (n / TILES & 1) ^ 1);
            if (has_share(args, users.plan, n)) {
                number = users.plan.tiles; /* no more tiles */
            } else if (n > 0) {
                if (lane == 0) number = atomicAdd(&args.plan->claimed, 1) + gridDim.x;
                number = __shfl_sync(RF_FULL_WARP, number, 0);
            }
            tile_write(args, users, tile, number, lane);
            __syncwarp();
            more = tile->keys >= 0;
            late = more && (tile->keys >= SHORT || tile->split != 0);
            if (lane == 0) rf_barrier_arrive(at.tile_full + n % TILES * 8);
        }
        if (n >= AHEAD && !was_late && !tile_end(at, n - AHEAD, blocks, parities, lane)) return;
    }
}

/* One thread copies the keys and values of tiles, one block of keys early. */
RF_INLINE void copy_keys(const rf_attention_args &args, const shared_t &at) {
    ring_t<RF_K_SLOTS> k = {0, 1};
    ring_t<RF_V_SLOTS> v = {0, 1};
    int last =
        -1; /* the block whose values are due: of this tile, or at its first block of the previous tile */
    bool raw = false; /* data after its last value are undefined */
    for (int n = 0;; n++) {
        rf_barrier_wait(at.tile_full + n % TILES * 8, n / TILES & 1);
        const int keys = at.tiles[n % TILES].keys;
        const int blocks = keys > 0 ? (keys + KEYS - 1) / KEYS : 0;
        /* At least once, also without keys, for the values that are due: other warps wait for them. */
        for (int block = 0; block < max(blocks, 1); block++) {
            if (blocks > 0) {
                rf_barrier_wait(at.k_empty + k.slot * 8, k.parity);
                copy_block(args, at, &args.k, n, block, at.k + k.slot * KV_BYTES, at.k_full + k.slot * 8);
                k.next();
            }
            if (last >= 0) {
                rf_barrier_wait(at.v_empty + v.slot * 8, v.parity);
                copy_block(args, at, &args.v, n - (block == 0), last, at.v + v.slot * KV_BYTES,
                           (raw ? at.v_raw : at.v_full) + v.slot * 8);
                v.next();
            }
            if (block == 0 && n > 0) rf_barrier_arrive(at.tile_empty + (n - 1) % TILES * 8);
            last = blocks > 0 ? block : -1;
            raw = block == blocks - 1 && keys % KEYS != 0;
        }
        if (keys < 0) return;
    }
}

#endif
