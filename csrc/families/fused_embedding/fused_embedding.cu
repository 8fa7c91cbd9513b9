/* Lookups of many features without pooling: copies the row of each lookup to its slot of the output.
 *
 * indices [lookups], offsets [features * bags + 1]. Slot s of feature f is output_offset + s * output_pitch,
 * for all layouts. RF_LAYOUT jagged: a slot is a lookup of the call, whose feature a search in the offsets
 * finds. Joined, padded: blockIdx.y is the feature; a padded slot is a position of a bag.
 *
 * A warp has 32 consecutive slots. Each lane finds the row of one of them. The warp then copies the rows, a
 * run of slots of one feature after another: `lanes` lanes share a row and move a vector each, so that a warp
 * reads 32 / lanes rows at once, and RF_FLIGHT times as many are in flight. Rows that need another dtype are
 * converted element by element. A lookup with an invalid index is reported and gives zeros. Each offset is
 * checked by one thread of the grid.
 *
 * No shared memory. Launch: grid [ceil(slots / RF_EMBEDDING_BLOCK), features or 1], block
 * [RF_EMBEDDING_BLOCK].
 */
#ifndef RF_LAYOUT
#define RF_LAYOUT 0
#endif
#ifndef RF_FLIGHT
#define RF_FLIGHT 8
#endif

#include "families/fused_embedding/fused_embedding_args.h"
#include "gpu/device/element.cuh"

enum { NO_ROW = -1, FILL_ROW = -2, FLIGHT = RF_FLIGHT, WARPS = RF_EMBEDDING_BLOCK / 32 };

typedef rf_fused_embedding_args args_t;

RF_INLINE rf_i64 offset_of(const args_t &args, rf_i64 at) { return (rf_i64)rf_load(args.offsets + at); }

/* Reports offset `at` if it is invalid. */
RF_INLINE void offset_check(const args_t &args, rf_i64 at) {
    const rf_i64 offset = offset_of(args, at), previous = at > 0 ? offset_of(args, at - 1) : 0;
    const rf_i64 previous_bag = at > 0 ? at - 1 : 0,
                 feature = at / args.bags; /* ends: the bag that ends there */
    rf_i64 expected = offset;
    if (RF_LAYOUT == RF_HISTORY_JOINED) expected = feature * args.slots + offset_of(args, at % args.bags);
    if (RF_LAYOUT == RF_HISTORY_JAGGED && args.sized && at % args.bags == 0)
        expected = feature < args.n_features ? args.features[feature].first_lookup : args.lookups;
    const bool is_bad = offset < previous || offset > args.lookups || (at == 0 && offset != 0);
    if (!is_bad && offset == expected) return;
    const rf_offender offender = {is_bad ? RF_ARGUMENT_offsets : RF_ARGUMENT_history_offsets,
                                  at,
                                  previous_bag % args.bags,
                                  offset,
                                  is_bad ? previous : expected,
                                  is_bad ? args.lookups : expected};
    rf_report<RF_OPERATOR_fused_embedding>(args.errors, offender, (int)(previous_bag / args.bags));
}

