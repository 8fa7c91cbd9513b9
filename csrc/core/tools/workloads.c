/* Batches of heterogeneous embedding models: see workloads.h. */
#include "core/tools/workloads.h"

#include <math.h>
#include <stdlib.h>

#include "core/tools/random.h"
#include "core/status.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

/* A truncated normal is drawn by rejection: this bounds the share of rejected draws. */
#define MAX_DEVIATIONS_PER_LENGTH 64

static bool is_integer_between(double value, double low, double high) {
    return value >= low && value <= high && value == floor(value);
}

static rf_status check_groups(const rf__workload_group *groups, int64_t n_groups) {
    for (int64_t g = 0; g < n_groups; g++) {
        const rf__workload_group *group = &groups[g];
        const long long at = (long long)g;
        RF_FAIL_IF(!is_integer_between(group->features, 1, INT32_MAX), RF_ERR_VALUE,
                   "group %lld: features is %g; expected a whole number from 1", at, group->features);
        RF_FAIL_IF(!is_integer_between(group->rows, 1, INT32_MAX), RF_ERR_VALUE,
                   "group %lld: rows is %g; expected a whole number in [1, 2^31)", at, group->rows);
        RF_FAIL_IF(!(group->coverage >= 0 && group->coverage <= 1), RF_ERR_VALUE,
                   "group %lld: coverage is %g; expected [0, 1]", at, group->coverage);
        RF_FAIL_IF(!(group->mean >= 0 && group->mean <= 1e6 && group->mean <= group->maximum), RF_ERR_VALUE,
                   "group %lld: mean is %g; expected [0, maximum] with maximum %g, up to 1e6", at,
                   group->mean, group->maximum);
        RF_FAIL_IF(!(group->deviation >= 0 && group->deviation <= 1e6 &&
                     group->deviation <= MAX_DEVIATIONS_PER_LENGTH * group->maximum),
                   RF_ERR_VALUE,
                   "group %lld: deviation is %g; expected [0, %d * maximum] with maximum %g, up to 1e6", at,
                   group->deviation, MAX_DEVIATIONS_PER_LENGTH, group->maximum);
    }
    return RF_OK;
}

static int32_t draw_length(const rf__workload_group *group, rf__random *random) {
    if (group->deviation == 0) return (int32_t)group->mean;
    for (;;) {
        const double length = group->mean + group->deviation * rf__random_normal(random);
        if (length >= 0 && length <= group->maximum) return (int32_t)length;
    }
}

rf_status rf__workload_lengths(const rf__workload_group *groups, int64_t n_groups, int64_t batch,
                               uint64_t seed, int32_t *lengths) {
    RF_CHECK(check_groups(groups, n_groups));
    for (int64_t g = 0; g < n_groups; g++) {
        rf__random random = rf__random_stream(seed, RF__FOR_LENGTHS, (uint64_t)g);
        for (int64_t b = 0; b < batch; b++) {
            const int32_t length = draw_length(&groups[g], &random);
            const bool absent = rf__random_uniform(&random) >= groups[g].coverage;
            lengths[g * batch + b] = absent ? 0 : length;
        }
    }
    return RF_OK;
}

/* Weights of the rows of one group; scratch [rows]. */
static void fill_weights(double *weights, int64_t *scratch, int64_t rows, double skew, rf__random *random) {
    if (skew == 0) {
        /* The cube root of a uniform number is distributed as the largest of three. */
        for (int64_t row = 0; row < rows; row++) {
            weights[row] = 0;
            for (int draw = 0; draw < 3; draw++)
                weights[row] = fmax(weights[row], rf__random_uniform(random));
        }
        return;
    }
    rf__random_permutation(random, scratch, rows);
    for (int64_t rank = 0; rank < rows; rank++) {
        weights[scratch[rank]] = rf__exp(-skew * rf__log((double)(rank + 1)));
    }
}

/* Sets *lookups of each feature of group `g`, from its lengths [batch]. The indices of the group begin at `at`. */
static rf_status count_lookups(const rf__workload_group *group, int64_t g, const int32_t *lengths,
                               int64_t batch, int64_t at, int64_t all_lookups, int64_t *lookups) {
    const int64_t features = (int64_t)group->features;
    *lookups = 0;
    for (int64_t b = 0; b < batch; b++) {
        RF_FAIL_IF(lengths[b] < 0, RF_ERR_VALUE, "lengths[%lld, %lld] is %d; expected >= 0", (long long)g,
                   (long long)b, lengths[b]);
        *lookups += lengths[b];
    }
    RF_FAIL_IF(*lookups > (all_lookups - at) / features, RF_ERR_VALUE,
               "lookups is %lld, group %lld alone has %lld for each of %lld features", (long long)all_lookups,
               (long long)g, (long long)*lookups, (long long)features);
    return RF_OK;
}

