/* Embedding columns: from raw feature values to pooled rows of tables, all columns in one launch.
 *
 *   output[sample, columns of c] = scale_c * pool(table_c[index_c(value)] for the values of c in the sample)
 *
 * Shapes: those of rf_columns_args and of the program's tasks (families/embedding_columns/device/column_program.h).
 *
 * Thread mapping. A block has one task (some columns that are adjacent in the output, or a part of a wide
 * column) for `samples` samples. It copies the task's body to shared memory: columns, steps, boundaries,
 * words. The rest depends on the kind of the task:
 *   rows      each sample has one index. A thread computes the rows of one column and 4 samples and stores
 *             their addresses in shared memory. Then a lane has one position in the output's row and a warp
 *             some samples, with up to 8 rows in flight per lane. The stores of a warp cover up to 512
 *             consecutive bytes (rows.cuh).
 *   numbers   lanes have positions as above and compute their values themselves (rows.cuh).
 *   bags      one column. Threads list the rows of as many bags as fit, of any lengths; then groups of lanes
 *             pool a bag each. All groups share a long bag (columns_pool.cuh). These tasks come first.
 *
 * Design. A thousand columns of 256 samples move 13 MB: 3 us at the speed of a copy. A value takes nearly as
 * long, because task -> body -> value -> row are four dependent loads from L2 or memory: 2 us. So all data
 * that do not depend on values, boundaries included, are one load after the task; searches run in shared
 * memory, or by arithmetic if the boundaries are equidistant; and all blocks of a launch run at once: at 6
 * blocks of 128 threads an SM (5 with tasks of bags), 132 SMs hold 792 blocks, and 1,000 columns of 8
 * elements need 504. Rows in flight of 4 blocks: 4 * 4 warps * 8 * 512 bytes = 64 KB an SM; 40 KB saturate
 * its memory bandwidth. Pointers are kernel parameters, so a call copies nothing before the launch.
 *
 * Results do not depend on the order of threads: sums over lanes, slots and groups have a fixed order.
 *
 * Shared memory, dynamic: the longest body, followed by addresses [columns][samples + 1] or rf_column_bags.
 * Launch: grid [bag_tasks * bag_tiles + other tasks * tiles], block [BLOCK].
 *
 * Source: Pan et al., RECom, ASPLOS'23: one kernel for all columns, sections 3 and 5.
 */
#include "families/embedding_columns/columns_pool.cuh"
#include "families/embedding_columns/rows.cuh"

#ifndef RF_BAGS
#define RF_BAGS 1 /* some tasks are of kind `bags` */
#endif
#ifndef RF_MIN_BLOCKS
#define RF_MIN_BLOCKS (RF_BAGS ? 5 : 6)
#endif

extern "C" __global__ void __launch_bounds__(RF_COLUMNS_BLOCK, RF_MIN_BLOCKS)
    rf_embedding_columns(const __grid_constant__ rf_columns_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    rf_wait_for_previous_kernel();
    const rf_column_work work = rf_column_work_of(args, memory);
    rf_u8 *scratch = memory + sizeof(rf_columns_task) + work.task().words * sizeof(rf_i64);
    if (RF_BAGS && work.task().kind == RF_COLUMNS_BAGS)
        rf_column_bags_pooled(args, work, *(rf_column_bags *)scratch);
    else if (work.task().kind == RF_COLUMNS_ROWS)
        rf_column_rows(args, work, scratch);
    else
        rf_column_numbers(args, work);
}
