/* Timing sets of schedules of a fused call; see measure.c. */
#ifndef RECFUSE_CUDA_FUSED_MEASURE_H
#define RECFUSE_CUDA_FUSED_MEASURE_H

#include "base/status.h"

typedef struct rf__fused_measurement {
    const rf_fused_embedding_bag_params *batches; /* [n_batches], of the same features and buffers */
    const void *const *host_offsets; /* [n_batches], each NULL or offsets on the host, to map by */
    int64_t n_batches;
    const rf_fused_schedule *schedules; /* [n_sets, n_features] */
    int64_t n_sets;
    int32_t warps;
    int64_t rounds;
} rf__fused_measurement;

/* Not timed: result [n_sets, rounds], seconds a batch, sets in turns, each with a kernel of its own. Timed: result
 * [n_sets, n_features], clock cycles of the blocks that worked on a feature, over all rounds and batches, by one
 * kernel that has the schedules of all sets. An untimed round comes first. Waits for the device. */
RF__SHARED rf_status rf__fused_measure(const rf__fused_measurement *work, bool timed, double *result,
                                       const rf_cuda_stream *stream);

#endif
