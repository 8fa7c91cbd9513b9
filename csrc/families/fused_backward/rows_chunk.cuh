/* The chunk of a block of rows.cu: its entries are loaded into shared memory, and the rows that end in it are
 * marked. Requires the constants of rows.cu. */
#ifndef RECFUSE_CUDA_BACKWARD_ROWS_CHUNK_CUH
#define RECFUSE_CUDA_BACKWARD_ROWS_CHUNK_CUH

#include "families/fused_backward/backward_pool.cuh"

#define NO_KEY (ROW_END - 1) /* the key of a missing entry */

/* The chunk of a block. Entry 0 is the last of the previous chunk. As many entries follow the chunk as are
 * read at once. */
struct rows_chunk_t {
    rf_backward_entry *entries;
    float *factors;
    rf_u32 *row_numbers; /* number of rows up to an entry, minus 1 */
    float *partials;
    int size; /* number of valid entries */
    RF_INLINE RF_KEY key(int at) const { return entries[at + 1].key & ~ROW_END; }
    RF_INLINE bool ends(int at) const { return (entries[at + 1].key & ROW_END) != 0; }
};

RF_INLINE rows_chunk_t chunk_of(rf_u8 *memory, int size) {
    rows_chunk_t chunk;
    chunk.partials = (float *)memory; /* first, for its alignment */
    chunk.entries = (rf_backward_entry *)(memory + 2 * BLOCK * 16 * RF_VECTORS);
    chunk.factors = (float *)(chunk.entries + size + 1 + RF_BACKWARD_ROWS_AT_ONCE);
    chunk.row_numbers = (rf_u32 *)(chunk.factors + size + RF_BACKWARD_ROWS_AT_ONCE);
    chunk.size = 0;
    return chunk;
}

/* Loads an entry; past the end the key is NO_KEY. */
RF_INLINE rf_backward_entry entry_load(const rf_backward_rows_args &args, rf_i64 at) {
    rf_backward_entry entry = {NO_KEY, 0};
    if (at < 0 || at >= args.lookups) return entry;
    const auto row_numbers = rf_load((const rf_bytes<sizeof entry> *)(args.entries + at));
    memcpy(&entry, &row_numbers, sizeof entry);
    return entry;
}
RF_INLINE RF_KEY key_load(const rf_backward_rows_args &args, rf_i64 at) {
    return at < 0 || at >= args.lookups ? NO_KEY : rf_load(&args.entries[at].key);
}

/* For a maximum: returns true if the bag had an equal lookup before, whose columns are already counted. Equal
 * lookups of a bag are adjacent. */
RF_INLINE bool is_repeated(const rf_backward_rows_args &args, rf_i64 at, RF_KEY key, float factor,
                           RF_VALUE source) {
    if (RF_ENTRIES != RF_ENTRIES_MIXED || factor >= 0 || key_load(args, at - 1) != key) return false;
    const RF_VALUE value_before = rf_load(&args.entries[at - 1].value);
    return rf_load(args.sources + value_before) == source && rf_load(args.factors + value_before) == factor;
}

/* These loads are independent, except that entries that are not direct depend on their values. */
RF_INLINE void chunk_load(const rf_backward_rows_args &args, rf_i64 first, rows_chunk_t &chunk) {
    const int thread = threadIdx.x;
    rf_backward_entry entries_loaded[ENTRIES_A_THREAD];
    RF_KEY next[ENTRIES_A_THREAD], previous = NO_KEY;
    if (thread == 0) previous = key_load(args, first - 1);
#pragma unroll
    for (int k = 0; k < ENTRIES_A_THREAD; k++) {
        const int i = thread + k * BLOCK;
        if (i >= args.chunk) continue;
        entries_loaded[k] = entry_load(args, first + i);
        next[k] = key_load(args, first + i + 1);
    }
    const rf_i64 count = rf_load(args.count) - first; /* entries past it are not written */
    chunk.size = (int)min(max(count, (rf_i64)0), (rf_i64)args.chunk);
    if (thread == 0) chunk.entries[0] = {previous, 0};
    if (thread < AT_ONCE) { /* one of them belongs to the next chunk */
        if (thread > 0) chunk.entries[args.chunk + 1 + thread] = {NO_KEY, 0};
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) chunk.factors[args.chunk + thread] = 0;
    }
#pragma unroll
    for (int k = 0; k < ENTRIES_A_THREAD; k++) {
        const int i = thread + k * BLOCK;
        if (i >= args.chunk) continue;
        if (i + 1 >= count) next[k] = NO_KEY;
        if (i == args.chunk - 1) chunk.entries[i + 2] = {next[k], 0};
        const RF_KEY key = entries_loaded[k].key;
        rf_backward_entry entry = {NO_KEY, 0};
        float factor = 0;
        if (i < chunk.size) {
            entry = {key != next[k] ? key | ROW_END : key, entries_loaded[k].value};
            if (RF_ENTRIES != RF_ENTRIES_DIRECT) {
                factor = rf_load(args.factors + entry.value);
                entry.value = rf_load(args.sources + entry.value);
                if (is_repeated(args, first + i, key, factor, entry.value))
                    factor = -__int_as_float(0x7f800000); /* contributes nothing */
            }
        }
        if (RF_ENTRIES != RF_ENTRIES_DIRECT) chunk.factors[i] = factor;
        chunk.entries[i + 1] = entry;
    }
    __syncthreads();
    if (EPILOGUE_READS || args.bases == nullptr) return;
    /* Each warp counts all rows that begin before its entries: a chunk has few. */
    const int lane = thread % 32, warp = thread / 32,
              entries_a_warp = (args.chunk + BLOCK / 32 - 1) / (BLOCK / 32);
    rf_u32 rows = args.bases[blockIdx.x];
    for (int i = 0; i < min((warp + 1) * entries_a_warp, chunk.size); i += 32) {
        const int at = i + lane;
        const bool is_begin = at < chunk.size && chunk.key(at - 1) != chunk.key(at);
        const rf_u32 begin_lanes = __ballot_sync(RF_FULL_WARP, is_begin);
        if (at < chunk.size && at >= warp * entries_a_warp && at < (warp + 1) * entries_a_warp)
            chunk.row_numbers[at] = rows + __popc(begin_lanes & (0xffffffffu >> (31 - lane))) - 1;
        rows += __popc(begin_lanes);
    }
    __syncthreads();
}

#endif
