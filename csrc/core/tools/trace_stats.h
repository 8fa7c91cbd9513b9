/* Traces of row indices: synthesis of their order, and reuse distances.
 *
 * Embedding accesses of production models are bursty: a row that was just read is likely to be read again
 * soon, far more than its popularity explains (Jain et al., MICRO'24, whose traces are Meta's).
 */
#ifndef RECFUSE_TRACE_STATS_H
#define RECFUSE_TRACE_STATS_H

#include "recfuse.h"

/* Fills values [count] with the curve through (ranks [n_points], counts [n_points]) at each of positions
 * [count]: a power law between two points, constant outside. Requires ascending ranks > 0, counts > 0,
 * n_points >= 1, else RF_ERR_VALUE. */
rf_status rf__trace_curve(const double *ranks, const double *counts, int64_t n_points,
                          const double *positions, int64_t count, double *values);

/* The times of a row's lookups, all in [0, length). The first time is uniform; each later time, with probability
 * `burst`, follows the previous time after lognormal(log median, sigma) if that is before `length`; otherwise it
 * is uniform again. */
typedef struct rf__trace_bursts {
    double length, burst, median, sigma; /* > 0; in [0, 1]; > 0; >= 0 */
    uint64_t seed;
} rf__trace_bursts;

/* Fills times [sum of counts]: counts[r] >= 0 times for each of n_rows rows, row after row. RF_ERR_VALUE if a field
 * of `bursts` is outside its range. */
rf_status rf__trace_times(const int64_t *counts, int64_t n_rows, const rf__trace_bursts *bursts,
                          double *times);

/* For each lookup of rows [lookups], each in [0, n_rows): gaps, how many lookups ago the same row was read
 * (1: by the previous lookup), and distances, the number of different other rows read since; both -1 for a
 * row's first lookup. An LRU cache of C rows hits exactly if 0 <= distance < C. One pass with a Fenwick tree
 * over the last lookup of each row (Bennett and Kruskal, "LRU stack processing", 1975). Requires lookups <
 * 2^31. RF_ERR_INDEX, RF_ERR_VALUE, RF_ERR_MEMORY. */
rf_status rf__trace_reuse(const int64_t *rows, int64_t lookups, int64_t n_rows, int64_t *gaps,
                          int64_t *distances);

#endif