/* Returns the last of [first, last] whose begin is at or before `position`, else the first. */
template <class BEGIN> RF_INLINE rf_i64 search(rf_i64 first, rf_i64 last, rf_i64 position, BEGIN begin) {
    while (first < last) {
        const rf_i64 middle = last - (last - first) / 2;
        if (begin(middle) <= position) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    return first;
}

RF_INLINE int feature_of(const args_t &args, rf_i64 slot) {
    if (RF_LAYOUT != RF_HISTORY_JAGGED) return (int)blockIdx.y;
    return (int)search(0, args.n_features - 1, slot, [&](rf_i64 feature) {
        return args.sized ? args.features[feature].first_lookup : offset_of(args, feature * args.bags);
    });
}

/* Returns the lookup of a slot; -1: the slot has none. */
RF_INLINE rf_i64 lookup_of(const args_t &args, int feature, rf_i64 slot) {
    if (RF_LAYOUT == RF_HISTORY_JOINED) return feature * args.slots + slot;
    if (RF_LAYOUT == RF_HISTORY_JAGGED)
        return args.sized || slot < offset_of(args, args.n_features * args.bags) ? slot : -1;
    const rf_i64 bag = slot / args.length, position = slot - bag * args.length;
    const rf_i64 from = offset_of(args, feature * args.bags + bag);
    const rf_i64 to = offset_of(args, feature * args.bags + bag + 1);
    const bool is_bag = from >= 0 && to <= args.lookups && from <= to;
    return is_bag && position < to - from ? from + position : -1;
}

RF_INLINE void index_report(const args_t &args, int feature, rf_i64 lookup, rf_i64 index, rf_i64 rows) {
    const rf_i64 first = feature * args.bags;
    const rf_i64 bag =
        search(first, first + args.bags - 1, lookup, [&](rf_i64 at) { return offset_of(args, at); });
    rf_report<RF_OPERATOR_fused_embedding>(
        args.errors,
        {RF_ARGUMENT_history, lookup - offset_of(args, bag), bag - first, index, rows, args.lookups},
        feature);
}

/* Returns the row of a slot: an index, NO_ROW for zeros, or FILL_ROW. */
RF_INLINE rf_i64 row_of(const args_t &args, int feature, rf_i64 slot) {
    const rf_embedding_feature &table = args.features[feature];
    const rf_i64 lookup = lookup_of(args, feature, slot);
    rf_i64 row = lookup < 0 ? (rf_i64)FILL_ROW : (rf_i64)rf_load(args.indices + lookup);
    if (lookup >= 0 && (rf_u64)row >= (rf_u64)table.rows) {
        if (args.check) index_report(args, feature, lookup, row, table.rows);
        row = NO_ROW;
    }
    if (args.rows != nullptr) {
        rf_i64 *to = args.rows + (RF_LAYOUT == RF_HISTORY_JAGGED ? slot : feature * args.slots + slot);
        *to = row < 0 || row == table.padding_idx ? -1 : table.first_row + row;
    }
    return row;
}

/* The rows of slots [first, end) of a warp: lane i has row and slot i. */
struct run_t {
    rf_i64 row, slot;
    int first, end;
};

/* Calls copy(row, output) for vector or element `at` of each row of a run, FLIGHT at a time. VALUE: its type;
 * load(row, at) returns it, store(output, at, value) writes it. */
template <class VALUE, class LOAD, class STORE>
RF_INLINE void run_copy(const args_t &args, const rf_embedding_feature &table, const run_t &run, int columns,
                        LOAD load, STORE store) {
    const int lane = threadIdx.x % 32, lanes = table.lanes, group = lane / lanes, groups = 32 / lanes;
    rf_u8 *output = args.output + table.output_offset;
    for (int column = 0; column < columns; column += lanes) {
        const int at = column + lane % lanes;
        for (int next = run.first; next < run.end; next += groups * FLIGHT) {
            VALUE value[FLIGHT];
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) {
                const int source = next + k * groups + group;
                const rf_i64 row = __shfl_sync(RF_FULL_WARP, run.row, source % 32);
                value[k] = load(row, at, source < run.end && at < columns);
            }
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) {
                const int source = next + k * groups + group;
                const rf_i64 slot = __shfl_sync(RF_FULL_WARP, run.slot, source % 32);
                if (source < run.end && at < columns) store(output + slot * table.output_pitch, at, value[k]);
            }
        }
    }
}

template <int BYTES>
RF_INLINE void vectors_copy(const args_t &args, const rf_embedding_feature &table, const rf_u8 *fill,
                            const run_t &run) {
    typedef rf_bytes<BYTES> vector_t;
    run_copy<vector_t>(
        args, table, run, (int)table.pitch / BYTES,
        [&](rf_i64 row, int at, bool is_inside) {
            const rf_u8 *from = row >= 0 ? table.weight + row * table.pitch : fill;
            const bool has_row = row >= 0 || (row == FILL_ROW && fill != nullptr);
            return rf_load_if(is_inside && has_row ? 0 : -1, (const vector_t *)from + at);
        },
        [](rf_u8 *output, int at, const vector_t &value) { ((vector_t *)output)[at] = value; });
}

