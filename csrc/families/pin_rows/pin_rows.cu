/* Pinning: brings rows of a table into L2, marked to leave it last; or takes the mark away.
 *
 * weight: rows of row_bytes, row_pitch apart; hot_rows [n_hot_rows]. A thread asks for one line of 128 bytes,
 * `lines` threads for one row. A row that does not exist is reported and left out.
 * Launch: grid [ceil(n_hot_rows * lines / block)], block any.
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
