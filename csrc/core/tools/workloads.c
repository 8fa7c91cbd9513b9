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

static bool whole_between(double value, double low, double high) {
    return value >= low && value <= high && value == floor(value);
}

static rf_status check_groups(const rf__workload_group *groups, int64_t n_groups) {
    for (int64_t g = 0; g < n_groups; g++) {
        const rf__workload_group *group = &groups[g];
        const long long at = (long long)g;
        RF_FAIL_IF(!whole_between(group->features, 1, INT32_MAX), RF_ERR_VALUE,
                   "group %lld: features is %g; expected a whole number from 1", at, group->features);
        RF_FAIL_IF(!whole_between(group->rows, 1, INT32_MAX), RF_ERR_VALUE,
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

rf_status rf__workload_indices(const rf__workload_group *groups, int64_t n_groups, int64_t batch,
                               const int32_t *lengths, double skew, uint64_t model_seed, uint64_t seed,
                               rf_int_type index_type, int64_t lookups, void *indices) {
    rf_status status = RF_OK;
    double *weights = NULL;
    int64_t *scratch = NULL;
    rf__alias alias = {0};
    if (!(skew >= 0 && skew <= 16)) {
        status = rf__fail(RF_ERR_VALUE, "skew is %g; expected [0, 16]", skew);
        goto out;
    }
    RF_TRY(check_groups(groups, n_groups));

    const uint64_t draw_seed = rf__random_mix(model_seed ^ rf__random_mix(seed + 1));
    int64_t at = 0;
    uint64_t feature = 0;
    for (int64_t g = 0; g < n_groups; g++) {
        const int64_t rows = (int64_t)groups[g].rows, features = (int64_t)groups[g].features;
        int64_t group_lookups = 0;
        for (int64_t b = 0; b < batch; b++) {
            const int32_t length = lengths[g * batch + b];
            if (length < 0) {
                status = rf__fail(RF_ERR_VALUE, "lengths[%lld, %lld] is %d; expected >= 0", (long long)g,
                                  (long long)b, length);
                goto out;
            }
            group_lookups += length;
        }
        if (group_lookups > (lookups - at) / features) {
            status =
                rf__fail(RF_ERR_VALUE, "lookups is %lld, group %lld alone has %lld for each of %lld features",
                         (long long)lookups, (long long)g, (long long)group_lookups, (long long)features);
            goto out;
        }
        free(scratch);
        free(weights);
        scratch = NULL;
        weights = malloc((size_t)rows * sizeof *weights);
        scratch = malloc((size_t)rows * sizeof *scratch);
        if (weights == NULL || scratch == NULL) {
            status = rf__fail(RF_ERR_MEMORY, "no memory for the weights of %lld rows", (long long)rows);
            goto out;
        }
        rf__random random = rf__random_stream(model_seed, RF__FOR_WEIGHTS, (uint64_t)g);
        fill_weights(weights, scratch, rows, skew, &random);
        RF_TRY(rf__alias_build(&alias, weights, rows));

        for (int64_t f = 0; f < features; f++) {
            random = rf__random_stream(draw_seed, RF__FOR_INDICES, feature++);
            const int64_t end = at + group_lookups;
            if (index_type == RF_INT32) {
                for (; at < end; at++) ((int32_t *)indices)[at] = (int32_t)rf__alias_draw(&alias, &random);
            } else {
                for (; at < end; at++) ((int64_t *)indices)[at] = (int64_t)rf__alias_draw(&alias, &random);
            }
        }
    }
    if (at != lookups) {
        status = rf__fail(RF_ERR_VALUE, "lookups is %lld, the lengths add up to %lld", (long long)lookups,
                          (long long)at);
    }
out:
    rf__alias_free(&alias);
    free(scratch);
    free(weights);
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
        const int64_t rest = size - (pieces - 1) * maximum;
        const bool last = rf__random_uniform(&random) * (double)pieces >= (double)(pieces - 1);
        sizes[i] = last ? rest : maximum;
    }
    return RF_OK;
}
