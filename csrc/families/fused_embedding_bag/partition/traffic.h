/* The bytes and operations of a fused call, estimated by its number of lookups in constant time. */
#ifndef RECFUSE_CUDA_FUSED_TRAFFIC_H
#define RECFUSE_CUDA_FUSED_TRAFFIC_H

#include "families/fused_embedding_bag/features.h"
#include "gpu/launches/launches.h"

enum { RF__FUSED_LOGARITHMS = 32 };

/* Of features whose lookups are distributed as their schedules expect, or evenly without expectations. */
typedef struct rf__fused_traffic {
    double row_bytes[RF__FUSED_LOGARITHMS]; /* of tables, each row once, at 2^i lookups per feature */
    double columns; /* elements of a row: the mean over all lookups */
} rf__fused_traffic;

/* `schedules` may be NULL. */
RF__SHARED void rf__fused_traffic_of(const rf_fused_embedding_bag_params *params,
                                     const rf_fused_schedule *schedules, rf__fused_traffic *traffic);

/* Adds a share, 0 to 1, of a batch's bytes and operations to a launch. */
void rf__fused_traffic_add(const rf__fused_traffic *traffic, const rf_fused_embedding_bag_params *params,
                           double fraction, rf__kernel_launch *launch);

/* A function of the lookups of a feature, between its values at powers of two: linear there, and from 0 to
 * 1. */
static inline double rf__fused_interpolate(const double *values, double lookups) {
    int32_t i = 0;
    while (i < RF__FUSED_LOGARITHMS - 1 && (double)(2ll << i) <= lookups) i++;
    if (i == RF__FUSED_LOGARITHMS - 1) return values[i];
    if (lookups < 1) return values[0] * lookups;
    return values[i] + (values[i + 1] - values[i]) * (lookups / (double)(1ll << i) - 1);
}

#endif
