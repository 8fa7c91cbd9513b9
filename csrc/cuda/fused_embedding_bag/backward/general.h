/* The general path of the backward: entries of all lookups, sorted by row, pooled row by row. */
#ifndef RECFUSE_CUDA_BACKWARD_GENERAL_H
#define RECFUSE_CUDA_BACKWARD_GENERAL_H

#include "cuda/fused_embedding_bag/backward/backward.h"

/* Sizes, and where the parts of the workspace are; 0: there is no such part. */
typedef struct rf__backward_layout {
    rf__backward_variant variant;
    rf_backward_segments segments;
    int64_t lookups, slots, trash;
    int32_t passes, chunks; /* of the sort */
    int32_t tile, tiles, parts, part_blocks; /* of group.cu: entries of a tile; how many there are, at most */
    int32_t rows_chunk, rows_chunks, slices, pitch;
    int64_t entries[2], sources, factors, bag_factors, partials, bases, count;
    int64_t sums; /* of the sort: lengths, totals, digits */
    int64_t places;
    int64_t begins, part_list, part_counts; /* of groups */
    int64_t bytes;
} rf__backward_layout;

/* The workspace's parts begin behind `room` bytes, more than 0, that another has of it. RF_ERR_UNSUPPORTED: too much. */
rf_status rf__backward_layout_of(const char *operator_name, const rf__backward_problem *problem,
                                 const rf__backward_features *described, const rf__cuda_device *device,
                                 int64_t room, rf__backward_layout *to);

/* Puts the work into the stream, in the device's context; `features`: their descriptions on the device. */
rf_status rf__backward_general_launch(const rf__backward_problem *problem, const rf__backward_layout *sizes,
                                      const rf__cuda_store *store, uint64_t workspace, uint64_t features);

#endif
