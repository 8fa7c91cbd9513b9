/* Sorts the lookups of one weight by row: see transpose.h. */
#include "families/fused_backward/cpu/transpose.h"

#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/cpu/pool.h"
#include "core/status.h"
#include "core/tasks.h"

enum {
    CHUNK_LOOKUPS = 2048,   /* that pay for a chunk, approximately */
    MOST_CHUNKS = 64,
    BUCKET_LOOKUPS = 128,   /* that pay for a bucket, approximately */
    MOST_BUCKETS = 1024,    /* streams that a chunk writes to at once */
    MOST_SHIFT = 31,        /* a row of a bucket fits 31 bits */
    MOST_ROW_BITS = 47,     /* no memory holds more rows, except expanded or invalid tensors */
    INSERTION_ENTRIES = 24,               /* entries that are sorted by insertion */
    DIGIT_BITS = 8,
    MOST_PASSES = 4,        /* MOST_SHIFT by DIGIT_BITS */
};

/* A lookup's factor for its row's gradient, except for the sample weight. */
static float bag_factor(const rf_fused_backward_params *params, const rf_feature *feature, int64_t from,
                        int64_t to) {
    if (feature->pooling != RF_MEAN) return 1.0f;
    int64_t count = 0;
    for (int64_t i = from; i < to; i++) {
        const int64_t index = rf__load_int(params->indices, params->index_type, i);
        count += (uint64_t)index < (uint64_t)feature->rows && index != feature->padding_idx;
    }
    return count > 1 ? 1.0f / (float)count : 1.0f;
}

/* Iterates over the chunk's lookups that count: those of a valid bag that are rows of their table and not
 * padding. Counts them by bucket, or writes their entries. */
static inline __attribute__((always_inline)) void walk(const rf__transpose *transpose, int64_t chunk,
                                                       const bool write, const rf_int_type index_type) {
    const rf_fused_backward_params *params = transpose->params;
    int64_t *cursors = transpose->cursors + chunk * transpose->buckets;
    const int64_t shift = transpose->shift, bags = params->bags;
    const uint64_t low_bits = ((uint64_t)1 << shift) - 1;
    int64_t at = chunk * transpose->chunk_bags, end = at + transpose->chunk_bags;
    if (end > transpose->n_features * bags) end = transpose->n_features * bags;
    while (at < end) {
        const int64_t number = transpose->features[at / bags], first_bag = at % bags;
        const int64_t last_bag = end - at < bags - first_bag ? first_bag + (end - at) : bags;
        const rf_feature *feature = &params->features[number];
        const uint64_t limit = (uint64_t)feature->rows;
        const int64_t first_row = feature->weight_offset / params->dim, padding_idx = feature->padding_idx;
        for (int64_t bag = first_bag; bag < last_bag; bag++) {
            const int64_t from = rf__load_int(params->offsets, params->offset_type, number * bags + bag);
            const int64_t to = rf__load_int(params->offsets, params->offset_type, number * bags + bag + 1);
            if (!rf__is_bag(number * bags + bag, from, to, params->lookups)) continue;
            const float factor = write ? bag_factor(params, feature, from, to) : 1.0f;
            for (int64_t i = from; i < to; i++) {
                const int64_t index = rf__load_int(params->indices, index_type, i);
                if ((uint64_t)index >= limit || index == padding_idx) continue;
                const uint64_t row = (uint64_t)(first_row + index);
                int64_t *cursor = &cursors[row >> shift];
                if (write) {
                    rf__entry *entry = &transpose->entries[*cursor];
                    entry->source = bag * params->output_dim + feature->output_column;
                    entry->row = (uint32_t)(row & low_bits);
                    if (feature->pooling == RF_MAX) {
                        entry->row |= RF__ENTRY_MAX;
                        entry->feature = (uint32_t)number;
                    } else {
                        entry->factor = params->sample_weights != NULL ? params->sample_weights[i] : factor;
                    }
                }
                ++*cursor;
            }
        }
        at += last_bag - first_bag;
    }
}

