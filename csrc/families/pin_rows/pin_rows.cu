/* Pinning: prefetches rows of a table into L2 with the policy evict-last, or resets the policy.
 *
 * weight: rows of row_bytes with a pitch of row_pitch bytes; hot_rows [n_hot_rows]. A thread prefetches one
 * line of 128 bytes; `lines` threads prefetch a row. Invalid rows are reported and skipped.
 * Launch: grid [ceil(n_hot_rows * lines / block)], block of any size.
 * Source: Jain et al., MICRO'24, section IV-C.
 */

#ifndef RF_KEEP
#define RF_KEEP 1
#endif

#include "gpu/device/common.cuh"
#include "families/pin_rows/pin_rows_args.h"

extern "C" __global__ void rf_pin_rows(const __grid_constant__ rf_pin_rows_args args) {
    rf_wait_for_previous_kernel();
    const rf_i64 thread = (rf_i64)blockIdx.x * blockDim.x + threadIdx.x;
    const rf_i64 which = thread / args.lines, line = thread % args.lines;
    if (which >= args.n_hot_rows) return;
    const rf_i64 row = rf_load(args.hot_rows + which);
    if ((rf_u64)row >= (rf_u64)args.rows) {
        if (line == 0)
            rf_report<RF_OPERATOR_pin_rows>(args.errors,
                                            {RF_ARGUMENT_rows, which, -1, row, args.rows, args.n_hot_rows});
        return;
    }
    const rf_u64 begin = (rf_u64)(args.weight + row * args.row_pitch), end = begin + args.row_bytes;
    const rf_u64 address = (begin & ~(rf_u64)(RF_PIN_LINE_BYTES - 1)) + line * RF_PIN_LINE_BYTES;
    if (address >= end) return;
    if (RF_KEEP) {
        asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
    } else {
        asm volatile("prefetch.global.L2::evict_normal [%0];" ::"l"(address));
    }
}
