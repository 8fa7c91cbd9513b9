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

/* Of an entry's key in shared memory: the next one has another. Rows need one bit less. */
#define ENDS ((RF_KEY)1 << (8 * sizeof(RF_KEY) - 1))
#define NO_KEY (ENDS - 1) /* of no row: there are fewer */

/* The chunk of a block. Entry 0 is that before the chunk, and one more follows it. */
struct rows_chunk_t {
    rf_backward_entry *entries;
    float *factors;
    rf_u32 *found; /* rows of the launch that are found up to an entry, less one */
    float *parts;
    int size; /* entries that count */
    RF_INLINE RF_KEY key(int at) const { return entries[at + 1].key & NO_KEY; }
    RF_INLINE bool ends(int at) const { return (entries[at + 1].key & ENDS) != 0; }
};

RF_INLINE rows_chunk_t chunk_of(rf_u8 *memory, int size) {
    rows_chunk_t chunk;
    chunk.parts = (float *)memory; /* aligned best */
    chunk.entries = (rf_backward_entry *)(memory + 2 * BLOCK * 16 * RF_VECTORS);
    chunk.factors = (float *)(chunk.entries + size + 2);
    chunk.found = (rf_u32 *)(chunk.factors + size);
    chunk.size = 0;
    return chunk;
}

RF_INLINE RF_KEY key_at(const rf_backward_rows_args &args, rf_i64 at, rf_i64 count) {
    if (at < 0 || at >= count) return NO_KEY;
    return rf_load(&args.entries[at].key);
}

/* Of a maximum, a lookup that its bag has had before: its columns are counted already. Equal lookups of a bag are
 * neighbours. */
RF_INLINE bool is_repeated(const rf_backward_rows_args &args, rf_i64 at, RF_KEY before, RF_KEY key,
                           float factor, RF_VALUE source) {
    if (RF_ENTRIES != RF_ENTRIES_MIXED || factor >= 0 || before != key) return false;
    const RF_VALUE other = rf_load(&args.entries[at - 1].value);
    return rf_load(args.sources + other) == source && rf_load(args.factors + other) == factor;
}

RF_INLINE void chunk_load(const rf_backward_rows_args &args, rf_i64 first, rf_i64 count, rows_chunk_t &chunk,
                          rf_u32 *of_warps) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int valid = 0;
    for (int i = thread; i < args.chunk + 2; i += BLOCK) {
        const rf_i64 at = first + i - 1;
        const RF_KEY key = key_at(args, at, count);
        rf_backward_entry entry = {key, 0};
        if (i > 0 && i <= args.chunk && key != NO_KEY) {
            valid++;
            if (key != key_at(args, at + 1, count)) entry.key |= ENDS;
            entry.value = rf_load(&args.entries[at].value);
            if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
                float factor = rf_load(args.factors + entry.value);
                entry.value = rf_load(args.sources + entry.value);
                if (is_repeated(args, at, key_at(args, at - 1, count), key, factor, entry.value))
                    factor = -__int_as_float(0x7f800000); /* it adds nothing */
                chunk.factors[i - 1] = factor;
            }
        }
        chunk.entries[i] = entry;
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
        const bool begins = at < chunk.size && chunk.key(at - 1) != chunk.key(at);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, begins);
        if (at < chunk.size && at >= warp * each && at < (warp + 1) * each)
            chunk.found[at] = before + __popc(all & (0xffffffffu >> (31 - lane))) - 1;
        before += __popc(all);
    }
    __syncthreads();
}

