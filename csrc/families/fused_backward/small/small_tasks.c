/* Distributes the rows of small features over blocks of small_rows.cu. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_backward/small/small.h"

enum {
    LEAST_COLUMNS = 16, /* of a slice */
    TASKS_AN_SM = 8, /* of a launch */
    BUCKETS = 128, /* of costs, */
    AN_OCTAVE = 4, /* this many per factor of two: bucket_of */
    STAGING_SHARE = 3 /* a task's rows must cost this many times its gradients */
};

int32_t rf__backward_small_columns(const rf__backward_small_sizes *sizes, int32_t dim, bool *staged) {
    const bool whole = rf_optimizer_row_states(sizes->epilogue - 1) > 0;
    for (int32_t most_ranges = RF_SMALL_COLUMNS; most_ranges >= LEAST_COLUMNS; most_ranges /= 2) {
        const int32_t columns = dim < most_ranges ? dim : most_ranges;
        *staged = rf__elements_bytes(RF_FLOAT32, sizes->bags * columns) <= sizes->staged_bytes;
        if (*staged && (!whole || columns == dim)) return columns;
    }
    *staged = false;
    return dim < RF_SMALL_WHOLE_COLUMNS ? dim : RF_SMALL_WHOLE_COLUMNS;
}

/* Bytes that a row of a slice moves, from memory or four times as many from the caches. */
static double row_cost(const rf__backward_small_sizes *sizes, const rf_small_feature *feature,
                       int32_t columns, bool staged) {
    const double lookups = sizes->lookups / feature->rows, read_rows = lookups < 1 ? lookups : 1;
    const int64_t states = rf_optimizer_column_states(sizes->epilogue - 1);
    const int64_t row_bytes =
        rf__elements_bytes(sizes->dtype, columns) + rf__elements_bytes(RF_FLOAT32, states * columns);
    return 8 + read_rows * 2 * (double)row_bytes + lookups * (2 + columns * (staged ? 1 : 2));
}

/* AN_OCTAVE to a factor of two, from LEAST_COST on. */
static int32_t bucket_of(double cost) {
    enum { LEAST_COST = 1024 };
    if (cost <= LEAST_COST) return 0;
    const uint64_t units = (uint64_t)(cost / (LEAST_COST / AN_OCTAVE)); /* AN_OCTAVE or more */
    const int32_t octave = 63 - __builtin_clzll(units) - 2; /* 4 is 2^2 */
    const int32_t bucket = octave * AN_OCTAVE + (int32_t)(units >> octave & (AN_OCTAVE - 1)) + 1;
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

/* The cut of a feature. */
typedef struct cut_t {
    int32_t columns, ranges;
    bool staged;
    int32_t bucket; /* of a task's cost */
} cut_t;

/* `costs`: of tasks whose gradients are gathered, and of those whose gradients are staged, which are another
 * launch. */
static void feature_cost(const rf__backward_small_sizes *sizes, const rf_small_feature *feature,
                         double costs[2]) {
    bool staged;
    const int32_t columns = rf__backward_small_columns(sizes, feature->dim, &staged);
    costs[staged] += feature->rows * row_cost(sizes, feature, columns, staged) * feature->dim / columns;
}

static cut_t cut_of(const rf__backward_small_sizes *sizes, const rf_small_feature *feature,
                    const double costs[2]) {
    cut_t cut;
    cut.columns = rf__backward_small_columns(sizes, feature->dim, &cut.staged);
    const double staging = cut.staged ? (double)sizes->bags * cut.columns * 2 : 0;
    const double rows = feature->rows * row_cost(sizes, feature, cut.columns, cut.staged);
    const double target = costs[cut.staged] / (double)(sizes->sms * TASKS_AN_SM);
    const double task_cost = target > STAGING_SHARE * staging ? target : STAGING_SHARE * staging;
    const int32_t each_lane = RF_SMALL_LANE_COLUMNS(cut.staged);
    const int32_t lanes = (cut.columns + each_lane - 1) / each_lane;
    const int32_t groups = RF_SMALL_THREADS(cut.staged, sizes->epilogue) / lanes;
    const double most_ranges = (feature->rows + groups - 1) / groups; /* each group has a row */
    const double ranges = rows / task_cost < 1             ? 1
                          : rows / task_cost > most_ranges ? most_ranges
                                                           : rows / task_cost;
    cut.ranges = (int32_t)(ranges + 0.5);
    cut.bucket = bucket_of(rows / cut.ranges + staging);
    return cut;
}

/* Returns the rank of a bucket: staged tasks first, then heavy ones. */
static int32_t order_of(const cut_t *cut) { return (cut->staged ? 0 : BUCKETS) + BUCKETS - 1 - cut->bucket; }

static int32_t slices_of(const rf_small_feature *feature, const cut_t *cut) {
    return (feature->dim + cut->columns - 1) / cut->columns;
}

rf_status rf__backward_small_tasks(const rf__backward_small_sizes *sizes, const rf_small_feature *features,
                                   int64_t n_features, rf_small_task **tasks, int32_t *n_staged,
                                   int32_t *n_gathered) {
    rf_status status = RF_OK;
    int32_t positions[2 * BUCKETS + 1] = {0};
    double costs[2] = {0};
    cut_t *cuts = malloc(((size_t)n_features + 1) * sizeof *cuts);
    *tasks = NULL;
    RF_FAIL_IF(cuts == NULL, RF_ERR_MEMORY, "no memory for %" PRId64 " features", n_features);
    for (int64_t f = 0; f < n_features; f++) feature_cost(sizes, &features[f], costs);
    for (int64_t f = 0; f < n_features; f++) {
        cuts[f] = cut_of(sizes, &features[f], costs);
        positions[order_of(&cuts[f]) + 1] += cuts[f].ranges * slices_of(&features[f], &cuts[f]);
    }
    for (int32_t i = 0; i < 2 * BUCKETS; i++) positions[i + 1] += positions[i];
    *n_staged = positions[BUCKETS];
    *n_gathered = positions[2 * BUCKETS] - positions[BUCKETS];
    *tasks = malloc(((size_t)positions[2 * BUCKETS] + 1) * sizeof **tasks);
    if (*tasks == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for %d tasks", (int)positions[2 * BUCKETS]);
        goto out;
    }
    for (int64_t f = 0; f < n_features; f++) {
        const rf_small_feature *feature = &features[f];
        int32_t *position = &positions[order_of(&cuts[f])];
        for (int32_t range = 0; range < cuts[f].ranges; range++) {
            for (int32_t column = 0; column < feature->dim; column += cuts[f].columns) {
                const int32_t remaining = feature->dim - column;
                (*tasks)[(*position)++] = (rf_small_task){
                    .row = feature->row,
                    .start = feature->start,
                    .factors = feature->factors,
                    .output_column = feature->output_column,
                    .matrix = feature->matrix,
                    .feature = (int32_t)f,
                    .first_row = (int32_t)((int64_t)feature->rows * range / cuts[f].ranges),
                    .last_row = (int32_t)((int64_t)feature->rows * (range + 1) / cuts[f].ranges),
                    .column = column,
                    .columns = remaining < cuts[f].columns ? remaining : cuts[f].columns};
            }
        }
    }
out:
    free(cuts);
    return status;
}
