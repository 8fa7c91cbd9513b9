/* Sorted entries -> sums of rows -> what emit.cuh makes of them: the forward transposed (DESIGN's decision 10). Each row that
 * was looked up is read and written once.
 *
 * A block: args.chunk neighbouring entries, however many rows they are of, so that a row that all lookups want is as good
 * as any; their keys and values lie in shared memory. A group of lanes (a quarter of the columns, at most 32, four columns
 * and RF_VECTORS times that each): as many neighbouring entries as any other group. It takes AT_ONCE of them at a time:
 * asks for their gradients, and for the rows of those that are the last of their row, adds up, and emits. What an entry
 * costs is a few instructions more than the loads, so nothing is asked of an entry that its block or its launch could say.
 * Runs of equal keys that lie inside a group's share are emitted at once. A run that goes over the border of shares leaves its
 * parts in shared memory, where the group in which it began adds them up in their order; one that goes over the border of
 * chunks leaves its parts in args.partials, for joins.cu. So each sum has one order of additions, whatever the GPU does first.
 * Rows wider than 128 * RF_VECTORS columns: the blocks of gridDim.y have slices of the columns (the host does not ask for
 * that where RF_EMIT needs whole rows).
 * Shared memory: dynamic, RF_BACKWARD_ROWS_SHARED. Launch: grid [chunks, slices], block [RF_BACKWARD_BLOCK].
 */
#include "families/fused_backward/backward_pool.cuh"

enum {
    /* Whether the rest of an entry takes many registers. */
    MUCH = EMIT_STATES > 0 || RF_ROUND || RF_ENTRIES == RF_ENTRIES_MIXED ||
           (EMIT_ROWWISE && (RF_VECTORS > 1 || RF_ENTRIES != RF_ENTRIES_DIRECT)),
    AT_ONCE =
        RF_BACKWARD_ROWS_AT_ONCE / (RF_VECTORS * (MUCH && RF_VECTORS < 4 ? 2 : 1)), /* entries of a group */
    RUN = RF_BACKWARD_ROWS_AT_ONCE / RF_VECTORS, /* the same where all are of one row */
    BLOCKS = RF_VECTORS == 4 && EMIT_STATES > 1 ? 1
             : RF_VECTORS == 4 ||
                     (EMIT_STATES > 1 && (RF_VECTORS == 2 || RF_ROUND || RF_ENTRIES == RF_ENTRIES_MIXED))
                 ? 2
                 : 3, /* an SM, by registers */
    OWN = RF_BACKWARD_MOST_ROWS_CHUNK / BLOCK /* entries that a thread brings */
};
static_assert((int)AT_ONCE <= (int)RF_BACKWARD_ROWS_AT_ONCE, "as the host counts");
static_assert(!EMIT_ROWWISE || (int)AT_ONCE <= (int)LEAST_LANES, "a lane each, for its state");

#define NO_KEY (ENDS - 1) /* of no row: there are fewer */

/* The chunk of a block. Entry 0 is that before the chunk, and as many more follow it as are read at once. */
struct rows_chunk_t {
    rf_backward_entry *entries;
    float *factors;
    rf_u32 *found; /* rows of the launch that are found up to an entry, less one */
    float *parts;
    int size; /* entries that count */
    RF_INLINE RF_KEY key(int at) const { return entries[at + 1].key & ~ENDS; }
    RF_INLINE bool ends(int at) const { return (entries[at + 1].key & ENDS) != 0; }
};

RF_INLINE rows_chunk_t chunk_of(rf_u8 *memory, int size) {
    rows_chunk_t chunk;
    chunk.parts = (float *)memory; /* aligned best */
    chunk.entries = (rf_backward_entry *)(memory + 2 * BLOCK * 16 * RF_VECTORS);
    chunk.factors = (float *)(chunk.entries + size + 1 + RF_BACKWARD_ROWS_AT_ONCE);
    chunk.found = (rf_u32 *)(chunk.factors + size + RF_BACKWARD_ROWS_AT_ONCE);
    chunk.size = 0;
    return chunk;
}