/* Builds the table of the row weights of group `g`. */
static rf_status weights_build(const rf__workload_draw *draw, int64_t g, int64_t rows, rf__alias *alias) {
    rf_status status = RF_OK;
    double *weights = malloc((size_t)rows * sizeof *weights);
    int64_t *scratch = malloc((size_t)rows * sizeof *scratch);
    if (weights == NULL || scratch == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for the weights of %lld rows", (long long)rows);
        goto out;
    }
    rf__random random = rf__random_stream(draw->model_seed, RF__FOR_WEIGHTS, (uint64_t)g);
    fill_weights(weights, scratch, rows, draw->skew, &random);
    status = rf__alias_build(alias, weights, rows);
out:
    free(scratch);
    free(weights);
    return status;
}

static void draw_rows(const rf__alias *alias, rf__random *random, rf_int_type type, void *indices,
                      int64_t begin, int64_t end) {
    if (type == RF_INT32) {
        for (int64_t i = begin; i < end; i++)
            ((int32_t *)indices)[i] = (int32_t)rf__alias_draw(alias, random);
    } else {
        for (int64_t i = begin; i < end; i++)
            ((int64_t *)indices)[i] = (int64_t)rf__alias_draw(alias, random);
    }
}

rf_status rf__workload_indices(const rf__workload_group *groups, int64_t n_groups, int64_t batch,
                               const int32_t *lengths, const rf__workload_draw *draw) {
    rf_status status = RF_OK;
    rf__alias alias = {0};
    RF_FAIL_IF(!(draw->skew >= 0 && draw->skew <= 16), RF_ERR_VALUE, "skew is %g; expected [0, 16]",
               draw->skew);
    RF_CHECK(check_groups(groups, n_groups));
    const uint64_t draw_seed = rf__random_mix(draw->model_seed ^ rf__random_mix(draw->seed + 1));
    int64_t at = 0;
    uint64_t feature = 0;
    for (int64_t g = 0; g < n_groups; g++) {
        int64_t lookups;
        RF_TRY(count_lookups(&groups[g], g, lengths + g * batch, batch, at, draw->lookups, &lookups));
        RF_TRY(weights_build(draw, g, (int64_t)groups[g].rows, &alias));
        for (int64_t f = 0; f < (int64_t)groups[g].features; f++, at += lookups) {
            rf__random random = rf__random_stream(draw_seed, RF__FOR_INDICES, feature++);
            draw_rows(&alias, &random, draw->index_type, draw->indices, at, at + lookups);
        }
    }
    if (at != draw->lookups)
        status = rf__fail(RF_ERR_VALUE, "lookups is %lld, the lengths add up to %lld",
                          (long long)draw->lookups, (long long)at);
out:
    rf__alias_free(&alias);
    return status;
}

rf_status rf__workload_batch_sizes(double median, double spread, int64_t maximum, uint64_t seed,
                                   int64_t count, int64_t *sizes) {
    RF_FAIL_IF(!(median > 0 && median <= 1e9 && spread >= 1 && spread <= 1e9), RF_ERR_VALUE,
               "median is %g and spread is %g; expected (0, 1e9] and [1, 1e9]", median, spread);
    RF_FAIL_IF(maximum < 1 || maximum > INT32_MAX, RF_ERR_VALUE, "maximum is %lld; expected [1, 2^31)",
               (long long)maximum);
    rf__random random = rf__random_stream(seed, RF__FOR_SIZES, 0);
    for (int64_t i = 0; i < count; i++) {
        double request = floor(rf__exp(rf__log(median) + rf__log(spread) * rf__random_normal(&random)));
        request = fmin(fmax(request, 1), 1e15);
        const int64_t size = (int64_t)request, pieces = (size + maximum - 1) / maximum;
        const int64_t remainder = size - (pieces - 1) * maximum;
        const bool last = rf__random_uniform(&random) * (double)pieces >= (double)(pieces - 1);
        sizes[i] = last ? remainder : maximum;
    }
    return RF_OK;
}
