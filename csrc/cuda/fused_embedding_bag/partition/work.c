/* How long blocks of the fused embedding bag are expected to take, and which features come first.
 *
 * Work is counted in steps: of a batch of rows in flight, of what a bag costs beside, of rows that nobody has read
 * before. By when tasks began and ended on an H200: 1.1 us to begin one, 0.6 us a step, 0.2 us for a KB of rows from
 * memory, 4 us for eight bags of a tile whose lanes go through them by themselves. That is right to 18 % for tasks of the
 * benchmark's models.
 */
#include <string.h>

#include "cuda/fused_embedding_bag/partition/cut.h"

enum { ORDER_RANKS = 128 };

double rf__fused_in_flight(const rf__fused_class *made) {
    return (double)made->threads / made->lanes * rf__fused_ids_at_once(made);
}

double rf__fused_steps(const rf__fused_class *made, double mean, bool beside) {
    if (made->kind == RF__FUSED_COLUMNS) {
        if (mean <= 1 && !beside) return RF__FUSED_COLUMN_STEPS;
        return RF__FUSED_LONGER_STEPS * (mean > 1 ? mean : 1);
    }
    const double batches = mean / rf__fused_in_flight(made);
    return 1 + (batches > 1 ? batches : 1) / made->split;
}

double rf__fused_steps_of_miss(const rf__fused_geometry *shape) {
    const int32_t bytes = shape->row_bytes > RF__FUSED_SECTOR ? shape->row_bytes : RF__FUSED_SECTOR;
    return (double)bytes / RF__FUSED_BYTES_A_STEP;
}

double rf__fused_misses(const rf__fused_geometry *shape, int64_t rows, double lookups) {
    if (!(lookups > 0)) return 0;
    /* Of r rows, l lookups read about r l / (r + l) different ones. */
    return (double)rows * lookups / ((double)rows + lookups) * rf__fused_steps_of_miss(shape);
}

double rf__fused_target(double all, double places) {
    double least = all / (places * RF__FUSED_LEAST_TURNS);
    if (least > RF__FUSED_LEAST_WORK) least = RF__FUSED_LEAST_WORK;
    if (least < RF__FUSED_LEAST_WORK_OF_ALL) least = RF__FUSED_LEAST_WORK_OF_ALL;
    const double target = all / (places * RF__FUSED_TURNS);
    return target > least ? target : least;
}

/* A feature's rank among ORDER_RANKS, by how many rows it has for a lookup, in quarters of powers of two; 0: most. */
static int32_t rank_of(const rf__fused_feature *feature, double lookups) {
    enum { QUARTERS = 21, LEAST = (127 - ORDER_RANKS / 8) * 4 }; /* of the bits of a float */
    const float ratio = (float)((double)feature->rows / (lookups + 1));
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    const int32_t quarters = (int32_t)(bits >> QUARTERS) - LEAST;
    return ORDER_RANKS - 1 - (quarters < 0 ? 0 : quarters < ORDER_RANKS ? quarters : ORDER_RANKS - 1);
}

static void estimate(const rf__fused_cut *my, int64_t f, rf__fused_estimate *one) {
    const rf__fused_feature *feature = &my->what.features[f];
    const double bags = my->bags, lookups = my->lookups[f];
    *one = (rf__fused_estimate){.mean = lookups / bags, .number = -1, .rank = rank_of(feature, lookups)};
    const int32_t *classes = my->bags <= RF__FUSED_FEW_BAGS ? feature->few_of : feature->class_of;
    if (!my->staged[f]) one->number = classes[rf__fused_bucket(one->mean)];
    if (one->number < 0) return;
    const rf__fused_class *made = &my->what.classes->of[one->number];
    one->steps = rf__fused_steps(made, one->mean, my->n_staged > 0);
    if (made->kind == RF__FUSED_COLUMNS) {
        one->work = bags / RF__FUSED_TOGETHER * one->steps * feature->shape.columns / RF__FUSED_TILE;
        return;
    }
    one->misses = rf__fused_misses(&feature->shape, feature->rows, lookups) / feature->shape.slices;
    one->work = (bags / (RF__FUSED_BLOCK / made->threads) * one->steps * made->split + one->misses) *
                feature->shape.slices;
}

double rf__fused_estimate_all(rf__fused_cut *my) {
    double all = 0;
    for (int64_t f = 0; f < my->what.n_features; f++) {
        estimate(my, f, &my->estimates[f]);
        all += my->estimates[f].work;
    }
    return all;
}

void rf__fused_order(rf__fused_cut *my) {
    int32_t place[ORDER_RANKS + 1] = {0};
    for (int64_t f = 0; f < my->what.n_features; f++) place[my->estimates[f].rank + 1]++;
    for (int32_t rank = 0; rank < ORDER_RANKS; rank++) place[rank + 1] += place[rank];
    for (int64_t f = 0; f < my->what.n_features; f++) my->order[place[my->estimates[f].rank]++] = (int32_t)f;
}