/* An entry; one with NO_KEY where there is no memory for it. */
RF_INLINE rf_backward_entry entry_load(const rf_backward_rows_args &args, rf_i64 at) {
    rf_backward_entry entry = {NO_KEY, 0};
    if (at < 0 || at >= args.lookups) return entry;
    const auto found = rf_load((const rf_bytes<sizeof entry> *)(args.entries + at));
    memcpy(&entry, &found, sizeof entry);
    return entry;
}
RF_INLINE RF_KEY key_load(const rf_backward_rows_args &args, rf_i64 at) {
    return at < 0 || at >= args.lookups ? NO_KEY : rf_load(&args.entries[at].key);
}

/* Of a maximum, a lookup that its bag has had before: its columns are counted already. Equal lookups of a bag are
 * neighbours. */
RF_INLINE bool is_repeated(const rf_backward_rows_args &args, rf_i64 at, RF_KEY key, float factor,
                           RF_VALUE source) {
    if (RF_ENTRIES != RF_ENTRIES_MIXED || factor >= 0 || key_load(args, at - 1) != key) return false;
    const RF_VALUE other = rf_load(&args.entries[at - 1].value);
    return rf_load(args.sources + other) == source && rf_load(args.factors + other) == factor;
}

/* Nothing that is asked for here waits for something else but, where entries are not direct, for their values. */
RF_INLINE void chunk_load(const rf_backward_rows_args &args, rf_i64 first, rows_chunk_t &chunk) {
    const int thread = threadIdx.x;
    rf_backward_entry own[OWN];
    RF_KEY next[OWN], before = NO_KEY;
    if (thread == 0) before = key_load(args, first - 1);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int i = thread + k * BLOCK;
        if (i >= args.chunk) continue;
        own[k] = entry_load(args, first + i);
        next[k] = key_load(args, first + i + 1);
    }
    const rf_i64 count = rf_load(args.count) - first; /* beyond it entries are not written */
    chunk.size = (int)min(max(count, (rf_i64)0), (rf_i64)args.chunk);
    if (thread == 0) chunk.entries[0] = {before, 0};
    if (thread < AT_ONCE) { /* one of them is the next chunk's */
        if (thread > 0) chunk.entries[args.chunk + 1 + thread] = {NO_KEY, 0};
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) chunk.factors[args.chunk + thread] = 0;
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int i = thread + k * BLOCK;
        if (i >= args.chunk) continue;
        if (i + 1 >= count) next[k] = NO_KEY;
        if (i == args.chunk - 1) chunk.entries[i + 2] = {next[k], 0};
        const RF_KEY key = own[k].key;
        rf_backward_entry entry = {NO_KEY, 0};
        float factor = 0;
        if (i < chunk.size) {
            entry = {key != next[k] ? key | ENDS : key, own[k].value};
            if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
                factor = rf_load(args.factors + entry.value);
                entry.value = rf_load(args.sources + entry.value);
                if (is_repeated(args, first + i, key, factor, entry.value))
                    factor = -__int_as_float(0x7f800000); /* it adds nothing */
            }
        }
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) chunk.factors[i] = factor;
        chunk.entries[i + 1] = entry;
    }
    __syncthreads();
    if (EMIT_READS || args.bases == nullptr) return;
    /* Each warp counts all rows that begin before its entries: a chunk has few. */
    const int lane = thread % 32, warp = thread / 32, each = (args.chunk + BLOCK / 32 - 1) / (BLOCK / 32);
    rf_u32 rows = args.bases[blockIdx.x];
    for (int i = 0; i < min((warp + 1) * each, chunk.size); i += 32) {
        const int at = i + lane;
        const bool begins = at < chunk.size && chunk.key(at - 1) != chunk.key(at);
        const rf_u32 all = __ballot_sync(RF_FULL_WARP, begins);
        if (at < chunk.size && at >= warp * each && at < (warp + 1) * each)
            chunk.found[at] = rows + __popc(all & (0xffffffffu >> (31 - lane))) - 1;
        rows += __popc(all);
    }
    __syncthreads();
}

/* What a group works with, but for the place where it is. */
struct share_t {
    const rf_backward_rows_args &args;
    const rf_emit_t &emit;
    const rows_chunk_t &chunk;
    const groups_t &groups;
    const lane_t &lane;
    const rf_u8 *grad; /* the lane's column of element 0 */
};