/* An entry's gradient is added to a row's sums. */
RF_INLINE void entry_add(const rf_backward_rows_args &args, const rows_chunk_t &chunk, const groups_t &groups,
                         int at, const rf_backward_entry &entry, const four_t *gradient, four_t *sums) {
    const float factor = RF_ENTRIES == RF_ENTRIES_DIRECT ? 1.0f : chunk.factors[at];
    if (RF_ENTRIES == RF_ENTRIES_MIXED && factor < 0) {
        if (isinf(factor)) return;
        const rf_backward_feature *feature = args.features + ((int)-factor - 1);
        const rf_i64 row = (rf_i64)(entry.key & NO_KEY) - rf_load(&feature->first_row);
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) {
            const rf_i64 *winners = args.winners + (rf_i64)entry.value + column_of(groups, v);
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

/* Where a group leaves the sum of its first run (0), which began before its share, or its last one (1), which goes on. */
RF_INLINE float *part_of(const rows_chunk_t &chunk, const groups_t &groups, int which, int group, int v) {
    return chunk.parts + 4 * (((which * RF_VECTORS + v) * groups.count + group) * groups.lanes + groups.lane);
}

/* A group's share: entries [first, behind) of one matrix. */
RF_INLINE void share_pool(const rf_backward_rows_args &args, const rf_emit_t &emit, const rows_chunk_t &chunk,
                          const rf_backward_matrix &matrix, const groups_t &groups, int first, int behind) {
    if (first >= behind) return;
    const rf_u8 *const grad = args.grad + column_of(groups, 0) * GRAD_BYTES;
    four_t sums[RF_VECTORS] = {};
    bool began = chunk.key(first - 1) != chunk.key(first);
    for (int i = first; i < behind; i += AT_ONCE) {
        rf_backward_entry entries[AT_ONCE];
        ready_t<AT_ONCE> ready; /* sums are gradients before */
        bool whole = began;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            entries[u] = chunk.entries[i + u + 1];
            if (u > 0 && i + u >= behind) continue;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++)
                ready.sums[u][v] = four_load<RF_GRAD_DTYPE, true>(
                    grad + ((rf_i64)entries[u].value + 4 * v * groups.lanes) * GRAD_BYTES,
                    valid_of(groups, v));
            if ((entries[u].key & ENDS) == 0) continue;
            if (whole) row_load(matrix, groups, (rf_i64)(entries[u].key & NO_KEY), ready.rows[u]);
            whole = true;
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = i + u;
            ready.emits[u] = false;
            if (u > 0 && at >= behind) continue;
            entry_add(args, chunk, groups, at, entries[u], ready.sums[u], sums);
            const bool ends = (entries[u].key & ENDS) != 0;
            if (!ends && at != behind - 1) continue;
            ready.emits[u] = ends && began;
            ready.keys[u] = entries[u].key & NO_KEY;
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
RF_INLINE void run_join(const rf_backward_rows_args &args, const rf_emit_t &emit, const rows_chunk_t &chunk,
                        const rf_backward_matrix &matrix, const groups_t &groups, int segment, int end,
                        int share, bool start) {
    const int first = segment + groups.group * share, behind = min(first + share, end);
    const RF_KEY key = chunk.key(start ? first : behind - 1);
    ready_t<1> ready = {};
    four_t *const sums = ready.sums[0];
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, !start, groups.group, v), sums[v]);
    int at = behind, other = groups.group + 1;
    while (at < end && chunk.key(at) == key) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, 0, other, v), sums[v]);
        at = min(at + share, end);
        other++;
    }
    if (!start && chunk.key(at) != key) {
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
    const rf_i64 count = rf_load(args.count), start = (rf_i64)blockIdx.x * args.chunk;
    rows_chunk_t chunk = chunk_of(memory, args.chunk);
    chunk_load(args, start, count, chunk, of_warps);
    for (int segment = 0; segment < chunk.size;) {
        const int number = matrix_of(args, (rf_i64)chunk.key(segment));
        const rf_backward_matrix matrix = args.matrices[number];
        const groups_t groups = groups_of(matrix);
        int end = chunk.size;
        if (number + 1 < args.n_matrices) {
            const rf_i64 next = args.matrices[number + 1].first_row;
            int known = segment; /* entries up to it are of the matrix */
            while (end - known > 1) {
                const int middle = (known + end) / 2;
                if ((rf_i64)chunk.key(middle) < next) {
                    known = middle;
                } else {
                    end = middle;
                }
            }
        }
        const int share = max((end - segment + groups.count - 1) / groups.count, AT_ONCE);
        const int first = segment + groups.group * share, behind = min(first + share, end);
        share_pool(args, emit, chunk, matrix, groups, first, behind);
        __syncthreads();
        if (first < behind) {
            if (first == 0 && chunk.key(-1) == chunk.key(0))
                run_join(args, emit, chunk, matrix, groups, segment, end, share, true);
            if (!chunk.ends(behind - 1) && chunk.key(behind - 1) != chunk.key(first - 1))
                run_join(args, emit, chunk, matrix, groups, segment, end, share, false);
        }
        segment = end;
        __syncthreads();
    }
}
