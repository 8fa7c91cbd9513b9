/* The traffic of fused calls. */
#include "families/fused_embedding_bag/partition/traffic.h"

/* Returns the lookups of a feature relative to the mean feature. */
static double weight_of(const rf_fused_schedule *schedules, int64_t feature, double mean) {
    if (schedules == NULL || mean == 0) return 1;
    return schedules[feature].expected > 0 ? schedules[feature].expected / mean : 0;
}

/* Returns the expected lookups of the mean feature; 0: not known for all. */
static double mean_of(const rf_fused_schedule *schedules, int64_t n_features) {
    double total = 0;
    for (int64_t f = 0; schedules != NULL && f < n_features; f++) {
        if (schedules[f].expected == 0) return 0;
        if (schedules[f].expected > 0) total += schedules[f].expected;
    }
    return n_features > 0 ? total / (double)n_features : 0;
}

void rf__fused_traffic_of(const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules,
                          rf__fused_traffic *traffic) {
    const int64_t n = params->n_features;
    const double mean = mean_of(schedules, n);
    *traffic = (rf__fused_traffic){0};
    for (int64_t f = 0; f < n; f++) {
        const rf_feature *feature = &params->features[f];
        const double rows = (double)feature->rows, weight = weight_of(schedules, f, mean);
        const rf__row_format row = rf__feature_row(params->buffers, feature);
        const double row_bytes = (double)rf__row_read_bytes(&row);
        for (int32_t i = 0; i < RF__FUSED_LOGARITHMS; i++) {
            const double lookups = weight * (double)(1ll << i);
            traffic->row_bytes[i] += (lookups < rows ? lookups : rows) * row_bytes;
        }
        traffic->columns += weight * (double)feature->dim / (double)n;
    }
}

void rf__fused_traffic_add(const rf__fused_traffic *traffic, const rf_fused_embedding_bag_params *params,
                           double split, rf__kernel_launch *launch) {
    const int64_t index = params->index_type == RF_INT64 ? 8 : 4,
                  offset = params->offset_type == RF_INT64 ? 8 : 4;
    const double lookups = (double)params->lookups;
    const bool weighted = params->sample_weights != NULL;
    const double rows = rf__fused_interpolate(traffic->row_bytes, lookups / (double)params->n_features);
    const double lookup_bytes = lookups * (double)(index + (weighted ? 4 : 0)) +
                                (double)(params->n_features * params->bags + 1) * (double)offset;
    launch->read_bytes += (int64_t)(split * (rows + lookup_bytes));
    const int64_t written = rf__elements_bytes(params->output_dtype, params->bags * params->output_dim);
    launch->written_bytes += (int64_t)(split * (double)written);
    launch->flops += split * lookups * traffic->columns * (weighted ? 2 : 1);
}
