/* Groups candidates by user and cuts the work into tiles. One block, because the maps of a call are small
 * compared with its keys.
 *
 * The candidates of a user become adjacent in `members`, in any order (no row depends on another), and users
 * with the most keys come first, so that the last tiles are the shortest. If some blocks would be idle at the
 * end, the keys of the last users may be cut into parts. Candidates with an invalid user form an additional
 * user without keys.
 *
 * Thread mapping: a thread has every RF_BLOCK-th candidate or user. Shared memory: static. Launch: grid [1],
 * block [RF_BLOCK].
 */

#ifndef RF_BLOCK
#define RF_BLOCK 1024
#endif

#include "families/ikbo_attention/ikbo_attention_args.h"
#include "families/ikbo_attention/contents.cuh"

enum { BUCKETS = 32, WARPS = RF_BLOCK / 32, NEAR = 4096, CACHED = 4 };

/* Returns the number of warps with a user from `start` on; the others have nothing to add. */
RF_INLINE int warps_of(int users, int start) { return (min(users - start, RF_BLOCK) + 31) / 32; }

/* Numbers of candidates and tiles. */
struct sums_t {
    int candidates, tiles;

    RF_INLINE void add(const sums_t &other) {
        candidates += other.candidates;
        tiles += other.tiles;
    }
    RF_INLINE sums_t of_lane(int lane) const {
        return {__shfl_sync(RF_FULL_WARP, candidates, lane), __shfl_sync(RF_FULL_WARP, tiles, lane)};
    }
    /* Returns the inclusive prefix sums over lanes. */
    RF_INLINE sums_t upto(int lane) const {
        sums_t sums = *this;
        for (int step = 1; step < 32; step *= 2) {
            const sums_t lower = {__shfl_up_sync(RF_FULL_WARP, sums.candidates, step),
                                  __shfl_up_sync(RF_FULL_WARP, sums.tiles, step)};
            if (lane >= step) sums.add(lower);
        }
        return sums;
    }
};

/* A candidate's user and its number within the user; a thread keeps its first candidates in registers. */
struct member_t {
    int user, rank;
};

/* Counts a candidate; candidates of one user in a warp are counted at once. */
RF_INLINE member_t count(const rf_attention_group_args &args, int i, int *counts, const reporter_t &to) {
    const bool any = i < args.candidates;
    const int user = any ? user_at(args.map, args.keys, i) : -1;
    if (any) check_map(args.map, args.keys, i, args.candidates, to);
    const rf_u32 same = __match_any_sync(RF_FULL_WARP, user);
    const int leader = __ffs(same) - 1, before = __popc(same & ((1u << threadIdx.x % 32) - 1));
    int base = 0;
    if (any && before == 0) base = atomicAdd(&counts[user], __popc(same));
    return {user, __shfl_sync(RF_FULL_WARP, base, leader) + before};
}

/* Returns the bucket of a user: the most keys first, by powers of two, the largest of which is split into 16
 * to 32. */
RF_INLINE int bucket_of(const rf_attention_group_args &args, int user, int most) {
    const int keys = (int)rf_attention_keys_of(&args.keys, user).count;
    return BUCKETS - 1 - (keys >> max(32 - __clz(most) - 5, 0));
}

/* Describes a user except for positions; `rows` determines its tiles. */
RF_INLINE rf_attention_work work_of(const rf_attention_group_args &args, int user, int candidates) {
    const rf_attention_keys keys = rf_attention_keys_of(&args.keys, user);
    rf_attention_work work = {user, 0, candidates, (rf_i32)keys.first, (rf_i32)keys.count, 0, 0, 0};
    work.rows = candidates * args.candidate_rows + (user < args.keys.count ? args.user_rows : 0);
    return work;
}

RF_INLINE sums_t sums_of(const rf_attention_group_args &args, const rf_attention_work &work) {
    const int tiles = (work.rows + RF_ATTENTION_TILE_ROWS - 1) / RF_ATTENTION_TILE_ROWS;
    return {work.candidates, tiles * args.kv_heads};
}

#define NEVER 1e30f
/* Returns the time, in blocks of keys, until all work is done if the keys of the last `last_tiles` tiles,
 * after `whole_tiles` other tiles, are cut into `parts`; NEVER if that is impossible. Blocks take tiles and
 * parts as they become free. Assumes equal lengths. */