/* The gradient of an entry is added to the sums of its row, and becomes them; `begins`: it is the first. */
RF_INLINE void entry_add(const share_t &share, const rf_backward_entry &entry, float factor, bool begins,
                         const four_t *sums, four_t *gradient) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        if (RF_ENTRIES == RF_ENTRIES_MIXED && factor < 0) {
            const rf_i64 *winners = nullptr;
            rf_i64 row = 0;
            if (!isinf(factor)) {
                const rf_backward_feature *feature = share.args.features + ((int)-factor - 1);
                row = (rf_i64)(entry.key & ~ENDS) - rf_load(&feature->first_row);
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
RF_INLINE float factor_of(const share_t &share, int at) {
    return RF_ENTRIES == RF_ENTRIES_DIRECT ? 1.0f : share.chunk.factors[at];
}

RF_INLINE void grad_load(const share_t &share, RF_VALUE element, bool there, four_t *gradient) {
    const rf_u8 *from = rf_place(share.grad, element, GRAD_BYTES);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        gradient[v] = four_load<RF_GRAD_DTYPE, true>(from + APART * v * GRAD_BYTES,
                                                     there ? readable_of(share.lane, v) : 0);
}

/* AT_ONCE entries from `at` on, of rows that end before `end`: what is behind it is read, and comes to nothing. `sums`: of
 * a row that began before; zeros where there is none. By whole warps, if RF_EMIT exchanges numbers. */
RF_INLINE void entries_pool(const share_t &share, int at, int end, four_t *sums) {
    const rf_backward_entry *const from = share.chunk.entries + 1 + (EMIT_ROWWISE ? min(at, end) : at);
    rf_backward_entry entries[AT_ONCE];
    ready_t<AT_ONCE> ready; /* sums are gradients before */
    if (EMIT_ROWWISE) {
        const int own = own_row<AT_ONCE>(share.groups);
        const RF_KEY key = from[own].key;
        ready.own = (key & ENDS) != 0 && at + own < end ? key : 0;
        ready.state = ready.own != 0 ? state_read(share.lane.states, key) : 1.0f;
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        entries[u] = from[u];
        grad_load(share, entries[u].value, true, ready.sums[u]);
        ready.keys[u] = entries[u].key;
        ready.emits[u] = (entries[u].key & ENDS) != 0 && at + u < end;
        if (ready.emits[u]) row_load(share.lane, entries[u].key, ready.ahead[u]);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        const int before = u > 0 ? u - 1 : 0;
        ready.found[u] =
            !EMIT_READS && share.args.bases != nullptr && ready.emits[u] ? share.chunk.found[at + u] : 0;
        entry_add(share, entries[u], factor_of(share, at + u), u > 0 && ready.emits[before],
                  u > 0 ? ready.sums[before] : sums, ready.sums[u]);
    }
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        sums[v] = ready.emits[AT_ONCE - 1] ? four_t{} : ready.sums[AT_ONCE - 1][v];
    rows_emit(share.args, share.emit, share.lane, share.groups, RF_FULL_WARP, ready);
}

/* Adds up entries from `at` on as long as they are of row `key`. Returns the first that is not, `behind` at most. */
RF_INLINE int run_pool(const share_t &share, int at, int behind, RF_KEY key, four_t *sums) {
    for (;;) {
        rf_backward_entry entries[RUN];
        four_t gradients[RUN][RF_VECTORS];
        bool own[RUN];
        int count = 0;
#pragma unroll
        for (int u = 0; u < RUN; u++) {
            entries[u] = {NO_KEY, 0};
            if (at + u < behind) entries[u] = share.chunk.entries[at + u + 1];
            own[u] = (entries[u].key & ~ENDS) == key;
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

/* Where a group leaves the sum of its first run (0), which began before its share, or its last one (1), which goes on. */
RF_INLINE float *part_of(const rows_chunk_t &chunk, const groups_t &groups, int which, int group, int v) {
    return chunk.parts + 4 * (((which * RF_VECTORS + v) * groups.count + group) * groups.lanes + groups.lane);
}
RF_INLINE void sums_leave(const share_t &share, int which, const four_t *sums) {
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        part_store(part_of(share.chunk, share.groups, which, share.groups.group, v), sums[v]);
}

/* A group's share: entries [first, behind) of one matrix, which may be none. Returns which sums it has left, a bit each. */
RF_INLINE int share_pool(const share_t &share, int first, int behind) {
    const rows_chunk_t &chunk = share.chunk;
    four_t sums[RF_VECTORS];
    int at = first, left = 0;
    bool goes_on = first < behind && chunk.key(first - 1) == chunk.key(first);
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        if (goes_on) {
            at = run_pool(share, at, behind, chunk.key(at), sums);
            sums_leave(share, which, sums);
            left |= 1 << which;
#pragma unroll
            for (int v = 0; v < RF_VECTORS; v++) sums[v] = four_t{};
        }
        if (which == 1) break;
        int end = behind; /* of rows that end in the share */
        while (end > at && !chunk.ends(end - 1)) end--;
        int next = at;
        while (EMIT_ROWWISE ? __any_sync(RF_FULL_WARP, next < end) : next < end) {
            entries_pool(share, next, end, sums);
            next += AT_ONCE;
        }
        at = max(at, end);
        goes_on = at < behind;
    }
    return left;
}

/* Entries [first, end) of the chunk are of a matrix, and shared out among the groups. */
struct segment_t {
    int first, end, share; /* entries a group */
};

/* Adds up the parts of the run that began in this group's share and goes on in others'; `start`: of the first run of the
 * chunk, which began before it, by group 0. */
RF_INLINE void run_join(const share_t &share, const segment_t &segment, int first, int behind, bool start) {
    const rows_chunk_t &chunk = share.chunk;
    const groups_t &groups = share.groups;
    const rf_backward_rows_args &args = share.args;
    const RF_KEY key = chunk.key(start ? first : behind - 1);
    ready_t<1> ready = {};
    four_t *const sums = ready.sums[0];
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, !start, groups.group, v), sums[v]);
    int at = behind, other = groups.group + 1;
    while (at < segment.end && chunk.key(at) == key) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++) part_add(part_of(chunk, groups, 0, other, v), sums[v]);
        at = min(at + segment.share, segment.end);
        other++;
    }
    if (!start && chunk.key(at) != key) {
        const bool listed = !EMIT_READS && args.bases != nullptr;
        row_ask(share.lane, key, ready);
        row_emit(args, share.emit, share.lane, groups, listed ? chunk.found[behind - 1] : 0, ready);
        return;
    }
    int block = (int)blockIdx.x;
    rf_forget(block);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        if (share.lane.valid[v] > 0)
            part_store(partial_of(args, block, !start, share.lane.column + APART * v), sums[v]);
}

