/* The warps of fused.cu that take tiles and copy keys and values. */
#ifndef RECFUSE_IKBO_ATTENTION_FUSED_COPY_CUH
#define RECFUSE_IKBO_ATTENTION_FUSED_COPY_CUH

#include "ikbo_attention/fused.cuh"

/* A block of KEYS keys or values of tile number n, whose description is read again: registers are scarce here. */
RF_INLINE void copy_block(const rf_attention_args &args, const shared_t &at, const rf_tensor_map *map, int n,
                          int block, rf_u32 to, rf_u32 barrier) {
    const volatile tile_t *tile = &at.tiles[n % TILES];
    const int first = tile->key + block * KEYS, head = tile->head, user = args.one_user ? 0 : tile->user;
    rf_barrier_expect(barrier, KV_BYTES);
#pragma unroll
    for (int i = 0; i < ATOMS; i++)
        rf_copy_box(to + i * KV_ATOM, map, i * RF_ATTENTION_ATOM, head, first, user, barrier, RF_L2_NORMAL);
}

/* Leaves of a tile's keys those of a part; a tile of few blocks has fewer parts, and the others are nothing. */
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

/* Describes the piece of work with this number, by all lanes; keys below 0: there are no more. The last user whose tiles do
 * not begin behind it is found by 32 tries at once. */
RF_INLINE void tile_write(const rf_attention_args &args, tile_t *tile, int number, int lane) {
    tile_t own = {0, -1, 0, 0, 0, 0, 0, 0};
    const rf_attention_plan &plan = *args.plan;
    const int item = number - plan.whole, parts = plan.parts, part = item > 0 ? item % parts : 0;
    if (item > 0) number = plan.whole + item / parts;
    if (number < plan.tiles) {
        int low = 0;
        for (int size = args.n_users + 1; size > 1;) {
            const int stride = (size + 31) / 32, at = lane * stride;
            const bool before = at < size && args.work[low + at].tile <= number;
            const int most = (31 - __clz(__ballot_sync(RF_FULL_WARP, before))) * stride;
            low += most;
            size = min(stride, size - most);
        }
        const rf_attention_work user = args.work[low];
        const int of_head = (user.rows + TILE_ROWS - 1) / TILE_ROWS, in_user = number - user.tile;
        own.head = in_user / of_head;
        own.row = (in_user - own.head * of_head) * TILE_ROWS;
        own.rows = min(user.rows - own.row, (int)TILE_ROWS);
        own.keys = user.keys;
        own.key = user.key;
        own.user = user.user;
        own.first = user.first;
        if (item >= 0 && parts > 1) cut_keys(own, item, part, parts);
    }
    if (lane == 0) *tile = own;
}

/* One warp: zeros behind the last of a tile's values, which are number `block` of the block, where a product with a weight
 * of zero would let what lies there through if it is no number. */
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

/* One warp: takes tiles, AHEAD of the one whose values it clears. */
RF_INLINE void take_tiles(const rf_attention_args &args, const shared_t &at, int lane) {
    enum { AHEAD = 2 };
    rf_u32 parities = 0;
    int number = blockIdx.x, blocks = 0;
    bool more = true;
    for (int n = 0;; n++) {
        if (more) {
            rf_barrier_wait(at.tile_empty + n % TILES * 8, (n / TILES & 1) ^ 1);
            tile_write(args, &at.tiles[n % TILES], number, lane);
            __syncwarp();
            more = at.tiles[n % TILES].keys >= 0;
            if (lane == 0) {
                rf_barrier_arrive(at.tile_full + n % TILES * 8);
                if (more) number = atomicAdd(&args.plan->taken, 1) + gridDim.x;
            }
            number = __shfl_sync(RF_FULL_WARP, number, 0);
        }
        if (n < AHEAD) continue;
        const int entry = (n - AHEAD) % TILES, keys = at.tiles[entry].keys;
        if (keys < 0) return;
        blocks += (keys + KEYS - 1) / KEYS;
        if (keys % KEYS != 0) clear_values(at, keys, blocks - 1, parities, lane);
        rf_barrier_arrive(at.tile_empty + entry * 8);
    }
}

/* One thread: copies the keys and values of tiles, a block of keys ahead. */
RF_INLINE void copy_keys(const rf_attention_args &args, const shared_t &at) {
    ring_t<RF_K_SLOTS> k = {0, 1};
    ring_t<RF_V_SLOTS> v = {0, 1};
    int last = -1; /* the block whose values are due: of this tile, or at its first block of the one before */
    bool raw = false; /* behind its last value something else may lie */
    for (int n = 0;; n++) {
        rf_barrier_wait(at.tile_full + n % TILES * 8, n / TILES & 1);
        const int keys = at.tiles[n % TILES].keys;
        const int blocks = keys > 0 ? (keys + KEYS - 1) / KEYS : 0;
        /* Once without keys too, for the values that are due: others wait for them before they read on. */
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
