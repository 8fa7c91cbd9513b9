/* Steps of a warpgroup's rows between the products: maxima and sums, weights, and the store of results. */
#ifndef RECFUSE_IKBO_ATTENTION_SOFTMAX_CUH
#define RECFUSE_IKBO_ATTENTION_SOFTMAX_CUH

#include "families/ikbo_attention/fused_rows.cuh"

enum {
    SCORES = KEYS / 2,
    SUMS = RF_DIM / 2,
};

RF_INLINE float power_of_two(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns the maximum over the four lanes that share a row. */
RF_INLINE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(RF_FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(RF_FULL_WARP, x, 2));
}
RF_INLINE float row_sum(float x) {
    x += __shfl_xor_sync(RF_FULL_WARP, x, 1);
    return x + __shfl_xor_sync(RF_FULL_WARP, x, 2);
}

/* Returns true if x is true in one of the four lanes. */
RF_INLINE bool row_any(bool x) {
    const rf_u32 lanes = __ballot_sync(RF_FULL_WARP, x);
    return (lanes >> (threadIdx.x % 32 & ~3u) & 15) != 0;
}

#define RF_MINUS_INFINITY __int_as_float((int)0xff800000)
/* The largest sum of a lane's weights in a block: float16 holds each of them. */
#define RF_MOST_WEIGHT 32768.0f
/* The shift of a row without a score above minus infinity: relative to it any other score makes a weight that
 * is too large. */
#define RF_NO_SHIFT (-3e38f)

/* Replaces a score by its weight and adds it to the sum. One asm block, so that the compiler leaves it
 * between the products and interleaves the exponentials with the rest. */
RF_INLINE void weigh(float &score, float &sum, float scale, float shift) {
    asm volatile("{ .reg .f32 x; fma.rn.f32 x, %0, %2, %3; ex2.approx.ftz.f32 %0, x; add.f32 %1, %1, %0; }"
                 : "+f"(score), "+f"(sum)
                 : "f"(scale), "f"(-shift));
}

/* The state of a thread's two rows. Weights are 2^(scale * score - shift); the common factor cancels at the
 * end. The shift is scale times the largest score of the tile's first block of keys; a later block raises it
 * only if its weights would be too large. A row's result depends on that row alone, so its bits do not depend
 * on the other rows of the tile. */
struct row_state_t {
    float shift[2]; /* for a missing row infinity, so that its weights are zeros */
    float sum[2]; /* sums of the weights in this lane's columns */

    RF_INLINE void begin() {
        shift[0] = shift[1] = RF_NO_SHIFT;
        sum[0] = sum[1] = 0;
    }
    /* Raises the shifts to the scores of a block, for the rows `of` the two. `rows`: number of valid rows
     * from the first of the two on; `factor`: scale of earlier sums. */
    RF_INLINE void raise(const float (&scores)[SCORES], float scale, int rows, const bool (&of)[2],
                         float (&factor)[2]) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float high[2] = {scores[2 * row], scores[2 * row + 1]};
#pragma unroll
            for (int i = 4; i < SCORES; i += 4) {
                high[0] = fmaxf(high[0], scores[i + 2 * row]);
                high[1] = fmaxf(high[1], scores[i + 2 * row + 1]);
            }
            const float maximum = __fmul_rn(row_max(fmaxf(high[0], high[1])), scale), before = shift[row];
            factor[row] = 1;
            if (!of[row]) continue;
            shift[row] = row * 8 < rows ? fmaxf(before, maximum) : -RF_MINUS_INFINITY;
            /* 1 if the shift stays: an error would accumulate over blocks. */
            factor[row] = power_of_two(before - shift[row]);
            sum[row] *= factor[row];
        }
    }
    /* Replaces the scores of a block by weights; `block_sums`: their sums. */
    RF_INLINE void weigh_block(float (&scores)[SCORES], float scale, float (&block_sums)[2]) const {
        float sums[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < SCORES; i++) weigh(scores[i], sums[i % 4], scale, shift[i / 2 % 2]);
        block_sums[0] = sums[0] + sums[1];
        block_sums[1] = sums[2] + sums[3];
    }
    /* Replaces the scores of the rows `of` the two; the other row already has weights. */
    RF_INLINE void weigh_block(float (&scores)[SCORES], float scale, const bool (&of)[2],
                               float (&block_sums)[2]) const {
        float sums[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            float weight = scores[i];
            weigh(weight, sums[i % 4], scale, shift[i / 2 % 2]);
            if (of[i / 2 % 2]) scores[i] = weight;
        }
        if (of[0]) block_sums[0] = sums[0] + sums[1];
        if (of[1]) block_sums[1] = sums[2] + sums[3];
    }
    /* Returns true if a block's weights in this lane's columns are too large. */
    RF_INLINE bool exceeded(const float (&block_sums)[2], int row) const {
        return block_sums[row] > RF_MOST_WEIGHT;
    }
    RF_INLINE void add_block(const float (&block_sums)[2]) {
        sum[0] += block_sums[0];
        sum[1] += block_sums[1];
    }
};

