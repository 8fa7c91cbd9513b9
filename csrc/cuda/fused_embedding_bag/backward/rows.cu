/* Sorted entries -> sums of rows -> what emit.cuh makes of them: the forward transposed (DESIGN's decision 10). Each row that
 * was looked up is read and written once.
 *
 * A block: args.chunk neighbouring entries, however many rows they are of, so that a row that all lookups want is as good
 * as any; their keys and values lie in shared memory. A group of lanes (a quarter of the columns, at most 32, four columns
 * and RF_VECTORS times that each): as many neighbouring entries as any other group. Runs of equal keys that lie inside a
 * group's share are emitted at once. A run that goes over the border of shares leaves its parts in shared memory, where
 * the group in which it began adds them up in their order; one that goes over the border of chunks leaves its parts in
 * args.partials, for joins.cu. So each sum has one order of additions, whatever the GPU does first.
 * Rows wider than 128 * RF_VECTORS columns: the blocks of gridDim.y have slices of the columns (the host does not ask for
 * that where RF_EMIT needs whole rows).
 * Shared memory: dynamic, RF_BACKWARD_ROWS_SHARED. Launch: grid [chunks, slices], block [RF_BACKWARD_BLOCK].
 */
#include "fused_embedding_bag/backward/pool.cuh"

enum {
    AT_ONCE = RF_VECTORS == 1 ? 2 : 1, /* entries that a group loads at once */
    BLOCKS = RF_VECTORS == 4                      ? 2
             : EMIT_STATES > 0 || RF_VECTORS == 2 ? 3
                                                  : 4 /* an SM, by registers */
};

#define NO_KEY ((RF_KEY) - 1) /* of no row: there are fewer */

/* The chunk of a block. Entry i has key[i + 1]: key[0] is that of the entry before the chunk, and one more follows. */
struct chunk_t {
    RF_KEY *keys;
    RF_VALUE *values;
    float *factors;
    rf_u32 *found; /* rows of the launch that are found up to an entry, less one */
    float *parts;
    int size; /* entries that count */
};

RF_INLINE chunk_t chunk_of(rf_u8 *memory, int size) {
    chunk_t chunk;
    chunk.parts = (float *)memory; /* aligned best */
    chunk.keys = (RF_KEY *)(memory + 2 * BLOCK * 16 * RF_VECTORS);
    chunk.values = (RF_VALUE *)(chunk.keys + (size + 4) / 2 * 2);
    chunk.factors = (float *)(chunk.values + size);
    chunk.found = (rf_u32 *)(chunk.factors + size);
    chunk.size = 0;
    return chunk;
}

RF_INLINE RF_KEY key_at(const rf_backward_rows_args &args, rf_i64 at, rf_i64 count) {
    if (at < 0 || at >= count) return NO_KEY;
    const RF_KEY key = rf_load(args.keys + at);
    return (rf_i64)key < args.trash ? key : NO_KEY;
}

/* Of a maximum, a lookup that its bag has had before: its columns are counted already. Equal lookups of a bag are
 * neighbours. */
RF_INLINE bool is_repeated(const rf_backward_rows_args &args, rf_i64 at, RF_KEY before, RF_KEY key,
                           float factor, RF_VALUE source) {
    if (RF_ENTRIES != RF_ENTRIES_MIXED || factor >= 0 || before != key) return false;
    const RF_VALUE other = rf_load(args.values + at - 1);
    return rf_load(args.sources + other) == source && rf_load(args.factors + other) == factor;
}

