/* Embedding columns: from raw feature values to pooled rows of tables, all columns in one launch.
 *
 *   output[sample, columns of c] = scale_c * pool(table_c[index_c(value)] for the values that the sample has of c)
 *
 * Shapes: those of rf_columns_args and of the program's tasks (gpu/device/column_program.h).
 *
 * Who does what. A block has one task, some columns that are neighbours in the output or a part of a wide one, for
 * `samples` samples. It copies the task's body to shared memory: columns, steps, boundaries, words. Then, by the task's
 * kind:
 *   rows      samples have one index each. Threads look at values, each one of a column and of 4 samples, and leave the
 *             addresses of rows in shared memory; then a lane has one place of the output's row, a warp some samples, of
 *             which a lane has up to 8 rows in flight. Stores of a warp are up to 512 neighbouring bytes (rows.cuh).
 *   numbers   lanes have places as above, and look at their values themselves (rows.cuh).
 *   bags      one column. Threads list the rows of as many bags as there is room for, whatever their lengths; then groups
 *             of lanes pool a bag each. A long bag has all groups (columns_pool.cuh). These tasks come first.
 *
 * Why so: a thousand columns of 256 samples move 13 MB, 3 us at the speed of copies, and a value's way is longer than
 * that if nothing overlaps: task -> body -> value -> row, four loads from L2 or memory one after another, 2 us. So what
 * does not depend on values is one load behind the task, boundaries included; searching is in shared memory, or by
 * arithmetic where boundaries lie evenly; and all of a launch's blocks run at once: at 6 blocks of 128 threads an SM (5
 * with tasks of bags), 132 SMs have 792, of which 1,000 columns of 8 elements take 504. Rows in flight of 4 blocks: 4 * 4
 * warps * 8 * 512 bytes = 64 KB an SM, where 40 KB keep its memory busy. Pointers are in the parameters, so nothing is
 * copied ahead of a call.
 *
 * Results do not depend on the order of threads: sums are of lanes, slots and groups in a fixed order.
 *
 * Shared memory, dynamic: the longest body, and behind it addresses [columns][samples + 1] or rf_column_bags.
 * Launch: grid [bag_tasks * bag_tiles + other tasks * tiles], block [BLOCK].
 *
 * Source: Pan et al., RECom, ASPLOS'23: one kernel for all columns, sections 3 and 5.
 */
#include "families/embedding_columns/columns_pool.cuh"
#include "families/embedding_columns/rows.cuh"

#ifndef RF_BAGS
#define RF_BAGS 1 /* some tasks are of bags */
#endif
#ifndef RF_MIN_BLOCKS
#define RF_MIN_BLOCKS (RF_BAGS ? 5 : 6)
#endif

extern "C" __global__ void __launch_bounds__(RF_COLUMNS_BLOCK, RF_MIN_BLOCKS)
    rf_embedding_columns(const __grid_constant__ rf_columns_args args) {
    extern __shared__ __align__(16) rf_u8 memory[];
    rf_wait_for_previous_kernel();
    const rf_column_work work = rf_column_work_of(args, memory);
    rf_u8 *left = memory + sizeof(rf_columns_task) + work.task().words * sizeof(rf_i64);
    if (RF_BAGS && work.task().kind == RF_COLUMNS_BAGS)
        rf_column_bags_pooled(args, work, *(rf_column_bags *)left);
    else if (work.task().kind == RF_COLUMNS_ROWS)
        rf_column_rows(args, work, left);
    else
        rf_column_numbers(args, work);
}
