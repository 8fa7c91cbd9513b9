/* Sums the sorted entries of each row and passes the sums to the epilogue (epilogue.cuh): the transpose of the
 * forward pass. Each row that was looked up is read and written once.
 *
 * Thread mapping. A block has args.chunk consecutive entries of any number of rows, so a row that all lookups
 * hit costs no more than others; keys and values are in shared memory. A group of lanes (columns / 4, at most
 * 32 lanes, RF_VECTORS vectors of four columns each) has an equal share of consecutive entries. It handles
 * AT_ONCE of them at a time: loads their gradients and prefetches the rows that end there, adds, and writes.
 * The cost of an entry is a few instructions plus its loads, so all decisions that depend only on the block
 * or the launch are made outside of the loop. Runs of equal keys inside a group's share are summed at once.
 * A run that crosses the border of shares leaves its parts in shared memory, and the group in which it began
 * adds them in their order. A run that crosses the border of chunks leaves its parts in args.partials, for
 * joins.cu. So each sum has a fixed order of additions. Rows wider than 128 * RF_VECTORS columns: the blocks
 * of gridDim.y have slices of the columns. The host does not request slices if RF_EPILOGUE needs whole rows.
 * Shared memory: dynamic, RF_BACKWARD_ROWS_SHARED. Launch: grid [chunks, slices], block [RF_BACKWARD_BLOCK].
 */
#include "families/fused_backward/backward_pool.cuh"

enum {
    /* true if the epilogue of an entry takes many registers */
    IS_LARGE = EPILOGUE_STATES > 0 || RF_ROUND || RF_ENTRIES == RF_ENTRIES_MIXED ||
               (EPILOGUE_ROWWISE && (RF_VECTORS > 1 || RF_ENTRIES != RF_ENTRIES_DIRECT)),
    AT_ONCE = RF_BACKWARD_ROWS_AT_ONCE /
              (RF_VECTORS * (IS_LARGE && RF_VECTORS < 4 ? 2 : 1)), /* a group's entries at
                                                                                     * once */
    RUN = RF_BACKWARD_ROWS_AT_ONCE / RF_VECTORS, /* entries at once within a run */
    BLOCKS = RF_VECTORS == 4 && EPILOGUE_STATES > 1 ? 1
             : RF_VECTORS == 4 ||
                     (EPILOGUE_STATES > 1 && (RF_VECTORS == 2 || RF_ROUND || RF_ENTRIES == RF_ENTRIES_MIXED))
                 ? 2
                 : 3, /* blocks per SM, by registers */
    ENTRIES_A_THREAD = RF_BACKWARD_MOST_ROWS_CHUNK / BLOCK /* entries that a thread loads */
};
static_assert((int)AT_ONCE <= (int)RF_BACKWARD_ROWS_AT_ONCE, "as the host counts");
static_assert(!EPILOGUE_ROWWISE || (int)AT_ONCE <= (int)LEAST_LANES, "a lane each, for its state");

#include "families/fused_backward/rows_chunk.cuh"

/* The inputs of a group except its position. */
struct inputs_t {
    const rf_backward_rows_args &args;
    const rf_epilogue_t &epilogue;
    const rows_chunk_t &chunk;
    const groups_t &groups;
    const lane_t &lane;
    const rf_u8 *grad; /* address of the lane's column in element 0 */
};

/* Adds the gradient of an entry to the sums of its row; `begins`: replaces them, because it is the first
 * entry. */
RF_INLINE void entry_add(const inputs_t &share, const rf_backward_entry &entry, float factor, bool begins,
                         const four_t *sums, four_t *gradient) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        if (RF_ENTRIES == RF_ENTRIES_MIXED && factor < 0) {
            const rf_i64 *winners = nullptr;
            rf_i64 row = 0;
            if (!isinf(factor)) {
                const rf_backward_feature *feature = share.args.features + ((int)-factor - 1);
                row = (rf_i64)(entry.key & ~ROW_END) - rf_load(&feature->first_row);
                winners = share.args.winners + (rf_i64)entry.value + share.lane.column + APART * v;
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (winners == nullptr || i >= share.lane.valid[v] || rf_load(winners + i) != row)
                    gradient[v].of[i] = 0;
        } else if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
#pragma unroll
            for (int i = 0; i < 4; i++) gradient[v].of[i] *= factor;
        }
        if (begins) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) gradient[v].of[i] += sums[v].of[i];
    }
}
RF_INLINE float factor_of(const inputs_t &share, int at) {
    return RF_ENTRIES == RF_ENTRIES_DIRECT ? 1.0f : share.chunk.factors[at];
}

