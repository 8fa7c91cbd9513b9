/* The fused embedding bags on a GPU, for operators, tools and measure.c.
 *
 * The path of a call, from file to file. Each includes only files that come after it here;
 * tests/tools/test_lint.py has the table:
 *
 *   fused_embedding_bag.c   rf_fused_embedding_bag_cuda: checks, prepares, lowers, runs; fused.h
 *   fused_prepare.c               a call's descriptions, found or created (gpu/launches/description.h): its
 *   partition
 *   feature_table.c         and its features
 *   fused_lower.c                 launches of a batch
 *   partition/map_lower.c      the launch of partition/map.cu, which maps a batch whose offsets are on the
 *   device
 *   partition/traffic.c     bytes and operations of a launch
 *   partition/cut.c, write.c, check.c, cost.c
 *                           the assignment of work to blocks, on the host: tasks cut, written, checked
 *   fused_kernel.c                variants of kernels: options, shared memory
 *   schedule/                     schedules: defaults and limits of a feature; features with their schedules
 *   staged/staged.c         the tables that are staged in shared memory, and the SM of each
 *   geometry.c              vectors, lanes and slices of a feature's rows; limits (features.h)
 *   feature_rows.h          the rows of a feature's table
 *   fused_args.h, partition/fused_map_args.h  shared with kernels
 *
 * On the device: fused_embedding_bag.cu (pool/pool.cuh with indices.cuh, pool/pool_columns.cuh with
 * column_rows.cuh), partition/map.cu, staged/staged.cu (producer.cuh, ring.cuh); all include fused.cuh.
 */
#ifndef RECFUSE_CUDA_FUSED_H
#define RECFUSE_CUDA_FUSED_H

#include "families/fused_embedding_bag/fused_prepare.h"

/* rf_fused_embedding_bag_cuda, with rf__check_fused_rows if columns are not NULL. */
rf_status rf__fused_run_call(const rf_fused_embedding_bag_params *params, const int64_t *columns,
                             const rf_fused_plan *plan, void *workspace, int64_t workspace_bytes,
                             const rf_cuda_stream *stream);

/* Timing sets of schedules; see measure.c. */
typedef struct rf__fused_measurement {
    const rf_fused_embedding_bag_params *batches; /* [n_batches], of the same features and buffers */
    const void *const *host_offsets; /* [n_batches], each NULL or offsets on the host, to map by */
    int64_t n_batches;
    const rf_fused_schedule *schedules; /* [n_sets, n_features] */
    int64_t n_sets;
    int32_t warps;
    int64_t rounds;
} rf__fused_measurement;

/* Not timed: result [n_sets, rounds], seconds per batch, sets in turns, each with its own kernel. Timed:
 * result [n_sets, n_features], clock cycles of the blocks that worked on a feature, over all rounds and
 * batches, by one kernel that has the schedules of all sets. An untimed round comes first. Waits for the
 * device. */
RF__SHARED rf_status rf__fused_measure(const rf__fused_measurement *measurement, bool timed, double *result,
                                       const rf_cuda_stream *stream);

#endif
