/* Small features of few columns from lookups to rows in one launch: a block makes the list of a feature's rows in its shared memory
 * (lists.cu says how) and pools them from there (staged.cu says how), so that no list goes to memory, and lists of one feature
 * are made while rows of another are pooled on the same SM. That is worth it for row-wise Adagrad where features are many, each is a
 * block's work, and gradients leave room for a list. (SGD's threads have too few registers for both: two launches are faster.)
 *
 * A list that does not fit is made and pooled by as many rows at a time as there is room for. What cannot be listed by rows
 * (short_rows.cuh) is listed by parts in memory, and pooled from there, by the same block.
 *
 * A block: all rows and columns of a feature that is a sum (args.h: rf_small_whole_task). Shapes: rf_small_whole_args. Shared memory:
 * dynamic, the gradients of a task, then lists.shared_bytes. Launch: grid [tasks], block [RF_SMALL_THREADS].
 */
#define RF_STAGED 1
#define RF_STREAMED 0 /* rows lie close together */
#ifndef RF_EMIT
#define RF_EMIT (RF_ROWWISE_ADAGRAD + 1)
#endif
#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/small/args.h"

enum {
    BLOCK = RF_SMALL_THREADS(RF_STAGED, RF_EMIT),
    BLOCKS = 2, /* of an SM */
    WARPS = BLOCK / 32,
    MOST_COLUMNS = RF_SMALL_COLUMNS,
    QUADS = 2
};
#include "fused_embedding_bag/backward/small/parts.cuh"
#include "fused_embedding_bag/backward/small/pooled.cuh"

/* Rows [first, last) whose lists are in shared memory. */
struct kept_rows_t {
    rf_u32 ends; /* the address of a counter a row of the feature, which says where it ends, */
    rf_u32 from; /* less this, in */
    rf_u32 list; /* the address of the list of these rows */
    int row, first, last;

    RF_INLINE places_t places(int number) const {
        places_t found = {0, 0};
        if (number < last) {
            const rf_u32 at = ends + (rf_u32)number * 4;
            found.to = rf_shared_word(at) - from;
            if (number > first) found.from = rf_shared_word(at - 4) - from;
        }
        return found;
    }
    typedef rf_u32 quads_t;
    RF_INLINE quads_t quads_at(rf_u32 place) const {
        return list + (place & ~(AT_ONCE - 1u)) * (rf_u32)sizeof(rf_u16);
    }
    RF_INLINE quads_t quads_behind(quads_t quads) const { return quads + (rf_u32)sizeof(bags_t); }
    RF_INLINE bags_t quad(quads_t quads, int i) const {
        return rf_shared_load_8(quads + (rf_u32)i * (rf_u32)sizeof(bags_t));
    }
};
/* All rows of a feature whose lists the block has written to memory. */
struct written_rows_t {
    const rf_u32 *starts;
    const rf_u16 *list;
    int row, first, last;

    RF_INLINE places_t places(int number) const {
        places_t found = {0, 0};
        if (number < last) found = {starts[number], starts[number + 1]};
        return found;
    }
    typedef const bags_t *quads_t;
    RF_INLINE quads_t quads_at(rf_u32 place) const { return (quads_t)(list + (place & ~(AT_ONCE - 1u))); }
    RF_INLINE quads_t quads_behind(quads_t quads) const { return quads + 1; }
    RF_INLINE bags_t quad(quads_t quads, int i) const { return quads[i]; }
};

/* What else a block has in shared memory. */
struct parts_t {
    __align__(16) float of_rows[WARPS * MOST_COLUMNS];
    rf_u32 found[WARPS], of_warps[WARPS];
    long_rows_t many;
    unsigned long long bounds[2];
};

/* Asks for a row and its state, in L2: in registers there is no room for another. */
RF_INLINE void row_ask(const place_t &place, int number, const places_t &places) {
    if (!is_short(places)) return;
    rf_prefetch(row_place(place, number, 0).weight);
    if (place.lanes > 1) rf_prefetch(row_place(place, number, 1).weight); /* else it is in the same sector */
    rf_prefetch(state_of(place, number));
}

/* All rows. Each is asked for while the one before is worked on. */
template <class ROWS>
RF_INLINE void rows_pool(const rf_small_args &args, const rf_emit_t &emit, const place_t &place,
                         const ROWS &rows, parts_t &parts) {
    bool any_long = false;
    int number = rows.first + place.group;
    int left =
        rows.last - (rows.first + ((int)(threadIdx.x & ~31u) / place.lanes)); /* of the warp's first group */
    places_t places = rows.places(number);
#pragma unroll 1
    for (; left > 0; left -= place.groups) {
        const bool there = is_short(places);
        row_t row;
        row_load(place, number, there, row);
        const places_t next = rows.places(number + place.groups);
        row_ask(place, number + place.groups, next);
        sums_t sums = {};
        places_add(rows, place, places.from, there ? lookups_of(places) : 0, window_load(rows, places, there),
                   sums);
        row_emit(args, emit, place, number, there, rows.row + number, lookups_of(places), row, sums);
        any_long |= is_long(places);
        number += place.groups;
        places = next;
    }
    if (__syncthreads_or(any_long)) rows_pool_long(args, emit, place, rows, parts.found, parts.of_rows);
}

