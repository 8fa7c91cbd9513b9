/* Cuts the lookups of a call into segments that are sorted separately.
 *
 * Lookups are in the order of features. Consecutive features whose rows are consecutive too need not be
 * sorted by table, only by rows inside of it. If that saves a pass of the sort, consecutive features are
 * joined as long as their rows have few enough bits. Features that share rows, or whose rows are in another
 * order, are in one segment; if that has too many rows, all are.
 */
#include "core/validate.h"
#include "families/fused_backward/backward.h"

enum { DIGIT_BITS = 10 /* of a pass; more if that saves a pass */ };

/* Rows [first, end) of all, and the first bag. */
typedef struct segment_t {
    int64_t first, end, slot;
} segment_t;

static int32_t bits_of(int64_t rows) { return rows <= 2 ? 1 : 64 - __builtin_clzll((uint64_t)rows - 1); }

static int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

static int32_t least_passes(int32_t bits) {
    const int32_t fewest = ceil_div(bits, RF_BACKWARD_MOST_DIGIT_BITS);
    return fewest < ceil_div(bits, DIGIT_BITS) ? fewest : ceil_div(bits, DIGIT_BITS);
}

/* Writes the segments of at most `most` rows each. Returns their number, or 0 if there is no such cut. */
static int32_t cut(const rf__backward_problem *problem, const rf_backward_feature *features, int64_t most,
                   segment_t *to) {
    int32_t count = 0;
    for (int64_t f = 0; f < problem->call.n_features; f++) {
        if (features[f].pooling < 0) continue;
        segment_t next = {features[f].first_row, features[f].first_row + features[f].rows,
                          f * problem->call.bags};
        while (count > 0 && (next.first < to[count - 1].end || next.end - to[count - 1].first <= most)) {
            const segment_t *last = &to[--count];
            if (last->first < next.first) next.first = last->first;
            if (last->end > next.end) next.end = last->end;
            next.slot = last->slot;
        }
        if (count == RF_BACKWARD_MOST_SEGMENTS || next.end - next.first > most) return 0;
        to[count++] = next;
    }
    return count;
}

/* Converts segments to the form of kernels. */
static rf_backward_segments described_as(const segment_t *segments, int32_t count) {
    rf_backward_segments to = {.count = count};
    for (int32_t s = 0; s < count; s++) {
        to.bases[s] = segments[s].first;
        to.slots[s] = (uint32_t)segments[s].slot;
    }
    return to;
}

void rf__backward_segment(const rf__backward_problem *problem, rf__backward_features *described) {
    segment_t segments[RF_BACKWARD_MOST_SEGMENTS] = {{0, described->rows, 0}};
    int64_t largest = 0;
    const int32_t passes = least_passes(bits_of(described->rows));
    int32_t count = 0;
    for (int32_t fewer = 1; fewer < passes && count == 0; fewer++)
        count =
            cut(problem, described->features, INT64_C(1) << fewer * RF_BACKWARD_MOST_DIGIT_BITS, segments);
    if (count == 0) {
        count = 1;
        segments[0] = (segment_t){0, described->rows, 0};
    }
    for (int32_t s = 0; s < count; s++)
        if (segments[s].end - segments[s].first > largest) largest = segments[s].end - segments[s].first;
    described->segments = described_as(segments, count);
    described->passes = least_passes(bits_of(largest));
    described->digit_bits = ceil_div(bits_of(largest), described->passes);
}
