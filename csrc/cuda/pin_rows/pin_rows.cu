/* Pinning: brings rows of a table into L2, marked to leave it last; or takes the mark away.
 *
 * weight: rows of row_bytes, row_pitch apart; hot_rows [n_hot_rows]. A thread asks for one line of 128 bytes,
 * `lines` threads for one row. A row that does not exist is reported and left out.
 * Launch: grid [ceil(n_hot_rows * lines / block)], block any.
 * Source: Jain et al., MICRO'24, section IV-C.
 */
#include "device/common.cuh"

#ifndef RF_INDEX
#define RF_INDEX rf_i64
#endif
#ifndef RF_KEEP
#define RF_KEEP 1
#endif

struct arguments {
    const rf_u8 *weight;
    const RF_INDEX *hot_rows;
    rf_i64 rows, row_bytes, row_pitch, n_hot_rows;
    rf_i64 lines; /* that a row may touch */
    rf_error_word errors;
};

extern "C" __global__ void rf_pin_rows(const __grid_constant__ arguments my) {
    rf_wait_for_previous_kernel();
    const rf_i64 thread = (rf_i64)blockIdx.x * blockDim.x + threadIdx.x;
    const rf_i64 which = thread / my.lines, line = thread % my.lines;
    if (which >= my.n_hot_rows) return;
    const rf_i64 row = rf_load(my.hot_rows + which);
    if ((rf_u64)row >= (rf_u64)my.rows) {
        if (line == 0)
            rf_report<RF_OPERATOR_pin_rows>(my.errors,
                                            {RF_ARGUMENT_rows, which, -1, row, my.rows, my.n_hot_rows});
        return;
    }
    const rf_u64 begin = (rf_u64)(my.weight + row * my.row_pitch), end = begin + my.row_bytes;
    const rf_u64 address = (begin & ~(rf_u64)127) + line * 128;
    if (address >= end) return;
    if (RF_KEEP) {
        asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
    } else {
        asm volatile("prefetch.global.L2::evict_normal [%0];" ::"l"(address));
    }
}
