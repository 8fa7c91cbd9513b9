/* Traces of row indices: see trace_stats.h. */
#include "core/tools/trace_stats.h"

#include <stdlib.h>

#include "core/tools/random.h"
#include "core/status.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

rf_status rf__trace_curve(const double *ranks, const double *counts, int64_t n_points,
                          const double *positions, int64_t count, double *values) {
    for (int64_t i = 0; i < n_points; i++) {
        RF_FAIL_IF(!(counts[i] > 0 && ranks[i] > (i > 0 ? ranks[i - 1] : 0)), RF_ERR_VALUE,
                   "point %lld is (%g, %g); expected rising ranks > 0 and counts > 0", (long long)i, ranks[i],
                   counts[i]);
    }
    RF_FAIL_IF(n_points < 1, RF_ERR_VALUE, "no points are given; expected at least 1");
    int64_t next = 0; /* the first point after the position; positions are mostly ascending */
    for (int64_t i = 0; i < count; i++) {
        if (next > 0 && positions[i] < ranks[next - 1]) next = 0;
        while (next < n_points && ranks[next] <= positions[i]) next++;
        if (next == 0 || next == n_points) {
            values[i] = counts[next == 0 ? 0 : n_points - 1];
            continue;
        }
        const double log_from = rf__log(counts[next - 1]), log_to = rf__log(counts[next]);
        const double from = rf__log(ranks[next - 1]), to = rf__log(ranks[next]);
        values[i] = rf__exp(log_from + (log_to - log_from) * ((rf__log(positions[i]) - from) / (to - from)));
    }
    return RF_OK;
}

rf_status rf__trace_times(const int64_t *counts, int64_t n_rows, const rf__trace_bursts *bursts,
                          double *times) {
    const double length = bursts->length;
    RF_FAIL_IF(
        !(length > 0 && bursts->burst >= 0 && bursts->burst <= 1 && bursts->median > 0 && bursts->sigma >= 0),
        RF_ERR_VALUE, "length is %g, burst %g, median %g, sigma %g; expected > 0, [0, 1], > 0, >= 0", length,
        bursts->burst, bursts->median, bursts->sigma);
    const double log_median = rf__log(bursts->median);
    int64_t at = 0;
    for (int64_t row = 0; row < n_rows; row++) {
        rf__random random = rf__random_stream(bursts->seed, RF__FOR_TIMES, (uint64_t)row);
        double time = length;
        for (int64_t event = 0; event < counts[row]; event++) {
            if (event > 0 && rf__random_uniform(&random) < bursts->burst) {
                time += rf__exp(log_median + bursts->sigma * rf__random_normal(&random));
            } else {
                time = length;
            }
            if (time >= length) time = length * rf__random_uniform(&random);
            times[at++] = time;
        }
    }
    return RF_OK;
}

rf_status rf__trace_reuse(const int64_t *rows, int64_t lookups, int64_t n_rows, int64_t *gaps,
                          int64_t *distances) {
    rf_status status = RF_OK;
    int64_t *last = NULL; /* [n_rows]: 1 + the last lookup of each row, or 0 */
    int32_t *tree = NULL; /* [lookups + 1]: Fenwick tree of marks, a mark on the last lookup of each row */
    RF_FAIL_IF(lookups >= INT32_MAX, RF_ERR_VALUE, "the trace has %lld lookups; expected fewer than 2^31 - 1",
               (long long)lookups);
    last = calloc((size_t)n_rows + 1, sizeof *last);
    tree = calloc((size_t)lookups + 1, sizeof *tree);
    if (last == NULL || tree == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for %lld rows and %lld lookups", (long long)n_rows,
                          (long long)lookups);
        goto out;
    }
    int64_t distinct = 0; /* marks in the tree */
    for (int64_t i = 0; i < lookups; i++) {
        const int64_t row = rows[i];
        if (row < 0 || row >= n_rows) {
            status = rf__fail(RF_ERR_INDEX, "lookup %lld is row %lld; expected [0, %lld)", (long long)i,
                              (long long)row, (long long)n_rows);
            goto out;
        }
        const int64_t previous = last[row];
        if (previous == 0) {
            gaps[i] = distances[i] = -1;
            distinct++;
        } else {
            int64_t marks = 0;
            for (int64_t node = previous; node > 0; node -= node & -node) marks += tree[node];
            gaps[i] = i + 1 - previous;
            distances[i] = distinct - marks;
            for (int64_t node = previous; node <= lookups; node += node & -node) tree[node]--;
        }
        last[row] = i + 1;
        for (int64_t node = i + 1; node <= lookups; node += node & -node) tree[node]++;
    }
out:
    free(tree);
    free(last);
    return status;
}