RF_INLINE void grad_load(const inputs_t &share, RF_VALUE element, bool is_loaded, four_t *gradient) {
    const rf_u8 *from = rf_address(share.grad, element, GRAD_BYTES);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        gradient[v] = four_load<RF_GRAD_DTYPE, true>(from + APART * v * GRAD_BYTES,
                                                     is_loaded ? readable_of(share.lane, v) : 0);
}

/* Pools AT_ONCE entries from `at` on, of rows that end before `end`; entries past it are read but ignored.
 * `sums`: those of a row that began before, or zeros. Whole warps call it if RF_EPILOGUE exchanges numbers. */
RF_INLINE void entries_pool(const inputs_t &share, int at, int end, four_t *sums) {
    const rf_backward_entry *const from = share.chunk.entries + 1 + (EPILOGUE_ROWWISE ? min(at, end) : at);
    rf_backward_entry entries[AT_ONCE];
    pending_t<AT_ONCE> pending; /* before this, sums are gradients */
    if (EPILOGUE_ROWWISE) {
        const int own = own_row<AT_ONCE>(share.groups);
        const RF_KEY key = from[own].key;
        pending.own_key = (key & ROW_END) != 0 && at + own < end ? key : 0;
        pending.state = pending.own_key != 0 ? state_read(share.lane.states, key) : 1.0f;
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        entries[u] = from[u];
        grad_load(share, entries[u].value, true, pending.sums[u]);
        pending.keys[u] = entries[u].key;
        pending.writes[u] = (entries[u].key & ROW_END) != 0 && at + u < end;
        if (pending.writes[u]) row_load(share.lane, entries[u].key, pending.values[u]);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        const int before = u > 0 ? u - 1 : 0;
        pending.row_numbers[u] = !EPILOGUE_READS && share.args.bases != nullptr && pending.writes[u]
                                     ? share.chunk.row_numbers[at + u]
                                     : 0;
        entry_add(share, entries[u], factor_of(share, at + u), u > 0 && pending.writes[before],
                  u > 0 ? pending.sums[before] : sums, pending.sums[u]);
    }
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        sums[v] = pending.writes[AT_ONCE - 1] ? four_t{} : pending.sums[AT_ONCE - 1][v];
    rows_epilogue(share.args, share.epilogue, share.lane, share.groups, RF_FULL_WARP, pending);
}

/* Adds the entries from `at` on while they belong to row `key`. Returns the first other entry, at most
 * `limit`. */
RF_INLINE int run_pool(const inputs_t &share, int at, int limit, RF_KEY key, four_t *sums) {
    for (;;) {
        rf_backward_entry entries[RUN];
        four_t gradients[RUN][RF_VECTORS];
        bool own[RUN];
        int count = 0;
#pragma unroll
        for (int u = 0; u < RUN; u++) {
            entries[u] = {NO_KEY, 0};
            if (at + u < limit) entries[u] = share.chunk.entries[at + u + 1];
            own[u] = (entries[u].key & ~ROW_END) == key;
            count += own[u];
            grad_load(share, entries[u].value, own[u], gradients[u]);
        }
#pragma unroll
        for (int u = 0; u < RUN; u++) {
            if (!own[u]) continue;
            entry_add(share, entries[u], factor_of(share, at + u), false, sums, gradients[u]);
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) sums[v] = gradients[u][v];
        }
        at += count;
        if (count < RUN) return at;
    }
}

/* Returns the place of the sum of a group's first run (0), which began before its share, or last run (1),
 * which continues. */
RF_INLINE float *part_of(const rows_chunk_t &chunk, const groups_t &groups, int which, int group, int v) {
    return chunk.partials +
           4 * (((which * RF_VECTORS + v) * groups.count + group) * groups.lanes + groups.lane);
}
RF_INLINE void sums_store(const inputs_t &share, int which, const four_t *sums) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        part_store(part_of(share.chunk, share.groups, which, share.groups.group, v), sums[v]);
}

/* Pools a group's share: the entries [first, limit) of one matrix, possibly empty. Returns the sums that it
 * left, a bit each. */
