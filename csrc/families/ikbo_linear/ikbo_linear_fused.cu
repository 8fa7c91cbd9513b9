/* A linear layer over users and their candidates in one launch.
 *
 *     sums of an item = W_level . x[item] + sums of its parent;   out[candidate] = activation(its sums)
 *
 * Levels run one after another, users first. A warpgroup multiplies a strip: 64 columns of an item's [k, n],
 * transposed, so that columns are the rows of the tensor cores' A, which ldmatrix loads from shared memory
 * into registers. RF_ROWS rows of the weight are B, read from shared memory in the layout of pack.cu. Three
 * warpgroups multiply three strips by the same weights. The two blocks of a cluster multiply two halves of
 * the rows by the same strips (RF_RANKS 2); each copies half of each strip's box to both. A warp for each
 * strip and a warp for weights fill a ring of RF_SLOTS slots of 32 of k.
 *
 * Strips have the order [column, item], and a cluster has a range of them, so that items of one user and
 * column are consecutive: the sums of their parent, 57 KB, stay in shared memory until those of another
 * parent are needed, and are added in the epilogue. A strip whose parent differs from that of its turn's
 * first strip starts from its parent's sums in global memory instead. Sums of all levels except the last go
 * to global memory; `done` counts them, and their readers wait for the whole level: so all blocks must run at
 * once (a cooperative launch).
 *
 * RF_JOINED, for two levels with few candidates per user: a candidate's strip accumulates over its own k,
 * then its user's, into the same sums. No user's sums are stored, no block waits for another, and the ring
 * has the memory of the parent's sums; the epilogue adds the bias. RF_DIRECT: tensor maps read the weights in
 * place, and nothing is packed; otherwise the kernel starts concurrently with pack.cu.
 *
 * A block has RF_FUSED_GROUPS warpgroups that multiply (160 registers a thread) and a warpgroup that copies
 * (32). Element 4 i + e of a thread's RF_ROWS / 2 sums is in row 8 i + 2 (lane % 4) + e % 2, column 16 warp +
 * lane / 4 + e / 2 * 8. Shared memory: RF_FUSED_SHARED_BYTES. Launch: grid [clusters * RF_RANKS], block
 * [RF_FUSED_THREADS], cooperative. Source: IKBO (in-kernel broadcast optimization), section 2: decomposition,
 * broadcast fusion, multi-stage fusion.
 */

#ifndef RF_DTYPE
#define RF_DTYPE 1
#endif
#ifndef RF_ACTIVATION
#define RF_ACTIVATION 0
#endif
#ifndef RF_ROWS
#define RF_ROWS 224
#define RF_RANKS 2
#define RF_SLOTS 5
#endif

#include "gpu/device/wgmma.cuh"
#include "families/ikbo_linear/activation.cuh"
#include "families/ikbo_linear/bias.cuh"
#include "families/ikbo_linear/ikbo_linear_copy.cuh"

/* Releases a slot that a warpgroup has read: by warp 0, whose lane `rank` signals block `rank`. */
RF_INLINE void slot_free(const shared_t &at, int slot, int thread) {
    if (RF_RANKS == 1 && thread == 0) rf_barrier_arrive(at.empty + slot * 8);
    if (RF_RANKS == 2 && thread < 2) rf_barrier_arrive_at(at.empty + slot * 8, thread);
}

/* Sum i of both halves. */
#define SUM(i) sums[(i) / (SUMS / 2)][(i) % (SUMS / 2)]

/* sums = strip . weights over an even number of slots of k; += if `begun` is 1: k is odd then, so that no
 * register holds it. */
RF_INLINE void multiply(float (&sums)[2][SUMS / 2], const shared_t &at, ring_t &ring, int slots, rf_u32 from,
                        int begun, int thread) {
    rf_u32 a[2][2][4]; /* double buffer: a product may still read the previous load */
    for (int k = begun; k < slots; k += 2) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
            const rf_u32 slot = at.slots + ring.slot * SLOT_BYTES;
            const rf_u32 b = rf_wgmma_rows_of_64_bytes(slot + GROUPS * X_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[q][i][0]), "=r"(a[q][i][1]), "=r"(a[q][i][2]), "=r"(a[q][i][3])
                             : "r"(slot + from + i * (X_BYTES / 2))
                             : "memory");
            rf_wgmma_begin();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                rf_wgmma<RF_DTYPE>(sums[0], a[q][i], b + i * 2, q + i > 0 ? 1 : k);
                rf_wgmma<RF_DTYPE>(sums[1], a[q][i], b + i * 2 + (HALF * RF_FUSED_K * 2 / 16),
                                   q + i > 0 ? 1 : k);
            }
            rf_wgmma_commit();
            rf_wgmma_wait<1>();
            if (k > 1 || q > 0) slot_free(at, ring.before(), thread);
            ring.next();
        }
    }
    rf_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(SUM(i))::"memory"); /* no read before this point */
    slot_free(at, ring.before(), thread);
}