RF_INLINE float number_load(const rf_u8 *row, int dtype, int at, bool has_row) {
    const int zero_mask = has_row ? 0 : -1;
    if (dtype == RF_FLOAT32)
        return rf_element<RF_FLOAT32>::get(rf_load_if(zero_mask, (const rf_bytes<4> *)row + at), 0);
    const rf_bytes<2> bits = rf_load_if(zero_mask, (const rf_bytes<2> *)row + at);
    return dtype == RF_FLOAT16 ? rf_element<RF_FLOAT16>::get(bits, 0) : rf_element<RF_BFLOAT16>::get(bits, 0);
}

RF_INLINE void number_store(rf_u8 *row, int dtype, int at, float number) {
    if (dtype == RF_FLOAT32) {
        ((float *)row)[at] = number;
    } else {
        ((rf_u16 *)row)[at] = dtype == RF_FLOAT16 ? rf_float16_of(number) : rf_bfloat16_of(number);
    }
}

RF_INLINE void elements_copy(const args_t &args, const rf_embedding_feature &table, const rf_u8 *fill,
                             const run_t &run) {
    run_copy<float>(
        args, table, run, table.dim,
        [&](rf_i64 row, int at, bool is_inside) {
            const bool has_row = row >= 0 || (row == FILL_ROW && fill != nullptr);
            return number_load(row >= 0 ? table.weight + row * table.pitch : fill,
                               row >= 0 ? table.dtype : args.output_dtype, at, is_inside && has_row);
        },
        [&](rf_u8 *output, int at, float number) { number_store(output, args.output_dtype, at, number); });
}

RF_INLINE void rows_copy(const args_t &args, int feature, const run_t &run) {
    const rf_embedding_feature &table = args.features[feature];
    /* The output offset of a padded feature is that of its columns, which the fill row has too. */
    const rf_u8 *fill = args.fill == nullptr ? nullptr : args.fill + table.output_offset;
    switch (table.vector) {
    case 16:
        return vectors_copy<16>(args, table, fill, run);
    case 8:
        return vectors_copy<8>(args, table, fill, run);
    case 4:
        return vectors_copy<4>(args, table, fill, run);
    case 2:
        return vectors_copy<2>(args, table, fill, run);
    default:
        return elements_copy(args, table, fill, run);
    }
}

extern "C" __global__ void __launch_bounds__(RF_EMBEDDING_BLOCK, 3)
    rf_fused_embedding(const __grid_constant__ rf_fused_embedding_args args) {
    rf_wait_for_previous_kernel();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const rf_i64 block = (rf_i64)blockIdx.y * gridDim.x + blockIdx.x;
    const rf_i64 threads = (rf_i64)gridDim.x * gridDim.y * RF_EMBEDDING_BLOCK;
    if (args.check)
        for (rf_i64 at = block * RF_EMBEDDING_BLOCK + threadIdx.x; at <= args.n_features * args.bags;
             at += threads)
            offset_check(args, at);
    const rf_i64 first = ((rf_i64)blockIdx.x * WARPS + warp) * 32;
    if (first >= args.slots) return;
    run_t run = {NO_ROW, first + lane, 0, 0};
    int feature = -1;
    if (run.slot < args.slots) {
        feature = feature_of(args, run.slot);
        run.row = row_of(args, feature, run.slot);
    }
    /* Invalid offsets may give features in any order, so a run ends where the feature changes. */
    for (rf_u32 pending_lanes = __ballot_sync(RF_FULL_WARP, feature >= 0); pending_lanes != 0;) {
        run.first = __ffs(pending_lanes) - 1;
        const int number = __shfl_sync(RF_FULL_WARP, feature, run.first);
        const rf_u32 lanes_after = __ballot_sync(RF_FULL_WARP, feature != number && lane > run.first);
        run.end = lanes_after != 0 ? __ffs(lanes_after) - 1 : 32;
        pending_lanes = run.end < 32 ? pending_lanes >> run.end << run.end : 0;
        rows_copy(args, number, run);
    }
}