RF_INLINE float time_of(const rf_attention_group_args &args, int whole_tiles, int last_tiles, int blocks,
                        int parts) {
    const int grid = args.grid, full = whole_tiles / grid, busy = whole_tiles - full * grid,
              n_parts = last_tiles * parts;
    if (parts == 1) return (float)((whole_tiles + last_tiles + grid - 1) / grid * blocks);
    if (n_parts > RF_ATTENTION_SPLIT_TIMES * grid || parts * RF_ATTENTION_LEAST_BLOCKS > blocks) return NEVER;
    /* Free blocks, and busy blocks one tile later, do all parts in this number of steps. */
    int steps = (n_parts + grid - busy - 1) / (grid - busy);
    if (steps > parts) steps = (n_parts + busy * parts + grid - 1) / grid;
    if (busy > 0 && steps < parts) steps = parts;
    return (full + (float)steps / parts) * blocks;
}

/* Returns the number of parts with the least time among a warp's lanes, which hold the times from one part
 * on. Cutting must gain more than the parts cost to be stored and loaded in float32: about three blocks of
 * keys. */
RF_INLINE int parts_of(float time) {
    enum { COST = 3 };
    int best = 1;
    float least = __shfl_sync(RF_FULL_WARP, time, 0) - COST;
    for (int parts = 2; parts <= RF_ATTENTION_MOST_PARTS; parts++) {
        const float time_of_parts = __shfl_sync(RF_FULL_WARP, time, parts - 1);
        if (time_of_parts < least) least = time_of_parts, best = parts;
    }
    return best;
}

/* The shared memory for ordering users. */
struct order_t {
    int most; /* most keys of a user */
    int buckets[BUCKETS + 1]; /* begin of each bucket */
    int of_warps[WARPS][BUCKETS]; /* users per bucket; zeros outside of order_users */
};

/* Orders users by bucket, and within a bucket by number, so that equal calls cut the keys of the same
 * users. */