RF_INLINE int group_pool(const inputs_t &share, int first, int limit) {
    const rows_chunk_t &chunk = share.chunk;
    four_t sums[RF_VECTORS];
    int at = first, open_runs = 0;
    bool continues = first < limit && chunk.key(first - 1) == chunk.key(first);
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        if (continues) {
            at = run_pool(share, at, limit, chunk.key(at), sums);
            sums_store(share, which, sums);
            open_runs |= 1 << which;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        }
        if (which == 1) break;
        int end = limit; /* of rows that end in the share */
        while (end > at && !chunk.ends(end - 1)) end--;
        int next = at;
        while (EPILOGUE_ROWWISE ? __any_sync(RF_FULL_WARP, next < end) : next < end) {
            entries_pool(share, next, end, sums);
            next += AT_ONCE;
        }
        at = max(at, end);
        continues = at < limit;
    }
    return open_runs;
}

/* The entries [first, end) of the chunk belong to one matrix. Groups have equal shares of them. */
struct segment_t {
    int first, end, share; /* share: entries of a group */
};

/* Adds the parts of the run that began in this group's share and continues in others. `start`: for group 0,
 * the run that began before the chunk. */
RF_INLINE void run_finish(const inputs_t &share, const segment_t &segment, int first, int limit, bool start) {
    const rows_chunk_t &chunk = share.chunk;
    const groups_t &groups = share.groups;
    const rf_backward_rows_args &args = share.args;
    const RF_KEY key = chunk.key(start ? first : limit - 1);
    pending_t<1> pending = {};
    four_t *const sums = pending.sums[0];
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, !start, groups.group, v), sums[v]);
    int at = limit, next_group = groups.group + 1;
    while (at < segment.end && chunk.key(at) == key) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, 0, next_group, v), sums[v]);
        at = min(at + segment.share, segment.end);
        next_group++;
    }
    if (!start && chunk.key(at) != key) {
        const bool row_sparse = !EPILOGUE_READS && args.bases != nullptr;
        row_prefetch(share.lane, key, pending);
        row_epilogue(args, share.epilogue, share.lane, groups, row_sparse ? chunk.row_numbers[limit - 1] : 0,
                     pending);
        return;
    }
    int block = (int)blockIdx.x;
    rf_forget(block);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        if (share.lane.valid[v] > 0)
            part_store(partial_of(args, block, !start, share.lane.column + APART * v), sums[v]);
}

/* Returns the end of the entries of a matrix that begin at `first`; `next`: the first row of the next
 * matrix. */
RF_INLINE int segment_end(const rows_chunk_t &chunk, int first, rf_i64 next) {
    int end = chunk.size, low = first; /* entries before `low` belong to the matrix */
    while (end - low > 1) {
        const int middle = (low + end) / 2;
        if ((rf_i64)chunk.key(middle) < next) {
            low = middle;
        } else {
            end = middle;
        }
    }
    return end;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_rows(const __grid_constant__ rf_backward_rows_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    const rf_epilogue_t epilogue = rf_epilogue_of(args.epilogue); /* older than the previous kernel */
    rf_wait_for_previous_kernel();
    if (epilogue.skip) return;
    rows_chunk_t chunk = chunk_of(memory, args.chunk);
    chunk_load(args, (rf_i64)blockIdx.x * args.chunk, chunk);
    segment_t segment;
    for (segment.first = 0; segment.first < chunk.size; segment.first = segment.end) {
        const int number = args.n_matrices == 1 ? 0 : matrix_of(args, (rf_i64)chunk.key(segment.first));
        const groups_t groups = groups_of(args.matrices[number].dim);
        const lane_t lane = lane_of(args.matrices[number], groups);
        const rf_u8 *grad = args.grad + (rf_i64)lane.column * GRAD_BYTES;
        rf_keep(grad);
        const inputs_t share = {args, epilogue, chunk, groups, lane, grad};
        segment.end = number + 1 == args.n_matrices
                          ? chunk.size
                          : segment_end(chunk, segment.first, args.matrices[number + 1].first_row);
        const int inverse_columns =
            (segment.end - segment.first + groups.count - 1) >> (BLOCK_BITS - groups.bits);
        segment.share = max(inverse_columns, (int)AT_ONCE);
        int group = groups.group, first = segment.first + group * segment.share;
        const int open_runs = group_pool(share, first, min(first + segment.share, segment.end));
        __syncthreads();
        rf_forget(group);
        first = segment.first + group * segment.share;
        const int limit = min(first + segment.share, segment.end);
        if (first == 0 && (open_runs & 1) != 0) run_finish(share, segment, first, limit, true);
        if ((open_runs & 2) != 0) run_finish(share, segment, first, limit, false);
        __syncthreads();
    }
}