static void count_chunk(void *context, int64_t chunk) {
    const rf__transpose *transpose = context;
    if (transpose->params->index_type == RF_INT32) {
        walk(transpose, chunk, false, RF_INT32);
    } else {
        walk(transpose, chunk, false, RF_INT64);
    }
}

static void write_chunk(void *context, int64_t chunk) {
    const rf__transpose *transpose = context;
    if (transpose->params->index_type == RF_INT32) {
        walk(transpose, chunk, true, RF_INT32);
    } else {
        walk(transpose, chunk, true, RF_INT64);
    }
}

/* Computes the prefix sums of the cursors of each bucket, chunk by chunk. Returns the number of entries. */
static int64_t cursors_sum(rf__transpose *transpose) {
    int64_t total = 0;
    for (int64_t b = 0; b < transpose->buckets; b++) {
        transpose->starts[b] = total;
        for (int64_t c = 0; c < transpose->chunks; c++) {
            int64_t *cursor = &transpose->cursors[c * transpose->buckets + b], count = *cursor;
            *cursor = total;
            total += count;
        }
    }
    transpose->starts[transpose->buckets] = total;
    return total;
}

static int64_t clamp(int64_t value, int64_t smallest, int64_t largest) {
    return value < smallest ? smallest : value > largest ? largest : value;
}

/* Cuts the work: chunks of bags, buckets of rows. `lookups` is an estimate. */
static void cut(rf__transpose *transpose, int64_t lookups, int64_t bucket_rows) {
    const int64_t all_bags = transpose->n_features * transpose->params->bags;
    const int64_t chunks = clamp((lookups + all_bags) / CHUNK_LOOKUPS, 1, MOST_CHUNKS);
    transpose->chunk_bags = clamp((all_bags + chunks - 1) / chunks, 1, INT64_MAX);
    transpose->chunks = (all_bags + transpose->chunk_bags - 1) / transpose->chunk_bags;
    const int64_t rows = clamp(transpose->params->rows, 1, INT64_MAX);
    const int64_t by_rows = bucket_rows > 0 ? rows / bucket_rows : 1, by_lookups = lookups / BUCKET_LOOKUPS;
    const int64_t buckets = clamp(by_rows > by_lookups ? by_rows : by_lookups, 1, MOST_BUCKETS);
    while (transpose->shift < MOST_SHIFT && (rows - 1) >> transpose->shift >= buckets) transpose->shift++;
    transpose->buckets = ((rows - 1) >> transpose->shift) + 1;
}

rf_status rf__transpose_run(rf__transpose *transpose, const rf_fused_backward_params *params,
                            const char *operator_name, int64_t bucket_rows, const rf_executor *executor) {
    rf_status status = RF_OK;
    int64_t lookups = 0;
    RF_FAIL_IF(params->rows > (int64_t)1 << MOST_ROW_BITS, RF_ERR_UNSUPPORTED,
               "recfuse.%s: the weight has %lld rows; expected at most 2^%d", operator_name,
               (long long)params->rows, (int)MOST_ROW_BITS);
    transpose->params = params;
    transpose->features = malloc(sizeof(int64_t) * (size_t)clamp(params->n_features, 1, INT64_MAX));
    RF_FAIL_IF(transpose->features == NULL, RF_ERR_MEMORY, "recfuse.%s: no memory for %lld features",
               operator_name, (long long)params->n_features);
    for (int64_t f = 0; f < params->n_features; f++) {
        if (params->features[f].buffer != params->group) continue;
        transpose->features[transpose->n_features++] = f;
        const int64_t from = rf__load_int(params->offsets, params->offset_type, f * params->bags);
        const int64_t to = rf__load_int(params->offsets, params->offset_type, (f + 1) * params->bags);
        if (from >= 0 && from <= to && to <= params->lookups) lookups += to - from;
    }
    cut(transpose, lookups, bucket_rows);
    const int64_t counters = transpose->chunks * transpose->buckets;
    transpose->cursors = calloc((size_t)clamp(counters, 1, INT64_MAX), sizeof(int64_t));
    transpose->starts = calloc((size_t)transpose->buckets + 1, sizeof(int64_t));
    RF_FAIL_IF(transpose->cursors == NULL || transpose->starts == NULL, RF_ERR_MEMORY,
               "recfuse.%s: no memory for %lld counters", operator_name, (long long)counters);
    const int64_t workers = rf__tasks_workers(executor, lookups * (int64_t)sizeof(rf__entry));
    RF_TRY(rf__tasks_run(operator_name, transpose->chunks, workers, count_chunk, transpose, executor));
    const int64_t total = cursors_sum(transpose);
    if (total == 0) goto out;
    transpose->entries = malloc((size_t)total * sizeof(rf__entry));
    transpose->scratch = malloc((size_t)total * sizeof(rf__entry));
    RF_FAIL_IF(transpose->entries == NULL || transpose->scratch == NULL, RF_ERR_MEMORY,
               "recfuse.%s: no memory for %lld lookups", operator_name, (long long)total);
    RF_TRY(rf__tasks_run(operator_name, transpose->chunks, workers, write_chunk, transpose, executor));
out:
    return status;
}