RF_INLINE void order_users(const rf_attention_group_args &args, int users, const reporter_t &to,
                           order_t &order) {
    const int thread = threadIdx.x, warp = thread / 32;
    if (thread <= BUCKETS) order.buckets[thread] = 0;
#pragma unroll 1
    for (int i = thread; i < WARPS * BUCKETS; i += RF_BLOCK) order.of_warps[i / BUCKETS][i % BUCKETS] = 0;
#pragma unroll 1
    for (int u = thread; u < users; u += RF_BLOCK) {
        check_keys(args.keys, u, to);
        atomicMax(&order.most, (int)rf_attention_keys_of(&args.keys, u).count);
    }
    __syncthreads();
    const int most = order.most;
#pragma unroll 1
    for (int u = thread; u < users; u += RF_BLOCK) atomicAdd(&order.buckets[bucket_of(args, u, most) + 1], 1);
    __syncthreads();
    if (thread < BUCKETS) { /* one warp */
        int sum = order.buckets[thread + 1];
        for (int step = 1; step < BUCKETS; step *= 2) {
            const int before = __shfl_up_sync(RF_FULL_WARP, sum, step);
            if (thread >= step) sum += before;
        }
        order.buckets[thread + 1] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int start = 0; start < users; start += RF_BLOCK) {
        const int u = start + thread, bucket = u < users ? bucket_of(args, u, most) : BUCKETS;
        const rf_u32 same = __match_any_sync(RF_FULL_WARP, bucket);
        const int before = __popc(same & ((1u << thread % 32) - 1));
        if (bucket < BUCKETS && before == 0) order.of_warps[warp][bucket] = __popc(same);
        __syncthreads();
        if (bucket < BUCKETS) {
            int at = order.buckets[bucket] + before;
#pragma unroll 1
            for (int w = 0; w < warp; w++) at += order.of_warps[w][bucket];
            args.order[at] = u;
        }
        __syncthreads();
        if (thread < BUCKETS) {
#pragma unroll 1
            for (int w = 0; w < warps_of(users, start); w++) {
                order.buckets[thread] += order.of_warps[w][thread];
                order.of_warps[w][thread] = 0;
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK, 1)
    rf_ikbo_attention_group(const __grid_constant__ rf_attention_group_args args) {
    __shared__ int near[NEAR];
    __shared__ sums_t of_warps[WARPS];
    __shared__ order_t order;
    __shared__ int whole_tiles;
    const int users = (int)args.keys.count + 1, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const reporter_t to = {args.errors, args.report != 0};
    /* Users with equal numbers of keys are in order already, with candidates of an invalid user last. */
    const bool equal_lengths = args.keys.lengths.data == nullptr && args.keys.offsets.data == nullptr;
    int *counts = users <= NEAR ? near : args.counts;
    rf_wait_for_previous_kernel();
#pragma unroll 1
    for (int u = thread; u < users; u += RF_BLOCK) counts[u] = 0;
    if (thread == 0) order.most = equal_lengths ? (int)args.keys.positions : 0;
    __syncthreads();
    member_t cached[CACHED];
#pragma unroll
    for (int k = 0; k < CACHED; k++)
        if (k * RF_BLOCK < args.candidates) cached[k] = count(args, k * RF_BLOCK + thread, counts, to);
#pragma unroll 1
    for (int start = CACHED * RF_BLOCK; start < args.candidates; start += RF_BLOCK) {
        const int rank = count(args, start + thread, counts, to).rank;
        if (start + thread < args.candidates) args.ranks[start + thread] = rank;
    }
    if (!equal_lengths) order_users(args, users, to, order);
    __syncthreads();
    /* A warp has consecutive users, so that one sum over the warps suffices; its lanes write 32 users at
     * once. */
    const int each = (users + RF_BLOCK - 1) / RF_BLOCK * 32, from = min(warp * each, users),
              to_user = min(from + each, users);
    sums_t warp_sums = {0, 0}, done = {0, 0}, total = {0, 0};
#pragma unroll 1
    for (int i = from + lane; i < to_user; i += 32) {
        const int user = equal_lengths ? i : args.order[i];
        warp_sums.add(sums_of(args, work_of(args, user, counts[user])));
    }
    warp_sums = warp_sums.upto(lane);
    if (lane == 31) of_warps[warp] = warp_sums;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < (users + each - 1) / each; w++) {
        if (w == warp) done = total;
        total.add(of_warps[w]);
    }
    const int tiles = total.tiles;
    const int last_tiles = args.ended != nullptr ? tiles % args.grid : 0; /* tiles of the last wave */
#pragma unroll 1
    for (int start = from; start < to_user; start += 32) {
        const int i = start + lane, user = i >= to_user ? users : equal_lengths ? i : args.order[i];
        rf_attention_work work = {};
        if (user < users) work = work_of(args, user, counts[user]);
        const sums_t sums = sums_of(args, work), upto = sums.upto(lane);
        work.first = done.candidates + upto.candidates - sums.candidates;
        work.tile = done.tiles + upto.tiles - sums.tiles;
        done.add(upto.of_lane(31));
        if (user >= users) continue;
        args.work[i] = work;
        counts[user] = work.first;
        const int before = tiles - last_tiles - work.tile;
        if (before >= 0 && before < sums.tiles) whole_tiles = work.tile; /* all last tiles are of one user */
    }
    if (last_tiles > 0)
#pragma unroll 1
        for (int i = thread; i < RF_ATTENTION_SPLIT_TIMES * args.grid * RF_ATTENTION_GROUPS; i += RF_BLOCK)
            args.ended[i] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < CACHED; k++)
        if (k * RF_BLOCK + thread < args.candidates)
            args.members[counts[cached[k].user] + cached[k].rank] = k * RF_BLOCK + thread;
#pragma unroll 1
    for (int i = CACHED * RF_BLOCK + thread; i < args.candidates; i += RF_BLOCK)
        args.members[counts[user_at(args.map, args.keys, i)] + args.ranks[i]] = i;
    if (thread >= 32) return;
    int parts = 1;
    if (last_tiles > 0) {
        const int blocks = (order.most + args.block_keys - 1) / args.block_keys;
        parts = parts_of(thread < RF_ATTENTION_MOST_PARTS
                             ? time_of(args, whole_tiles, tiles - whole_tiles, blocks, thread + 1)
                             : NEVER);
    }
    if (thread == 0) *args.plan = {tiles, 0, parts > 1 ? whole_tiles : tiles, parts};
}