/* Rows of a span that is listed. Reads its task again, so that lists have the registers. */
RF_INLINE void span_pool(const rf_small_whole_args &args, const room_t &room, const span_t &span,
                         rf_u8 *memory, parts_t &parts) {
    rf_small_task task = args.tasks[blockIdx.x].rows;
    rf_forget(task.columns);
    const rf_emit_t emit = rf_emit_of(args.rows.emit);
    const place_t place = place_of(args.rows, task, args.rows.matrices[task.matrix], (float *)memory);
    const kept_rows_t rows = {rf_shared_kept(room.cells),
                              span.from,
                              rf_shared_kept(room.window),
                              (int)task.row,
                              (int)span.first,
                              (int)span.last};
    rows_pool(args.rows, emit, place, rows, parts);
}

/* Of a feature that is not listed by rows. */
RF_APART void pool_by_parts(const rf_small_whole_args &args, const feature_t feature, const block_t block,
                            rf_u8 *memory, parts_t &parts) {
    list_by_parts(args.lists, feature, block, memory + args.staged_bytes, parts.of_warps);
    rf_shared_copies_wait<0>();
    __syncthreads();
    const rf_small_task task = args.tasks[blockIdx.x].rows;
    const rf_emit_t emit = rf_emit_of(args.rows.emit);
    const place_t place = place_of(args.rows, task, args.rows.matrices[task.matrix], (float *)memory);
    const written_rows_t rows = {block.starts, block.list, (int)task.row, 0, (int)block.rows};
    rows_pool(args.rows, emit, place, rows, parts);
}

/* Lists all rows, as lists.cu does. Returns their lookups, or NO_PLACES where that is not done: many rows have many, or one more
 * than there is room for. */
RF_INLINE rf_u32 rows_list(const feature_t &feature, const room_t &room, const block_t &block,
                           parts_t &parts) {
    if (threadIdx.x == 0) parts.many.count = 0;
    counting_begin(feature, room, block, parts.of_warps);
    if (block.rows > FEW_ROWS) {
        short_rows_count(feature, room, 0, block.rows);
    } else {
        (void)rows_count(feature, room, 0, block.rows, nullptr);
    }
    __syncthreads();
    const rf_u32 all = rows_sum(room, block, 0, parts.of_warps, parts.many);
    if (all == NO_PLACES) return all;
    bool fits = true;
    for (rf_u32 i = 0; i < parts.many.count; i++) {
        const rf_u32 row = parts.many.row[i], to = row + 1 < block.rows ? room.cells[row + 1] : all;
        fits &= to - room.cells[row] <= room.window_size;
    }
    __syncthreads(); /* all have looked at cells that whoever lists by parts clears */
    return fits ? all : NO_PLACES;
}

/* Lists and pools all rows. Returns whether that is done. */
RF_INLINE bool pool_by_rows(const rf_small_whole_args &args, feature_t feature, room_t room,
                            const block_t &block, rf_u8 *memory, parts_t &parts) {
    if (!feature.sound || !room.near || feature.count > MOST_TURNS * room.window_size) return false;
    feature.sound = room.near = true; /* as the compiler knows from here on */
    const rf_u32 all = rows_list(feature, room, block, parts);
    if (all == NO_PLACES) return false;
    rf_shared_copies_wait<0>(); /* a barrier follows */
#pragma unroll 1
    for (rf_u32 next = 0; next < block.rows && all > 0;) {
        const span_t span = span_of(room, next, block.rows, all);
        __syncthreads(); /* all have seen where the span ends, and pooled the one before */
        span_list(feature, room, 0, span, parts.many, room.window - span.from, parts.of_warps);
        __syncthreads();
        span_pool(args, room, span, memory, parts);
        next = span.last;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
    rf_small_whole(const __grid_constant__ rf_small_whole_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    __shared__ parts_t parts;
    rf_wait_for_previous_kernel();
    if (rf_emit_of(args.rows.emit).skip) return;
    const rf_small_list listed = args.tasks[blockIdx.x].list;
    {
        const rf_small_task task = args.tasks[blockIdx.x].rows;
        const place_t place = place_of(args.rows, task, args.rows.matrices[task.matrix], (float *)memory);
        if (!grad_ask(args.rows.bags, task, place)) grad_stage(args.rows.bags, task, (float *)memory, place);
    }
    const feature_t feature = feature_of(args.lists, listed, parts.bounds);
    block_t block = {0, (rf_u32)listed.rows, true, nullptr, nullptr, nullptr};
    const room_t room =
        room_of(feature, memory + args.staged_bytes, args.lists.shared_bytes, (int)block.rows, true);
    if (pool_by_rows(args, feature, room, block, memory, parts)) return;
    block.starts = args.lists.starts + listed.start;
    block.list = args.lists.list;
    pool_by_parts(args, feature, block, memory, parts);
}
