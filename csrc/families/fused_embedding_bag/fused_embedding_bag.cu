/* Fused embedding bag: many tables of different shapes, each pooled by its own schedule, in one launch.
 *
 *   output[b, columns of f] = pool(table_f[indices[i]] for i in [offsets[f * bags + b], offsets[f * bags + b
 *   + 1]))
 *
 * Thread mapping. A block works on one task: some bags of one feature, by the schedule that the task names.
 * The partition assigns tasks to blocks at run time (partition/cut.c, partition/map.cu); heavy tasks come
 * first. A launch contains only the schedules of the list RF_SCHEDULES, one line each:
 *
 *   X(number, kind, dtype, align, store, lanes, vectors, whole, pooling, padded, threads, distance, split)
 *
 *   kind      RF_FUSED_CLASS_POOL (pool/pool.cuh) or _COLUMNS (pool/pool_columns.cuh)
 *   align     bytes of a vector that a lane loads; store: alignment of a vector in the output, in bytes
 *   lanes     that read a row, `vectors` times; wider rows are cut into slices
 *   whole     1: contiguous rows of lanes * align bytes; 0: any rows, described by the feature
 *   pooling   rf_pooling; `columns` has RF_MAX and 0 only, and the feature tells a sum from a mean
 *   threads   of a bag; distance: rows in flight a lane; split: blocks that share a bag
 *
 * Features that differ only in their number of rows, row width up to `lanes`, padding row or position share a
 * schedule.
 *
 * Shapes: those of rf_fused_args (fused_args.h). Shared memory, dynamic: RF_ROWS checked row indices a warp,
 * exchanged between its lanes, followed by the sums of the warps of a bag. fused_kernel.c computes its size.
 *
 * Launch: grid [tasks], block [RF_BLOCK]. Registers suffice for RF_MIN_BLOCKS blocks an SM; additional
 * dynamic shared memory lowers the occupancy further, to the value that the tuner chose.
 *
 * Source: Pan et al., RecFlex, SC'24: one schedule a feature (IV-B), branches of a block on it, mapping at
 * run time.
 */
#include "families/fused_embedding_bag/pool/pool_columns.cuh"
#include "families/fused_embedding_bag/pool/pool.cuh"

#ifndef RF_SCHEDULES
#define RF_SCHEDULES(X) \
    X(0, 0, 0, 16, 16, 8, 1, 1, 0, 0, 32, 8, 1) X(1, 1, 0, 16, 16, 1, 1, 0, 0, 0, 32, 1, 1)
#endif
#ifndef RF_MIN_BLOCKS
#define RF_MIN_BLOCKS 14
#endif
#ifndef RF_ROWS
#define RF_ROWS 512 /* the most row indices that a warp exchanges at once */
#endif
#ifndef RF_TIMED
#define RF_TIMED 0 /* adds the clock cycles of each block to those of its features */
#endif

/* Loads the data of a schedule inside its branch. The number in the text keeps the compiler from merging the
 * common loads of all branches, which would hold registers in each. */
template <int NUMBER, int KIND, int DTYPE, int ALIGN, int STORE, int LANES, int VECTORS, int WHOLE,
          int POOLING, int PADDED, int THREADS, int DISTANCE, int SPLIT>
RF_INLINE void run(const rf_fused_args &args, const rf_fused_task *at, const rf_guess &guess,
                   rf_row_number *shared) {
    rf_fused_task task = rf_load_task<NUMBER>(at);
    task.last_bag = min(task.last_bag, args.bags); /* a mapping may cover more bags */
    static_assert(KIND == RF_FUSED_CLASS_POOL || RF_WITH_STAGED ||
                      (1 + RF_WEIGHTED) * rf_column_rows::COUNT <= RF_ROWS,
                  "as fused_kernel.c counts them");
    rf_row_number *numbers = shared + threadIdx.x / 32 * RF_ROWS;
    if constexpr (KIND == RF_FUSED_CLASS_POOL) {
        typedef rf_fused_shape<DTYPE, ALIGN, STORE, LANES, VECTORS, WHOLE, POOLING, PADDED, THREADS, DISTANCE,
                               SPLIT>
            shape;
        static_assert(LANES == 1 || 32 / LANES * shape::BATCH <= RF_ROWS, "as fused_kernel.c counts them");
        float *partial_sums = (float *)(shared + RF_BLOCK / 32 * RF_ROWS);
        rf_wait_for_inputs();
        if (rf_can_pool<shape>(args, task)) rf_pool<shape>(args, task, numbers, partial_sums);
    } else {
        rf_pool_columns<rf_columns_shape<DTYPE, ALIGN, STORE, POOLING>>(args, task, guess,
                                                                        (rf_column_rows *)numbers);
    }
}

/* Returns true if a schedule works on tiles. */
RF_INLINE bool is_tiled(int schedule) {
    switch (schedule) {
#define RF_CASE(number, kind, ...) \
    case number:                   \
        return kind == RF_FUSED_CLASS_COLUMNS;
        RF_SCHEDULES(RF_CASE)
#undef RF_CASE
    }
    return false;
}

/* The first warp adds the block's cycles to its feature, or in equal shares to the features of its tile. */
RF_INLINE void add_cycles(const rf_fused_args &args, const rf_fused_task &task, rf_i64 since) {
    __syncthreads();
    const rf_u64 spent = clock64() - since;
    if (threadIdx.x >= 32) return;
    if (!is_tiled(task.schedule)) {
        if (threadIdx.x == 0) atomicAdd(args.cycles + task.feature, spent);
        return;
    }
    const int feature = args.lanes[(rf_i64)task.feature * 32 + threadIdx.x].feature;
    const rf_u32 present = __ballot_sync(RF_FULL_WARP, feature >= 0);
    if (feature >= 0) atomicAdd(args.cycles + feature, spent / __popc(present));
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK, RF_MIN_BLOCKS)
    rf_fused_embedding_bag(const __grid_constant__ rf_fused_args args) {
    extern __shared__ __align__(16)
        rf_row_number shared[]; /* row indices of each warp, then the sums of warps */
    const rf_i64 since = RF_TIMED ? clock64() : 0;
    /* Tasks that the host cut do not depend on previous kernels: they are read while those end. */
    if (RF_CALLERS_MAPPING || args.n_tasks != nullptr) rf_wait_for_inputs();
    if (args.n_tasks != nullptr && (int)blockIdx.x >= *(const volatile int *)args.n_tasks) return;
    const rf_fused_task *task = args.tasks + blockIdx.x;
    const rf_guess guess(args);
    switch (rf_load(&task->schedule)) {
#define RF_CASE(number, ...)                                 \
    case number:                                             \
        run<number, __VA_ARGS__>(args, task, guess, shared); \
        break;
        RF_SCHEDULES(RF_CASE)
#undef RF_CASE
    }
    if (RF_TIMED) add_cycles(args, rf_load_task<-1>(task), since);
    if (RF_WITH_STAGED && blockIdx.x == gridDim.x - 1) {
        /* The concurrent kernel writes the same output, and has waited for the previous kernels. */
        rf_begin_next_kernel();
        rf_wait_for_previous_kernel();
    }
}