RF_INLINE void chunk_load(const rf_backward_rows_args &args, rf_i64 first, rf_i64 count, chunk_t &chunk,
                          rf_u32 *of_warps) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int valid = 0;
    for (int i = thread; i < args.chunk + 2; i += BLOCK) {
        const rf_i64 at = first + i - 1;
        const RF_KEY key = key_at(args, at, count);
        chunk.keys[i] = key;
        if (i == 0 || i > args.chunk || key == NO_KEY) continue;
        valid++;
        RF_VALUE value = rf_load(args.values + at);
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
            float factor = rf_load(args.factors + value);
            value = rf_load(args.sources + value);
            if (is_repeated(args, at, key_at(args, at - 1, count), key, factor, value))
                factor = -__int_as_float(0x7f800000); /* it adds nothing */
            chunk.factors[i - 1] = factor;
        }
        chunk.values[i - 1] = value;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) valid += __shfl_xor_sync(RF_FULL_WARP, valid, apart);
    if (lane == 0) of_warps[warp] = (rf_u32)valid;
    __syncthreads();
    for (int w = 0; w < BLOCK / 32; w++) chunk.size += (int)of_warps[w];
    if (args.bases == nullptr) return;
    /* Each warp counts all rows that begin before its entries: a chunk has few. */
    rf_u32 before = args.bases[blockIdx.x];
    const int each = (args.chunk + BLOCK / 32 - 1) / (BLOCK / 32);
    for (int i = 0; i < min((warp + 1) * each, chunk.size); i += 32) {
        const int at = i + lane;
        const bool begins = at < chunk.size && chunk.keys[at] != chunk.keys[at + 1];
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, begins);
        if (at < chunk.size && at >= warp * each && at < (warp + 1) * each)
            chunk.found[at] = before + __popc(all & (0xffffffffu >> (31 - lane))) - 1;
        before += __popc(all);
    }
    __syncthreads();
}

/* An entry's gradient is added to a row's sums. */
RF_INLINE void entry_add(const rf_backward_rows_args &args, const chunk_t &chunk, const groups_t &groups,
                         int at, const four_t *gradient, four_t *sums) {
    const float factor = RF_ENTRIES == RF_ENTRIES_DIRECT ? 1.0f : chunk.factors[at];
    if (RF_ENTRIES == RF_ENTRIES_MIXED && factor < 0) {
        if (isinf(factor)) return;
        const rf_backward_feature *feature = args.features + ((int)-factor - 1);
        const rf_i64 row = (rf_i64)chunk.keys[at + 1] - rf_load(&feature->first_row);
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
            const rf_i64 *winners = args.winners + (rf_i64)chunk.values[at] + column_of(groups, v);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < valid_of(groups, v) && rf_load(winners + i) == row)
                    sums[v].of[i] += gradient[v].of[i];
        }
        return;
    }
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[v].of[i] = RF_ENTRIES == RF_ENTRIES_DIRECT ? sums[v].of[i] + gradient[v].of[i]
                                                            : fmaf(factor, gradient[v].of[i], sums[v].of[i]);
    }
}

RF_INLINE void entry_load(const rf_backward_rows_args &args, const chunk_t &chunk, const groups_t &groups,
                          int at, four_t *gradient) {
    const rf_u8 *from = args.grad + (rf_i64)chunk.values[at] * GRAD_BYTES;
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        const int valid = valid_of(groups, v);
        gradient[v] = four_t{};
        if (valid > 0)
            gradient[v] = four_load<RF_GRAD_DTYPE, true>(from + column_of(groups, v) * GRAD_BYTES, valid);
    }
}

/* Where a group leaves the sum of its first run (0), which began before its share, or its last one (1), which goes on. */
RF_INLINE float *part_of(const chunk_t &chunk, const groups_t &groups, int which, int group, int v) {
    return chunk.parts + 4 * (((which * RF_VECTORS + v) * groups.count + group) * groups.lanes + groups.lane);
}

