/* An optimizer's step on the rows of a row-sparse gradient, for steps deferred after the backward pass.
 *
 * Thread mapping. A group of lanes (columns / 4, at most 32) has a row, up to 128 columns at once. Rows
 * outside the matrix are skipped. Shared memory: none. Launch: grid [ceil(count / groups of a block)], block
 * [RF_BACKWARD_BLOCK].
 */
#define RF_VECTORS 1
#include "families/fused_backward/backward_pool.cuh"

/* Loads four columns of a row's gradient. Returns the number of valid columns. */
RF_INLINE int row_gradient(const rf_backward_row_sparse_args &args, const rf_epilogue_t &epilogue,
                           rf_i64 number, const rf_epilogue_address_t &address, int column,
                           rf_epilogue_values_t &values, four_t &gradient) {
    const int valid = min(args.matrix.dim - column, 4);
    const rf_u8 *from = args.sums + (number * args.matrix.dim + column) * GRAD_BYTES;
    gradient = four_load<RF_GRAD_DTYPE, true>(from, valid);
    rf_epilogue_load(rf_epilogue_offset(address, column), valid, values);
    if (!epilogue.plain) rf_epilogue_gradient(epilogue, values, gradient);
    return valid;
}

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_listed(const __grid_constant__ rf_backward_row_sparse_args args) {
    rf_wait_for_previous_kernel();
    const rf_epilogue_t epilogue = rf_epilogue_of(args.epilogue);
    const groups_t groups = groups_of(args.matrix.dim, 1); /* same number as on the host */
    const rf_i64 number = (rf_i64)blockIdx.x * groups.count + groups.group;
    if (epilogue.skip || number >= args.count) return;
    const rf_i64 row = rf_load(args.rows + number);
    if ((rf_u64)row >= (rf_u64)args.matrix.rows) return;
    const int first = 4 * groups.lane, step = 4 * groups.lanes;
    const rf_epilogue_address_t address = rf_epilogue_rows(args.matrix, 0, 0).address((rf_u64)row);
    rf_epilogue_values_t values;
    four_t gradient;
    float factor = 0;
    if (EPILOGUE_ROWWISE) {
        const float before = args.matrix.states[0][row];
        float squares = 0;
        for (int column = first; column < args.matrix.dim; column += step) {
            const int valid = row_gradient(args, epilogue, number, address, column, values, gradient);
            squares += rf_epilogue_squares(valid, gradient);
        }
        for (int apart = groups.lanes / 2; apart > 0; apart /= 2)
            squares += __shfl_xor_sync(groups.mask, squares, apart);
        __syncwarp(groups.mask); /* all lanes have read the state */
        const float state = rf_epilogue_row_state(before, squares, 1.0f / (float)args.matrix.dim);
        factor = rf_epilogue_row_factor(epilogue, state);
        if (groups.lane == 0) args.matrix.states[0][row] = state;
    }
    for (int column = first; column < args.matrix.dim; column += step) {
        const int valid = row_gradient(args, epilogue, number, address, column, values, gradient);
        rf_epilogue_store(epilogue, rf_epilogue_offset(address, column), row, column, valid, values, gradient,
                          factor);
    }
}
