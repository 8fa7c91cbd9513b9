/* Shared by the warps of ikbo_attention_fused.cu: shared memory, tiles, rows. */
#ifndef RECFUSE_IKBO_ATTENTION_FUSED_CUH
#define RECFUSE_IKBO_ATTENTION_FUSED_CUH

#include "gpu/device/hopper.cuh"
#include "families/ikbo_attention/ikbo_attention_args.h"

enum {
    GROUPS = RF_ATTENTION_GROUPS,
    KEYS = RF_KEYS,
    WARPGROUP = 128,
    ROWS = RF_ATTENTION_ROWS,
    TILE_ROWS = RF_ATTENTION_TILE_ROWS,
    ATOMS = (RF_DIM + RF_ATTENTION_ATOM - 1) / RF_ATTENTION_ATOM,
    ATOM_BYTES = RF_ATTENTION_ATOM * 2,
    CHUNKS = ATOMS * ATOM_BYTES / 16, /* chunks of 16 bytes per row */
    Q_ATOM = ROWS * ATOM_BYTES,
    Q_BYTES = ATOMS * Q_ATOM, /* per warpgroup */
    KV_ATOM = KEYS * ATOM_BYTES,
    KV_BYTES = RF_ATTENTION_BLOCK_BYTES(ATOMS, KEYS),
    TILES = RF_ATTENTION_TILES,
    Q_SLOTS = RF_ATTENTION_Q_SLOTS,
    LOADERS = RF_SEGMENT > 1 ? 1 : 2, /* warps that move rows */
    SEGMENTS = TILE_ROWS / RF_SEGMENT, /* segments of a tile: rows that move together */
};

/* The task of a block: up to TILE_ROWS rows of a user and one head of keys. */
struct tile_t {
    int rows;
    int keys; /* negative: no more tiles */
    int user, head, key; /* key: position of the first key */
    int first, row; /* first candidate of the user; first row of the tile within the user */
    int split; /* 0: all keys of the user; otherwise a part, see split_t */
};

/* A part of a tile's keys: number `part` of `parts`; `item`: its number among all parts of all tiles. Packed
 * into an int, which is 0 for one part. */
struct split_t {
    int item, part, parts;
    RF_INLINE int packed() const { return parts > 1 ? (item << 8 | part << 4 | parts) : 0; }
    static RF_INLINE split_t of(int packed) { return {packed >> 8, packed >> 4 & 15, packed & 15}; }
};

/* Addresses in shared memory. A slot has two barriers: full and empty. If a barrier orders ordinary accesses,
 * each thread arrives for its own. */
struct shared_t {
    rf_u32 q, k, v;
    rf_u32 q_full, q_empty, k_full, k_empty, v_full, v_empty;
    rf_u32 v_raw; /* values are loaded, but rows past the last key are not zeroed yet */
    rf_u32 tile_full, tile_empty;
    int *rows; /* [Q_SLOTS][SEGMENTS]: numbers of their first rows (row_t) */
    int *splits; /* [Q_SLOTS]: tile_t::split */
    /* [Q_SLOTS][GROUPS]: the slot holds no results, because other blocks have the remaining keys */
    int *incomplete;
    tile_t *tiles; /* [TILES] */
};

RF_INLINE shared_t shared_of(rf_u8 *memory) {
    shared_t at;
    const rf_u32 start = rf_shared(memory);
    at.q = (start + 1023) / 1024 * 1024;
    at.k = at.q + Q_SLOTS * GROUPS * Q_BYTES;
    at.v = at.k + RF_K_SLOTS * KV_BYTES;
    rf_u32 next = at.v + RF_V_SLOTS * KV_BYTES;
    at.tiles = (tile_t *)(memory + (next - start));
    next += TILES * sizeof(tile_t);
    at.rows = (int *)(memory + (next - start));
    next += Q_SLOTS * SEGMENTS * 4;
    at.splits = (int *)(memory + (next - start));
    next += Q_SLOTS * 4;
    at.incomplete = (int *)(memory + (next - start));
    next += Q_SLOTS * GROUPS * 4;
    at.q_full = next;
    at.q_empty = at.q_full + Q_SLOTS * 8;
    at.k_full = at.q_empty + Q_SLOTS * 8;
    at.k_empty = at.k_full + RF_K_SLOTS * 8;
    at.v_full = at.k_empty + RF_K_SLOTS * 8;
    at.v_empty = at.v_full + RF_V_SLOTS * 8;
    at.v_raw = at.v_empty + RF_V_SLOTS * 8;
    at.tile_full = at.v_raw + RF_V_SLOTS * 8;
    at.tile_empty = at.tile_full + TILES * 8;
    return at;
}

RF_INLINE void barriers_init(const shared_t &at) {
    for (int i = 0; i < Q_SLOTS; i++) {
        rf_barrier_init(at.q_full + i * 8, LOADERS * 32);
        rf_barrier_init(at.q_empty + i * 8, GROUPS * WARPGROUP);
    }
    for (int i = 0; i < RF_K_SLOTS; i++) {
        rf_barrier_init(at.k_full + i * 8, 1);
        rf_barrier_init(at.k_empty + i * 8, GROUPS * WARPGROUP / 32);
    }
    for (int i = 0; i < RF_V_SLOTS; i++) {
        rf_barrier_init(at.v_full + i * 8, 1);
        rf_barrier_init(at.v_empty + i * 8, GROUPS);
        rf_barrier_init(at.v_raw + i * 8, 1);
    }
    for (int i = 0; i < TILES; i++) {
        rf_barrier_init(at.tile_full + i * 8, 1);
        rf_barrier_init(at.tile_empty + i * 8, GROUPS * WARPGROUP + LOADERS * 32 + 32 + 1);
    }
    rf_barriers_ready();
}

/* A slot of a ring, and the parity of its barrier. */
template <int SLOTS> struct ring_t {
    int slot;
    rf_u32 parity;
    RF_INLINE void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

/* The tiles in their order, as read by a warp. */
struct tiles_t {
    int number;
    RF_INLINE const volatile tile_t *wait(const shared_t &at) const {
        rf_barrier_wait(at.tile_full + number % TILES * 8, number / TILES & 1);
        return &at.tiles[number % TILES];
    }
    /* Releases the tile for this thread. */
    RF_INLINE void done(const shared_t &at) {
        rf_barrier_arrive(at.tile_empty + number % TILES * 8);
        number++;
    }
};

#endif
