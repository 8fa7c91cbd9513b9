/* The general path of the backward: entries of all lookups, sorted by row, pooled row by row. */
#ifndef RECFUSE_CUDA_BACKWARD_GENERAL_H
#define RECFUSE_CUDA_BACKWARD_GENERAL_H

#include "families/fused_backward/backward.h"

/* Sizes, and positions of the parts of the workspace; 0: no such part. */
typedef struct rf__backward_layout {
    rf__backward_variant variant;
    const rf_backward_segments *segments; /* the features' */
    int64_t lookups, slots, invalid_key;
    int32_t passes, chunks; /* of the sort */
    int32_t rows_chunk, rows_chunks, slices, pitch;
    int64_t entries[2], sources, factors, bag_factors, partials, bases, count;
    int64_t sums; /* of the sort: lengths, totals, digits */
    int64_t places;
    int64_t bytes;
} rf__backward_layout;

/* The workspace's parts begin after `begin` > 0 bytes of another path. RF_ERR_UNSUPPORTED: too large. */
rf_status rf__backward_layout_of(const rf__gpu *gpu, const char *operator_name,
                                 const rf__backward_problem *problem, const rf__backward_features *described,
                                 int64_t begin, rf__backward_layout *to);
/* Keys and values are of like size. */
int64_t rf__backward_entry_bytes(const rf__backward_variant *variant);
/* Returns the position of the number of rows, followed by those before each matrix: uint32. */
static inline int64_t rf__backward_counts_at(const rf__backward_layout *layout) {
    return layout->bases + layout->rows_chunks * (int64_t)sizeof(uint32_t);
}

/* Adds launches that make entries; features [n_features] are at the beginning of upload 0. */
rf_status rf__backward_entries_lower(const rf__backward_problem *problem, const rf__backward_layout *layout,
                                     rf__launches *launches);
/* Adds launches that count the rows of entries. */
rf_status rf__backward_counts_lower(const rf__backward_problem *problem, const rf__backward_layout *layout,
                                    rf__launches *launches);
/* Adds launches that pool entries row by row. */
rf_status rf__backward_pool_lower(const rf__backward_problem *problem, const rf__backward_features *described,
                                  const rf__backward_layout *layout, rf__launches *launches);

#endif
