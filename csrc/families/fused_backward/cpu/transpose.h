/* The transposed lookups of a weight, from which its gradient is pooled.
 *
 * The forward call lists lookups by feature and bag; a row's gradient is a sum over the lookups of that row.
 * So the lookups that count become entries, which are sorted by row, those of a row in the order of the call:
 * a counting sort into buckets of adjacent rows (one pass counts, one writes; both by chunks of bags), then
 * each bucket separately, by the thread that pools it. The order is that of a stable sort, which is unique:
 * it does not depend on the chunks or on the number of threads.
 */
#ifndef RECFUSE_CPU_TRANSPOSE_H
#define RECFUSE_CPU_TRANSPOSE_H

#include "recfuse.h"

/* One lookup that counts. */
typedef struct rf__entry {
    int64_t
        source; /* element of the gradient of the output at which the bag's columns of the feature begin */
    union {
        float factor;     /* of a sum or mean: the sample weight, or 1 / lookups of the bag */
        uint32_t feature; /* of a maximum */
    };
    uint32_t row; /* in its bucket, below RF__ENTRY_MAX; with RF__ENTRY_MAX added: of a maximum */
} rf__entry;

#define RF__ENTRY_MAX UINT32_C(0x80000000)

static inline uint32_t rf__entry_row(const rf__entry *entry) { return entry->row & ~RF__ENTRY_MAX; }

typedef struct rf__transpose {
    const rf_fused_backward_params *params;
    int64_t *features; /* [n_features]: those of the weight, in order */
    int64_t n_features;
    int64_t chunks, chunk_bags; /* of n_features * bags */
    int64_t shift, buckets;     /* bucket b holds rows b << shift up to (b + 1) << shift */
    int64_t *cursors;            /* [chunks, buckets]: numbers of entries, then next positions */
    int64_t *starts;            /* [buckets + 1] */
    rf__entry *entries;         /* [starts[buckets]], by bucket */
    rf__entry *scratch;         /* as many */
} rf__transpose;

/* Fills `transpose` (zeros before) from checked params with dim > 0. To be freed also after a failure. Aims
 * at buckets of `bucket_rows` rows or more. RF_ERR_MEMORY, RF_ERR_INTERNAL. */
rf_status rf__transpose_run(rf__transpose *transpose, const rf_fused_backward_params *params,
                            const char *operator_name, int64_t bucket_rows, const rf_executor *executor);
void rf__transpose_free(rf__transpose *transpose);

/* Sorts a bucket by row, keeping the order of equal rows; returns its first entry, in one of the two arrays.
 * One thread per bucket; only one call per bucket. */
rf__entry *rf__transpose_sort(const rf__transpose *transpose, int64_t bucket);

#endif