void rf__transpose_free(rf__transpose *transpose) {
    free(transpose->scratch);
    free(transpose->entries);
    free(transpose->starts);
    free(transpose->cursors);
    free(transpose->features);
}

static void sort_by_insertion(rf__entry *entries, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const rf__entry entry = entries[i];
        const uint32_t row = rf__entry_row(&entry);
        int64_t to = i;
        for (; to > 0 && rf__entry_row(&entries[to - 1]) > row; to--) entries[to] = entries[to - 1];
        entries[to] = entry;
    }
}

/* Replaces the numbers of entries by digit with their begins. */
static void digits_sum(int64_t *cursors, int64_t digits) {
    int64_t at = 0;
    for (int64_t digit = 0; digit < digits; digit++) {
        const int64_t size = cursors[digit];
        cursors[digit] = at;
        at += size;
    }
}

/* One pass of a radix sort, by a digit. */
static void sort_digit(const rf__entry *from, rf__entry *to, int64_t count, int64_t low, uint32_t mask,
                       int64_t *cursors) {
    digits_sum(cursors, (int64_t)mask + 1);
    for (int64_t i = 0; i < count; i++) to[cursors[rf__entry_row(&from[i]) >> low & mask]++] = from[i];
}

rf__entry *rf__transpose_sort(const rf__transpose *transpose, int64_t bucket) {
    const int64_t first = transpose->starts[bucket], count = transpose->starts[bucket + 1] - first;
    if (count == 0) return NULL;
    rf__entry *from = transpose->entries + first, *to = transpose->scratch + first;
    if (count <= INSERTION_ENTRIES) {
        sort_by_insertion(from, count);
        return from;
    }
    const int64_t passes = (transpose->shift + DIGIT_BITS - 1) / DIGIT_BITS;
    const int64_t bits = passes > 0 ? (transpose->shift + passes - 1) / passes : 0;
    const uint32_t mask = ((uint32_t)1 << bits) - 1;
    int64_t cursors[MOST_PASSES][1 << DIGIT_BITS];
    memset(cursors, 0, (size_t)passes * sizeof cursors[0]);
    for (int64_t i = 0; i < count; i++) { /* the digits of all passes at once */
        const uint32_t row = rf__entry_row(&from[i]);
        for (int64_t pass = 0; pass < passes; pass++) cursors[pass][row >> pass * bits & mask]++;
    }
    for (int64_t pass = 0; pass < passes; pass++) {
        sort_digit(from, to, count, pass * bits, mask, cursors[pass]);
        rf__entry *previous = from;
        from = to;
        to = previous;
    }
    return from;
}