/* A group's share: entries [first, behind) of one matrix. */
RF_INLINE void share_pool(const rf_backward_rows_args &args, const rf_emit_t &emit, const chunk_t &chunk,
                          const rf_backward_matrix &matrix, const groups_t &groups, int first, int behind) {
    four_t sums[RF_VECTORS] = {};
    bool began = first < behind && chunk.keys[first] != chunk.keys[first + 1];
    for (int i = first; i < behind; i += AT_ONCE) {
        ready_t<AT_ONCE> ready; /* sums are gradients before */
        bool whole = began;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = i + u;
            if (at >= behind) continue;
            entry_load(args, chunk, groups, at, ready.sums[u]);
            if (chunk.keys[at + 1] == chunk.keys[at + 2]) continue;
            if (whole) row_load(matrix, groups, (rf_i64)chunk.keys[at + 1], ready.rows[u]);
            whole = true;
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = i + u;
            ready.emits[u] = false;
            if (at >= behind) continue;
            entry_add(args, chunk, groups, at, ready.sums[u], sums);
            const bool ends = chunk.keys[at + 1] != chunk.keys[at + 2];
            if (!ends && at != behind - 1) continue;
            ready.emits[u] = ends && began;
            ready.keys[u] = chunk.keys[at + 1];
            ready.found[u] = args.bases != nullptr ? chunk.found[at] : 0;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) {
                if (!ready.emits[u]) part_store(part_of(chunk, groups, began, groups.group, v), sums[v]);
                ready.sums[u][v] = sums[v];
                sums[v] = four_t{};
            }
            began = true;
        }
        rows_emit(args, emit, matrix, groups, ready);
    }
}

/* Adds up the parts of the run that began in this group's share and goes on in others'; `start`: of the first run of the
 * chunk, which began before it, by group 0. */
RF_INLINE void run_join(const rf_backward_rows_args &args, const rf_emit_t &emit, const chunk_t &chunk,
                        const rf_backward_matrix &matrix, const groups_t &groups, int segment, int end,
                        int share, bool start) {
    const int first = segment + groups.group * share, behind = min(first + share, end);
    const RF_KEY key = chunk.keys[(start ? first : behind - 1) + 1];
    ready_t<1> ready = {};
    four_t *const sums = ready.sums[0];
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, !start, groups.group, v), sums[v]);
    int at = behind, other = groups.group + 1;
    while (at < end && chunk.keys[at + 1] == key) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, 0, other, v), sums[v]);
        at = min(at + share, end);
        other++;
    }
    if (!start && chunk.keys[at + 1] != key) {
        row_emit(args, emit, matrix, groups, key, args.bases != nullptr ? chunk.found[behind - 1] : 0, ready);
        return;
    }
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        if (valid_of(groups, v) > 0)
            part_store(partial_of(args, blockIdx.x, !start, column_of(groups, v)), sums[v]);
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_rows(const __grid_constant__ rf_backward_rows_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ rf_u32 of_warps[BLOCK / 32];
    rf_wait_for_previous_kernel();
    const rf_emit_t emit = rf_emit_of(args.emit);
    if (emit.skip) return;
    const rf_i64 count = count_of(args), start = (rf_i64)blockIdx.x * args.chunk;
    chunk_t chunk = chunk_of(memory, args.chunk);
    chunk_load(args, start, count, chunk, of_warps);
    for (int segment = 0; segment < chunk.size;) {
        const int number = matrix_of(args, (rf_i64)chunk.keys[segment + 1]);
        const rf_backward_matrix &matrix = args.matrices[number];
        const groups_t groups = groups_of(matrix.dim);
        const int end = number + 1 == args.n_matrices
                            ? chunk.size
                            : (int)entries_before(chunk.keys + 1, segment, chunk.size,
                                                  args.matrices[number + 1].first_row);
        const int share = max((end - segment + groups.count - 1) / groups.count, AT_ONCE);
        const int first = segment + groups.group * share, behind = min(first + share, end);
        share_pool(args, emit, chunk, matrix, groups, first, behind);
        __syncthreads();
        if (first < behind) {
            const RF_KEY last = chunk.keys[behind];
            if (first == 0 && chunk.keys[0] == chunk.keys[1])
                run_join(args, emit, chunk, matrix, groups, segment, end, share, true);
            if (last == chunk.keys[behind + 1] && last != chunk.keys[first])
                run_join(args, emit, chunk, matrix, groups, segment, end, share, false);
        }
        segment = end;
        __syncthreads();
    }
}