RF_INLINE void rescale(float (&sums)[SUMS], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] *= factor[i / 2 % 2];
}

/* Masks keys from number `keys` of a block on, for the rows `of` the thread's two rows. */
RF_INLINE void mask(float (&scores)[SCORES], const bool (&of)[2], int keys, int lane) {
#pragma unroll
    for (int i = 0; i < SCORES; i++)
        if (of[i / 2 % 2] && i / 4 * 8 + lane % 4 * 2 + i % 2 >= keys) scores[i] = RF_MINUS_INFINITY;
}

RF_INLINE rf_u32 pack_two(float low, float high) {
    rf_u32 two;
    if (RF_DTYPE == RF_FLOAT16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

/* Converts weights to the layout of the tensor cores' A. */
RF_INLINE void convert(rf_u32 (&weights)[KEYS / 16][4], const float (&scores)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) weights[i / 8][i / 2 % 4] = pack_two(scores[i], scores[i + 1]);
}

/* Stores the log-sum-exp of a row of a tile. */
RF_INLINE void store_lse(const rf_attention_args &args, const shared_t &at, int slot, int row, float lse) {
    const int number = at.rows[slot * SEGMENTS + row / RF_SEGMENT];
    if (number == NO_ROW) return;
    const rf_attention_queries &to = number >= 0 ? args.candidates : args.self;
    const int row_number = (number >= 0 ? number : ~number) + row % RF_SEGMENT * args.heads,
              position = row_number / args.heads, head = row_number - position * args.heads,
              item = position / to.queries;
    if (to.lse != nullptr)
        to.lse[((rf_i64)item * args.heads + head) * to.queries + (position - item * to.queries)] = lse;
}

/* Marks the results of a thread as complete; copy_rows sends them. */
RF_INLINE void slot_done(const shared_t &at, int slot) {
    rf_async_fence();
    rf_barrier_arrive(at.q_empty + slot * 8);
}

/* Returns the memory of a part: the sums of each thread, and the shifts and sums of weights of its rows. */
RF_INLINE float4 *part_at(const rf_attention_args &args, int item, int group, int thread) {
    enum { EACH = (SUMS / 4 + 1) * WARPGROUP };
    return (float4 *)args.parts + (rf_i64)(item * GROUPS + group) * EACH + thread;
}

/* The position of a thread: its warpgroup, the slot of its tile, and its number in the warpgroup. */
struct position_t {
    int group, slot, thread;
};

/* Joins the parts of the keys of a warpgroup's rows. Returns true in the last part to end, which then has the
 * sums of all, added in the order of the parts, so that the result does not depend on which part is last. The
 * other parts set `incomplete`: they store no results. */
RF_INLINE bool join_parts(const rf_attention_args &args, const shared_t &at, float (&sums)[SUMS],
                          row_state_t &state, const split_t &split, const position_t &in) {
    float4 *part_sums = part_at(args, split.item, in.group, in.thread);
    int *incomplete = &at.incomplete[in.slot * GROUPS + in.group];
    const float total[2] = {row_sum(state.sum[0]), row_sum(state.sum[1])};
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        __stcg(part_sums + i / 4 * WARPGROUP, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
    __stcg(part_sums + SUMS / 4 * WARPGROUP, make_float4(state.shift[0], total[0], state.shift[1], total[1]));
    __threadfence();
    rf_group_sync(in.group + 1, WARPGROUP);
    const int first = split.item - split.part;
    if (in.thread == 0) {
        *incomplete = atomicAdd(&args.ended[first * GROUPS + in.group], 1) != split.parts - 1;
        __threadfence();
    }
    rf_group_sync(in.group + 1, WARPGROUP);
    if (*(volatile int *)incomplete) return false;
    state.begin();
    for (int part = 0; part < split.parts; part++) {
        const float4 rows = __ldcg(part_at(args, first + part, in.group, in.thread) + SUMS / 4 * WARPGROUP);
        state.shift[0] = fmaxf(state.shift[0], rows.x);
        state.shift[1] = fmaxf(state.shift[1], rows.z);
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#pragma unroll 1
    for (int part = 0; part < split.parts; part++) {
        const float4 *from = part_at(args, first + part, in.group, in.thread);
        const float4 rows = __ldcg(from + SUMS / 4 * WARPGROUP);
        const float factor[2] = {power_of_two(rows.x - state.shift[0]),
                                 power_of_two(rows.z - state.shift[1])};
        state.sum[0] += rows.y * factor[0];
        state.sum[1] += rows.w * factor[1];
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 more = __ldcg(from + i / 4 * WARPGROUP);
            sums[i] += more.x * factor[0];
            sums[i + 1] += more.y * factor[0];
            sums[i + 2] += more.z * factor[1];
            sums[i + 3] += more.w * factor[1];
        }
    }
    if (in.thread % 4 != 0) state.sum[0] = state.sum[1] = 0; /* all four lanes of a row hold its whole sum */
    return true;
}

/* Stores a warp's results over the queries to which they belong. */
RF_INLINE void store(const rf_attention_args &args, const shared_t &at, float (&sums)[SUMS],
                     row_state_t state, int group, int slot, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    const int split = *(volatile int *)&at.splits[slot];
    if (split != 0 && !join_parts(args, at, sums, state, split_t::of(split), {group, slot, thread})) {
        slot_done(at, slot);
        return;
    }
    if (split == 0 && thread == 0) at.incomplete[slot * GROUPS + group] = 0;
    const rf_u32 to = at.q + (slot * GROUPS + group) * Q_BYTES + warp * 16 * ATOM_BYTES;
    float total[2], factor[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        total[row] = row_sum(state.sum[row]);
        factor[row] = __fdividef(1.0f, total[row]); /* between 1 and about 2^45, 0 or NaN */
    }
    const int row_of_lane = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < RF_DIM / 16; i++) {
        const int chunk = i * 2 + lane / 16;
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                to + chunk / 8 * Q_ATOM + row_of_lane * ATOM_BYTES + (chunk % 8 ^ row_of_lane % 8) * 16),
            "r"(pack_two(sums[8 * i] * factor[0], sums[8 * i + 1] * factor[0])),
            "r"(pack_two(sums[8 * i + 2] * factor[1], sums[8 * i + 3] * factor[1])),
            "r"(pack_two(sums[8 * i + 4] * factor[0], sums[8 * i + 5] * factor[0])),
            "r"(pack_two(sums[8 * i + 6] * factor[1], sums[8 * i + 7] * factor[1]))
            : "memory");
    }
    if ((args.candidates.lse != nullptr || args.self.lse != nullptr) && lane % 4 == 0) {
#pragma unroll
        for (int row = 0; row < 2; row++)
            store_lse(args, at, slot, group * ROWS + warp * 16 + lane / 4 + row * 8,
                      (state.shift[row] + __log2f(total[row])) * 0.69314718f);
    }
    slot_done(at, slot);
}

/* Stores zeros for rows without keys. */
RF_INLINE void store_zeros(const rf_attention_args &args, const shared_t &at, int group, int slot,
                           int thread) {
    const int lane = thread % 32, warp = thread / 32;
    const rf_u32 to = at.q + (slot * GROUPS + group) * Q_BYTES + warp * 16 * ATOM_BYTES;
    for (int i = lane; i < 16 * 8; i += 32)
#pragma unroll
        for (int atom = 0; atom < ATOMS; atom++)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + atom * Q_ATOM + i * 16), "r"(0)
                         : "memory");
    if (lane < 16) store_lse(args, at, slot, group * ROWS + warp * 16 + lane, RF_MINUS_INFINITY);
    if (thread == 0) at.incomplete[slot * GROUPS + group] = 0;
    slot_done(at, slot);
}

#endif
