/* The expected cost of each feature, and the order of features. */
#include <string.h>

#include "families/fused_embedding_bag/partition/cost.h"
#include "families/fused_embedding_bag/partition/cut.h"

enum { ORDER_RANKS = 128 };

/* A feature's rank among ORDER_RANKS, by how many rows it has for a lookup, in quarters of powers of two; 0:
 * most. */
static int32_t rank_of(const rf__fused_feature *feature, double lookups) {
    enum { QUARTERS = 21, LEAST_QUARTERS = (127 - ORDER_RANKS / 8) * 4 }; /* of the bits of a float */
    const float ratio = (float)((double)feature->rows / (lookups + 1));
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    const int32_t quarters = (int32_t)(bits >> QUARTERS) - LEAST_QUARTERS;
    return ORDER_RANKS - 1 - (quarters < 0 ? 0 : quarters < ORDER_RANKS ? quarters : ORDER_RANKS - 1);
}

static void estimate(const rf__fused_cut *cut, int64_t f, rf__fused_estimate *result) {
    const rf__fused_feature *feature = &cut->input.features[f];
    const double bags = cut->bags, lookups = cut->lookups[f];
    *result = (rf__fused_estimate){.mean = lookups / bags, .number = -1, .rank = rank_of(feature, lookups)};
    const int32_t *classes = cut->bags <= RF_FUSED_FEW_BAGS ? feature->classes_of_few : feature->classes;
    if (!cut->staged[f]) result->number = classes[rf_fused_bucket(result->mean)];
    if (result->number < 0) return;
    const rf__fused_class *schedule = &cut->input.classes->of[result->number];
    result->cost = rf__fused_cost(schedule, result->mean, cut->n_staged > 0);
    if (schedule->kind == RF_FUSED_CLASS_COLUMNS) {
        result->work = bags / RF_FUSED_TILE_BAGS * result->cost * feature->shape.columns / RF_FUSED_TILE;
        return;
    }
    result->misses = rf__fused_misses(&feature->shape, feature->rows, lookups) / feature->shape.slices;
    result->work =
        (bags / (RF_FUSED_BLOCK / schedule->threads) * result->cost * schedule->split + result->misses) *
        feature->shape.slices;
}

double rf__fused_estimate_all(rf__fused_cut *cut) {
    double total = 0;
    for (int64_t f = 0; f < cut->input.n_features; f++) {
        estimate(cut, f, &cut->estimates[f]);
        total += cut->estimates[f].work;
    }
    return total;
}

void rf__fused_order(rf__fused_cut *cut) {
    int32_t rank_ends[ORDER_RANKS + 1] = {0};
    for (int64_t f = 0; f < cut->input.n_features; f++) rank_ends[cut->estimates[f].rank + 1]++;
    for (int32_t rank = 0; rank < ORDER_RANKS; rank++) rank_ends[rank + 1] += rank_ends[rank];
    for (int64_t f = 0; f < cut->input.n_features; f++)
        cut->order[rank_ends[cut->estimates[f].rank]++] = (int32_t)f;
}
