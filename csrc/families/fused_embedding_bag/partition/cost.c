/* The expected cost of each feature, and the order of features. */
#include <string.h>

#include "families/fused_embedding_bag/partition/cost.h"
#include "families/fused_embedding_bag/partition/cut.h"

enum { ORDER_RANKS = 128 };

/* A feature's rank among ORDER_RANKS, by how many rows it has for a lookup, in quarters of powers of two; 0:
 * most. */
static int32_t rank_of(const rf__fused_feature *feature, double lookups) {
    enum { QUARTERS = 21, LEAST = (127 - ORDER_RANKS / 8) * 4 }; /* of the bits of a float */
    const float ratio = (float)((double)feature->rows / (lookups + 1));
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    const int32_t quarters = (int32_t)(bits >> QUARTERS) - LEAST;
    return ORDER_RANKS - 1 - (quarters < 0 ? 0 : quarters < ORDER_RANKS ? quarters : ORDER_RANKS - 1);
}

static void estimate(const rf__fused_cut *cut, int64_t f, rf__fused_estimate *found) {
    const rf__fused_feature *feature = &cut->what.features[f];
    const double bags = cut->bags, lookups = cut->lookups[f];
    *found = (rf__fused_estimate){.mean = lookups / bags, .number = -1, .rank = rank_of(feature, lookups)};
    const int32_t *classes = cut->bags <= RF_FUSED_FEW_BAGS ? feature->classes_of_few : feature->classes;
    if (!cut->staged[f]) found->number = classes[rf_fused_bucket(found->mean)];
    if (found->number < 0) return;
    const rf__fused_class *schedule = &cut->what.classes->of[found->number];
    found->cost = rf__fused_cost(schedule, found->mean, cut->n_staged > 0);
    if (schedule->kind == RF_FUSED_CLASS_COLUMNS) {
        found->work = bags / RF_FUSED_TILE_BAGS * found->cost * feature->shape.columns / RF_FUSED_TILE;
        return;
    }
    found->misses = rf__fused_misses(&feature->shape, feature->rows, lookups) / feature->shape.slices;
    found->work =
        (bags / (RF_FUSED_BLOCK / schedule->threads) * found->cost * schedule->split + found->misses) *
        feature->shape.slices;
}

double rf__fused_estimate_all(rf__fused_cut *cut) {
    double all = 0;
    for (int64_t f = 0; f < cut->what.n_features; f++) {
        estimate(cut, f, &cut->estimates[f]);
        all += cut->estimates[f].work;
    }
    return all;
}

void rf__fused_order(rf__fused_cut *cut) {
    int32_t ends[ORDER_RANKS + 1] = {0};
    for (int64_t f = 0; f < cut->what.n_features; f++) ends[cut->estimates[f].rank + 1]++;
    for (int32_t rank = 0; rank < ORDER_RANKS; rank++) ends[rank + 1] += ends[rank];
    for (int64_t f = 0; f < cut->what.n_features; f++)
        cut->order[ends[cut->estimates[f].rank]++] = (int32_t)f;
}