/* Where the entries of a matrix end that begin at `first`; `next`: the first row of the next one. */
RF_INLINE int segment_end(const rows_chunk_t &chunk, int first, rf_i64 next) {
    int end = chunk.size, known = first; /* entries up to it are of the matrix */
    while (end - known > 1) {
        const int middle = (known + end) / 2;
        if ((rf_i64)chunk.key(middle) < next) {
            known = middle;
        } else {
            end = middle;
        }
    }
    return end;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK, BLOCKS)
    rf_backward_rows(const __grid_constant__ rf_backward_rows_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    const rf_emit_t emit = rf_emit_of(args.emit); /* older than the kernel before */
    rf_wait_for_previous_kernel();
    if (emit.skip) return;
    rows_chunk_t chunk = chunk_of(memory, args.chunk);
    chunk_load(args, (rf_i64)blockIdx.x * args.chunk, chunk);
    segment_t segment;
    for (segment.first = 0; segment.first < chunk.size; segment.first = segment.end) {
        const int number = args.n_matrices == 1 ? 0 : matrix_of(args, (rf_i64)chunk.key(segment.first));
        const groups_t groups = groups_of(args.matrices[number].dim);
        const lane_t lane = lane_of(args.matrices[number], groups);
        const rf_u8 *grad = args.grad + (rf_i64)lane.column * GRAD_BYTES;
        rf_keep(grad);
        const share_t share = {args, emit, chunk, groups, lane, grad};
        segment.end = number + 1 == args.n_matrices
                          ? chunk.size
                          : segment_end(chunk, segment.first, args.matrices[number + 1].first_row);
        const int each = (segment.end - segment.first + groups.count - 1) >> (BLOCK_BITS - groups.bits);
        segment.share = max(each, (int)AT_ONCE);
        int group = groups.group, first = segment.first + group * segment.share;
        const int left = share_pool(share, first, min(first + segment.share, segment.end));
        __syncthreads();
        rf_forget(group);
        first = segment.first + group * segment.share;
        const int behind = min(first + segment.share, segment.end);
        if (first == 0 && (left & 1) != 0) run_join(share, segment, first, behind, true);
        if ((left & 2) != 0) run_join(share, segment, first, behind, false);
        __syncthreads();
    }
}
