/* The warps of ikbo_attention_fused.cu that move rows: queries into shared memory, results to `out`. */
#ifndef RECFUSE_IKBO_ATTENTION_FUSED_ROWS_CUH
#define RECFUSE_IKBO_ATTENTION_FUSED_ROWS_CUH

#include "families/ikbo_attention/ikbo_attention_fused.cuh"

/* A row of a tile. The rows of a user are those of its own queries, then those of its candidates; for each of
 * them the heads that share keys, and for each head the queries. */
struct row_t {
    int number; /* (item * queries + query) * heads + head; of self-attention ~number, which is negative */
    int item, query, head;
};

/* The number of a missing row. */
enum { NO_ROW = (int)0x80000000 };

RF_INLINE row_t row_at(const rf_attention_args &args, const volatile tile_t *tile, int index) {
    row_t row = {NO_ROW, 0, 0, 0};
    if (index >= tile->rows) return row;
    const int heads = args.heads / args.kv_heads;
    const int of_user = tile->user < args.n_users ? args.self.queries * heads : 0;
    const int user_row = tile->row + index, candidate_row = user_row - of_user;
    const bool self = candidate_row < 0;
    const int queries = self ? args.self.queries : args.candidates.queries,
              row_of_set = self ? user_row : candidate_row, line = row_of_set / queries,
              member = line / heads;
    row.query = row_of_set - line * queries;
    row.head = tile->head * heads + line - member * heads;
    row.item = self ? tile->user : args.members[tile->first + member];
    row.number = (row.item * queries + row.query) * args.heads + row.head;
    if (self) row.number = ~row.number;
    return row;
}

#if RF_SEGMENT > 1
/* One warp, a lane per segment of a tile: RF_SEGMENT queries of one item and head, which are a box of `q` and
 * of `out`. First stores the results of the previous tile in the slot. */
RF_INLINE void copy_rows(const rf_attention_args &args, const shared_t &at, int warp, int lane) {
    tiles_t tiles = {0};
    row_t rows[Q_SLOTS];
    const rf_u32 base = at.q + lane * RF_SEGMENT / ROWS * Q_BYTES + lane * RF_SEGMENT % ROWS * ATOM_BYTES;
    for (int remaining = Q_SLOTS;; tiles.number++) {
        const int slot = tiles.number % Q_SLOTS;
        const rf_u32 to = base + slot * GROUPS * Q_BYTES;
        row_t current = {NO_ROW, 0, 0, 0};
        bool more = false;
        int split = 0;
        if (remaining == Q_SLOTS) {
            const volatile tile_t *tile = tiles.wait(at);
            more = tile->keys >= 0;
            split = tile->split;
            if (lane < SEGMENTS) current = row_at(args, tile, lane * RF_SEGMENT);
            rf_barrier_arrive(at.tile_empty + tiles.number % TILES * 8);
        }
        if (tiles.number >= Q_SLOTS) {
            rf_barrier_wait(at.q_empty + slot * 8, (tiles.number / Q_SLOTS & 1) ^ 1);
            const row_t previous = rows[0];
            if (previous.number != NO_ROW && !at.incomplete[slot * GROUPS + lane * RF_SEGMENT / ROWS]) {
                const rf_tensor_map *out = previous.number >= 0 ? &args.out : &args.self_out;
#pragma unroll
                for (int i = 0; i < ATOMS; i++)
                    rf_store_box(out, i * RF_ATTENTION_ATOM, previous.head, previous.query, previous.item,
                                 to + i * Q_ATOM);
                rf_stores_wait<0>();
            }
        }
        rows[0] = rows[1];
        rows[1] = current;
        if (!more && --remaining == 0) break;
        if (!more) continue;
        if (lane < SEGMENTS) at.rows[slot * SEGMENTS + lane] = current.number;
        if (lane == 0) at.splits[slot] = split;
        if (current.number == NO_ROW) {
            rf_barrier_arrive(at.q_full + slot * 8);
            continue;
        }
        const rf_tensor_map *q = current.number >= 0 ? &args.q : &args.self_q;
        rf_barrier_expect(at.q_full + slot * 8, ATOMS * RF_SEGMENT * ATOM_BYTES);
#pragma unroll
        for (int i = 0; i < ATOMS; i++)
            rf_copy_box(to + i * Q_ATOM, q, i * RF_ATTENTION_ATOM, current.head, current.query, current.item,
                        at.q_full + slot * 8, RF_L2_NORMAL);
    }
    rf_stores_finish();
}
#else
/* Returns the address of 16 bytes of a row out of 32; `base`: the first row. */
RF_INLINE rf_u32 chunk_at(rf_u32 base, int row, int chunk) {
    return base + chunk / 8 * Q_ATOM + row * ATOM_BYTES + (chunk % 8 ^ row % 8) * 16;
}

