/* Which lookups count, and in which bag (base/bag_lookups.h).
 *
 * Blocks 0 ... position_blocks - 1: a thread a lookup, which finds its bag among the offsets by bisection. The
 * blocks behind them: a warp a bag, which counts. Nothing is written twice and nothing left out, whatever
 * the offsets hold: where they do not rise, bisection ends at some bag, and it is asked whether it holds the lookup.
 * Launch: grid [position_blocks + ceil(bags / (RF_BLOCK / 32))], block [RF_BLOCK].
 */

#ifndef RF_BLOCK
#define RF_BLOCK 256
#endif

#include "bag_lookups/args.h"
#include "device/common.cuh"

/* The lookups of a bag; none where its offsets are bad. */
struct bag_range {
    rf_i64 begin, end;
};

RF_INLINE bag_range range_of(const rf_bag_lookups_args &args, rf_i64 bag) {
    const rf_i64 begin = rf_load(args.offsets + bag);
    const rf_i64 end = bag + 1 < args.n_offsets ? (rf_i64)rf_load(args.offsets + bag + 1) : args.lookups;
    if (begin < 0 || end < begin || end > args.lookups || (bag == 0 && begin != 0)) return {0, 0};
    return {begin, end};
}

RF_INLINE bool counts(const rf_bag_lookups_args &args, rf_i64 index) {
    return (rf_u64)index < (rf_u64)args.rows && index != args.padding_idx;
}

/* The last bag that begins at `position` or before; 0 where none does. */
RF_INLINE rf_i64 bag_at(const rf_bag_lookups_args &args, rf_i64 position) {
    rf_i64 first = 0, behind = args.bags;
    while (behind - first > 1) {
        const rf_i64 middle = first + (behind - first) / 2;
        if (rf_load(args.offsets + middle) <= position) {
            first = middle;
        } else {
            behind = middle;
        }
    }
    return first;
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK)
    rf_bag_lookups(const __grid_constant__ rf_bag_lookups_args args) {
    rf_wait_for_previous_kernel();
    if (blockIdx.x < args.position_blocks) {
        const rf_i64 position = (rf_i64)blockIdx.x * RF_BLOCK + threadIdx.x;
        if (position >= args.lookups) return;
        const rf_i64 bag = bag_at(args, position), index = rf_load(args.indices + position);
        const bag_range range = range_of(args, bag);
        const bool used = position >= range.begin && position < range.end && counts(args, index);
        args.row[position] = used ? index : args.rows;
        args.bag_of[position] = used ? bag : 0;
        return;
    }
    const rf_i64 bag = (blockIdx.x - args.position_blocks) * (RF_BLOCK / 32) + threadIdx.x / 32;
    if (bag >= args.bags) return;
    const bag_range range = range_of(args, bag);
    rf_i64 size = 0;
    for (rf_i64 i = range.begin + threadIdx.x % 32; i < range.end; i += 32) {
        size += counts(args, rf_load(args.indices + i));
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) size += __shfl_xor_sync(RF_FULL_WARP, size, apart);
    if (threadIdx.x % 32 == 0) args.sizes[bag] = size > 0 ? size : 1;
}
