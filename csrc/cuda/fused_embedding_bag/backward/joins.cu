/* Runs of equal keys that go over the border of chunks: the parts that rows.cu left are added up, and the row is emitted.
 *
 * A block: the run, if there is one, that begins in its chunk and goes on in the next; groups of lanes as in rows.cu add up
 * the parts of neighbouring chunks each, then the first group the groups'. Shared memory: static.
 * Launch: grid [chunks, slices], block [RF_BACKWARD_BLOCK].
 */
#include "fused_embedding_bag/backward/pool.cuh"

extern "C" __global__ void __launch_bounds__(RF_BACKWARD_BLOCK)
    rf_backward_joins(const __grid_constant__ rf_backward_rows_args args) {
    __shared__ __align__(16) float parts[BLOCK * 4 * RF_VECTORS];
    rf_wait_for_previous_kernel();
    const rf_i64 count = count_of(args), chunk = blockIdx.x;
    const rf_i64 first = chunk * args.chunk, behind = first + args.chunk;
    if (behind >= count) return;
    const RF_KEY key = args.keys[behind];
    if ((rf_i64)key >= args.trash || args.keys[behind - 1] != key) return;
    if (first > 0 && args.keys[first - 1] == key) return; /* it began earlier */
    const rf_emit_t emit = rf_emit_of(args.emit);
    if (emit.skip) return;
    /* The chunks that the run goes on in: each begins with it. */
    int others = 0;
    for (int more = BLOCK; more == BLOCK;) {
        const rf_i64 at = (chunk + 1 + others + (int)threadIdx.x) * args.chunk;
        more = __syncthreads_count(at < count && args.keys[at] == key);
        others += more;
    }
    const rf_backward_matrix &matrix = args.matrices[matrix_of(args, (rf_i64)key)];
    const groups_t groups = groups_of(matrix.dim);
    const int share = (others + groups.count - 1) / groups.count;
    four_t sums[RF_VECTORS] = {};
    for (int i = groups.group * share; i < min((groups.group + 1) * share, others); i++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++)
            if (valid_of(groups, v) > 0)
                part_add(partial_of(args, chunk + 1 + i, 0, column_of(groups, v)), sums[v]);
    }
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++)
        part_store(parts + 4 * ((v * groups.count + groups.group) * groups.lanes + groups.lane), sums[v]);
    __syncthreads();
    if (groups.group != 0) return;
    row_t row;
    row_load(matrix, groups, (rf_i64)key, row);
#pragma unroll
    for (int v = 0; v < RF_VECTORS; v++) {
        sums[v] = four_t{};
        if (valid_of(groups, v) > 0) part_add(partial_of(args, chunk, 1, column_of(groups, v)), sums[v]);
    }
    for (int group = 0; group < groups.count && group * share < others; group++) {
#pragma unroll
        for (int v = 0; v < RF_VECTORS; v++)
            part_add(parts + 4 * ((v * groups.count + group) * groups.lanes + groups.lane), sums[v]);
    }
    row_emit(args, emit, matrix, groups, (rf_i64)key, args.bases != nullptr ? args.bases[chunk + 1] - 1 : 0,
             row, sums);
}