/* Stores 32 rows of results to `out`; each lane has the number of one row. */
RF_INLINE void store_rows(const rf_attention_args &args, rf_u32 base, int number, int lane) {
#pragma unroll(CHUNKS > 8 ? 2 : 1)
    for (int i = lane; i < CHUNKS * 32; i += 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, row_number = __shfl_sync(RF_FULL_WARP, number, row);
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(chunk_at(base, row, chunk))
                     : "memory");
        if (row_number == NO_ROW || chunk >= args.dim / 8) continue;
        rf_u8 *out = row_number >= 0 ? args.candidates.out : args.self.out;
        *(uint4 *)(out + ((rf_i64)(row_number >= 0 ? row_number : ~row_number) * args.dim + chunk * 8) * 2) =
            value;
    }
}

/* Loads 32 rows of queries into shared memory; each lane has the address of one row. Missing rows become
 * zeros. */
RF_INLINE void load_rows(const rf_attention_args &args, rf_u32 base, rf_u64 from, int lane) {
#pragma unroll(CHUNKS > 8 ? 2 : 1)
    for (int i = lane; i < CHUNKS * 32; i += 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const rf_u64 source = __shfl_sync(RF_FULL_WARP, from, row);
        const bool any = source != 0 && chunk < args.dim / 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(chunk_at(base, row, chunk)),
                     "l"(any ? source + chunk * 16 : (rf_u64)args.plan), "r"(any ? 16 : 0)
                     : "memory");
    }
}

RF_INLINE rf_u64 row_source(const rf_attention_args &args, const row_t &row) {
    if (row.number == NO_ROW) return 0;
    const rf_attention_queries &from = row.number >= 0 ? args.candidates : args.self;
    return (rf_u64)(from.q + row.item * from.item + row.query * from.query + row.head * from.head);
}

/* A warp of LOADERS loads the queries of every LOADERS-th group of 32 rows of a tile, from any addresses.
 * First it stores the results of the previous tile in the slot. */
RF_INLINE void copy_rows(const rf_attention_args &args, const shared_t &at, int warp, int lane) {
    tiles_t tiles = {0};
    for (int remaining = Q_SLOTS; remaining > 0;) {
        const int n = tiles.number, slot = n % Q_SLOTS;
        const volatile tile_t *tile = remaining == Q_SLOTS ? tiles.wait(at) : nullptr;
        const bool more = tile != nullptr && tile->keys >= 0;
        remaining -= !more; /* after the last tile: the remaining results */
        if (n >= Q_SLOTS) rf_barrier_wait(at.q_empty + slot * 8, (n / Q_SLOTS & 1) ^ 1);
#pragma unroll 1
        for (int row = warp * 32; row < TILE_ROWS; row += LOADERS * 32) {
            const rf_u32 base = at.q + (slot * GROUPS + row / ROWS) * Q_BYTES + row % ROWS * ATOM_BYTES;
            int *number = &at.rows[slot * SEGMENTS + row + lane];
            if (n >= Q_SLOTS && !at.incomplete[slot * GROUPS + row / ROWS])
                store_rows(args, base, *number, lane);
            if (!more) continue;
            const row_t row_of_lane = row_at(args, tile, row + lane);
            __syncwarp();
            *number = row_of_lane.number;
            load_rows(args, base, row_source(args, row_of_lane), lane);
        }
        if (more && warp == 0 && lane == 0) at.splits[slot] = tile->split;
        if (!more) {
            tiles.number++;
            continue;
        }
        tiles.done(at);
        asm volatile("cp.async.wait_all;" ::: "memory");
        rf_async_fence();
        rf_barrier_arrive(at.q_full + slot * 8);
    }
}
#endif

#endif