RF_INLINE rf_u32 pack_two(float low, float high) {
    rf_bytes<4> two;
    rf_element<RF_DTYPE>::set(two, 0, rf_activate<RF_ACTIVATION>(low));
    rf_element<RF_DTYPE>::set(two, 1, rf_activate<RF_ACTIVATION>(high));
    return two.word[0];
}

/* Adds the parent's sums of a part's 32 rows from shared memory. */
RF_INLINE void add_part(float (&sums)[2][SUMS / 2], const shared_t &at, int part, int thread) {
#pragma unroll
    for (int i = part * PART_SUMS; i < (part + 1) * PART_SUMS; i += 4) {
        float4 more;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                     : "r"(at.sums + (i / 4 * WARPGROUP + thread) * 16)
                     : "memory");
        SUM(i) += more.x;
        SUM(i + 1) += more.y;
        SUM(i + 2) += more.z;
        SUM(i + 3) += more.w;
    }
}

/* Adds the bias of a part's rows. */
RF_INLINE void add_bias(float (&sums)[2][SUMS / 2], const rf_fused_args &args, int part, int rank,
                        int thread) {
    if (args.bias == nullptr) return;
#pragma unroll
    for (int i = part * PART_SUMS; i < (part + 1) * PART_SUMS;
         i += 2) { /* i % 4 is 0 or 2: the same rows of two columns */
        const int row = rank * RF_ROWS + i / 4 * 8 + thread % 4 * 2;
        SUM(i) += rf_bias_of<RF_DTYPE>(args.bias, row, args.m);
        SUM(i + 1) += rf_bias_of<RF_DTYPE>(args.bias, row + 1, args.m);
    }
}

/* The position of a thread: its block's rank, its warpgroup, and its row of 16 bytes in a box. */
struct position_t {
    int rank, group, thread;
    rf_u32 offset;
};

/* Stores a strip's sums to `out`, a part at a time, through the stages. A stage has been read completely
 * before the previous part. */
RF_INLINE void store(float (&sums)[2][SUMS / 2], const rf_fused_args &args, const shared_t &at,
                     const strip_t &s, int turn, const position_t &in) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int stage =
            (turn * PARTS + part) % RF_FUSED_STAGES; /* the turns of the last level are consecutive */
        const rf_u32 to = at.stages + (in.group * RF_FUSED_STAGES + stage) * STAGE_BYTES;
        if (RF_JOINED)
            add_bias(sums, args, part, in.rank, in.thread);
        else if (s.flags & HERE)
            add_part(sums, at, part, in.thread);
#pragma unroll
        for (int i = part * PART_SUMS; i < (part + 1) * PART_SUMS; i += 8)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + in.offset + (i - part * PART_SUMS) * 256),
                         "r"(pack_two(SUM(i), SUM(i + 1))), "r"(pack_two(SUM(i + 2), SUM(i + 3))),
                         "r"(pack_two(SUM(i + 4), SUM(i + 5))), "r"(pack_two(SUM(i + 6), SUM(i + 7)))
                         : "memory");
        rf_async_fence();
        if (in.thread == 0) rf_stores_wait<RF_FUSED_STAGES - 2>(); /* the stage of the next part */
        rf_group_sync(in.group + 1, WARPGROUP);
        if (in.thread == 0)
            rf_store_box(&args.out, s.column * RF_FUSED_COLUMNS, in.rank * RF_ROWS + part * RF_FUSED_PART,
                         s.item, to);
    }
}

/* Writes the sums of a level other than the last to global memory, and counts them. */
RF_INLINE void keep(float (&sums)[2][SUMS / 2], const rf_fused_args &args, const rf_fused_level &level,
                    const shared_t &at, const strip_t &s, const position_t &in) {
    const rf_i64 number = (rf_i64)s.item * args.strips + s.column;
    float4 *to = (float4 *)sums_of(level.sums, number, in.rank) + in.thread;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        if (s.flags & HERE) add_part(sums, at, part, in.thread);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        __stcg(to + i / 4 * WARPGROUP, make_float4(SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)));
    __threadfence();
    rf_group_sync(in.group + 1, WARPGROUP);
    if (in.thread == 0) rf_count_up(level.done);
}

/* Initialises sums with strip `number` of `parents` unless it is NULL; otherwise products overwrite them.
 * Loads under a branch would make the compiler serialise the products (its warning C7512). */
