/* Schedules of the embedding bag: defaults of open fields, and the limits of a kernel. */
#ifndef RECFUSE_CUDA_EMBEDDING_BAG_SCHEDULE_H
#define RECFUSE_CUDA_EMBEDDING_BAG_SCHEDULE_H

#include "core/row_format.h"
#include "core/status.h"

/* The inputs of a default schedule. */
typedef struct rf__bag_shape {
    int32_t sms;          /* of the GPU */
    int64_t l2_bytes;
    rf__row_format row;
    int32_t alignment;    /* bytes a lane loads at once: 2, 4, 8 or 16; divides the bytes of rows */
    int64_t output_pitch; /* bytes */
    int64_t table_bytes;
    int64_t lookups, bags;
    bool has_state; /* not a plain sum: weights, padding, mean or max take registers too */
    bool may_be_short; /* short_bags.cu has it: no weights, not max, positions of 32 bits */
} rf__bag_shape;

/* Lanes that read one row, and the vectors that each of them takes (of a slice of the row). */
int32_t rf__bag_lanes(const rf__bag_shape *shape);
int32_t rf__bag_vectors(const rf__bag_shape *shape);
/* Slices that a wide row is cut into. */
int64_t rf__bag_slices(const rf__bag_shape *shape);

/* Neighbouring bags that a warp reads rows of at once. */
int32_t rf__bag_groups(const rf__bag_shape *shape);

/* Returns the warps of an SM for which registers suffice if a schedule leaves `warps` open. */
int32_t rf__bag_warps(const rf__bag_shape *shape);

/* Fills in fields that are 0, except for `warps`: an open `warps` limits nothing. RF_ERR_VALUE: a field is
 * out of its bounds, or the schedule does not fit the shape. */
rf_status rf__bag_schedule_complete(const rf__bag_shape *shape, rf_embedding_bag_schedule *schedule);

#endif
