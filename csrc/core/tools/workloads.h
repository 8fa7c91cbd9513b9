/* Batches of heterogeneous embedding models: lengths and indices of groups of features.
 *
 * The models are those of RecFlex (Pan et al., SC'24, section VI-A and its public artifact): a group of
 * features shares its bag lengths and its absences, each feature of it draws its own rows.
 */
#ifndef RECFUSE_WORKLOADS_H
#define RECFUSE_WORKLOADS_H

#include "recfuse.h"

/* All double, so that a float64 array [groups, 6] is an array of these. */
typedef struct rf__workload_group {
    double features;                 /* integer, >= 1 */
    double rows;                     /* of each table; integer, in [1, 2^31) */
    double mean, deviation, maximum; /* length: floor of a normal truncated to [0, maximum]; maximum may be
                                        infinite, 0 <= mean <= maximum; with deviation 0 always the mean */
    double coverage;                 /* in [0, 1]: a bag is empty with probability 1 - coverage */
} rf__workload_group;

/* Fills lengths [n_groups, batch]. RF_ERR_VALUE for a group outside the contract above. */
rf_status rf__workload_lengths(const rf__workload_group *groups, int64_t n_groups, int64_t batch,
                               uint64_t seed, int32_t *lengths);

/* The indices of a batch. skew 0: nearly uniform, row i has the weight u^(1/3), u uniform (as published). skew > 0:
 * the r-th hottest row has the weight r^-skew; hot rows are chosen at random. Weights depend on (model_seed,
 * group), draws on (model_seed, seed, feature). */
typedef struct rf__workload_draw {
    double skew; /* in [0, 16] */
    uint64_t model_seed, seed;
    rf_int_type index_type;
    int64_t lookups; /* the length of `indices` */
    void *indices; /* [lookups] */
} rf__workload_draw;

/* Fills draw->indices, feature-major: for each group, each of its features, each bag, lengths [n_groups, batch]
 * rows. RF_ERR_VALUE as above or if lengths and lookups disagree; RF_ERR_MEMORY. */
rf_status rf__workload_indices(const rf__workload_group *groups, int64_t n_groups, int64_t batch,
                               const int32_t *lengths, const rf__workload_draw *draw);

/* Fills sizes [count] of requests: floor of exp(normal(log median, log spread)), at least 1. A request above
 * `maximum` is served in parts of `maximum` and a rest, of which one is drawn. Requires median > 0, spread >=
 * 1, maximum in [1, 2^31), else RF_ERR_VALUE. */
rf_status rf__workload_batch_sizes(double median, double spread, int64_t maximum, uint64_t seed,
                                   int64_t count, int64_t *sizes);

#endif