RF_INLINE void start(float (&sums)[2][SUMS / 2], float *parents, int number, int rank, int thread) {
    const float4 *from = (const float4 *)sums_of(parents, number, rank) + thread;
#pragma unroll
    for (int i = 0; i < SUMS; i++) /* frees the registers of the previous strip, which gelu needs */
        if (RF_ACTIVATION == RF_ACTIVATION_GELU) SUM(i) = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        asm volatile("{ .reg .pred p; setp.ne.b64 p, %4, 0; "
                     "@p ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%5], %6; }"
                     : "+f"(SUM(i)), "+f"(SUM(i + 1)), "+f"(SUM(i + 2)), "+f"(SUM(i + 3))
                     : "l"(parents), "l"(from + i / 4 * WARPGROUP), "l"(RF_L2_LAST)
                     : "memory");
}

/* Finishes the sums. Reads the strip's description again, because registers are scarce during products. */
RF_INLINE void finish(float (&sums)[2][SUMS / 2], const rf_fused_args &args, const shared_t &at, int l,
                      int turn, const position_t &in) {
    const strip_t s = strip_read(at, turn, in.group);
    rf_barrier_arrive(at.strips_empty + turn % RF_FUSED_ENTRIES * 8);
    if (!RF_JOINED && s.flags & HERE) rf_barrier_wait(at.sums_full, s.flags & PARITY ? 1 : 0);
    if (l == levels_of(args) - 1)
        store(sums, args, at, s, turn, in);
    else
        keep(sums, args, args.levels[l], at, s, in);
}

/* One warpgroup multiplies its strip of every turn. */
RF_INLINE void multiply_strips(const rf_fused_args &args, const shared_t &at, int group, int rank) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    /* The offset of this thread's row of 16 bytes, for ldmatrix and stmatrix, in a box [rows][64 columns]
     * with a swizzle of 128. */
    const rf_u32 offset =
        lane % 8 * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16 + lane / 16 * 1024;
    float sums[2][SUMS / 2];
    ring_t ring = {0, 0};
    int turn = 0;
    for (int l = FIRST; l < levels_of(args); l++) {
        const rf_fused_level &up = args.levels[l > 0 ? l - 1 : 0];
        bool ready = l == FIRST;
        for (int turns = turns_of(range_of(at, l)); turns > 0; turns--, turn++) {
            rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
            const strip_t s = strip_read(at, turn, group);
            if (!RF_JOINED && s.flags & CHANGED) rf_barrier_arrive(at.sums_empty);
            if (s.item <
                0) { /* one warp releases slots if no other waits for the first, because it would fall behind */
                rf_group_sync(group + 1, WARPGROUP);
                for (int k = 0; k < slots_of(args, l); k++, ring.next()) {
                    if (thread >= 32) continue;
                    rf_barrier_wait(at.full + ring.slot * 8, ring.parity);
                    slot_free(at, ring.slot, thread);
                }
                rf_group_sync(group + 1, WARPGROUP);
                rf_barrier_arrive(at.strips_empty + turn % RF_FUSED_ENTRIES * 8);
                continue;
            }
            if (!RF_JOINED && !(s.flags & HERE) && !ready) {
                sums_wait(args, up);
                ready = true;
            }
            const bool begun = !RF_JOINED && !(s.flags & HERE);
            start(sums, begun ? up.sums : nullptr, s.parent, rank, thread);
            multiply(sums, at, ring, slots_of(args, l), group * X_BYTES + offset, begun, thread);
            finish(sums, args, at, l, turn, {rank, group, thread, offset});
        }
    }
    if (thread == 0) rf_stores_finish();
}

extern "C" __global__ void __launch_bounds__(RF_FUSED_THREADS, 1)
    rf_ikbo_linear(const __grid_constant__ rf_fused_args args) {
    extern __shared__ rf_u8 memory[];
    const shared_t at = shared_of(memory);
    const int group = threadIdx.x / WARPGROUP, rank = RF_RANKS == 2 ? blockIdx.x % 2 : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RF_SLOTS; i++) {
            rf_barrier_init(at.full + i * 8, GROUPS + 1);
            rf_barrier_init(at.empty + i * 8, GROUPS * RF_RANKS);
        }
        rf_barrier_init(at.sums_full, 1);
        rf_barrier_init(at.sums_empty, GROUPS * WARPGROUP);
        for (int i = 0; i < RF_FUSED_ENTRIES; i++)
            rf_barrier_init(at.strips_empty + i * 8, GROUPS * WARPGROUP);
        cut(args, at, blockIdx.x / RF_RANKS, gridDim.x / RF_RANKS);
        rf_barriers_ready();
    }
    if (RF_RANKS == 2)
        rf_cluster_sync();
    else
        __syncthreads();
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        const int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 32 == 0 && warp < GROUPS) copy_strips(args, at, warp, rank);
        if (warp == GROUPS) copy_weights(args, at, threadIdx.x % 32, rank);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        multiply_strips(args, at, group, rank);
        __syncwarp();
    }
    if (RF_RANKS == 2) rf_cluster_sync(); /* the other block may still write to this block */
}
