/* Mappings: the work of a batch cut into tasks, and written in the order in which a GPU begins them. Calls go
 * down: cut.c, then cost.c and staged/staged.c; write.c; check.c, for mappings from a caller. */
#ifndef RECFUSE_CUDA_FUSED_PARTITION_H
#define RECFUSE_CUDA_FUSED_PARTITION_H

#include "families/fused_embedding_bag/schedule/fused_schedule.h"
#include "families/fused_embedding_bag/staged/staged.h"

enum {
    RF__FUSED_MAPPING_VERSION = 2,
    RF__FUSED_PARTIAL_BYTES = RF_FUSED_PARTIAL_FLOATS * 4 /* the unit of partial sums */
};

/* The first row of a mapping; then n_tasks tasks, then n_tiles times 32 lanes, then rf__fused_staged with its
 * tasks. */
typedef struct rf__fused_mapping {
    uint32_t checksum; /* of all that follows, see rf__fused_checksum */
    int32_t n_tasks, n_tiles, n_groups;
    int32_t partials; /* of RF__FUSED_PARTIAL_BYTES */
    int32_t bags, n_features;
    int32_t signature; /* of the features and classes of the tasks */
} rf__fused_mapping;
RF_SIZE_IS(rf__fused_mapping, 32);

/* Rows of a mapping of this many tasks and tiles, before those for staged tables. */
static inline int64_t rf__fused_rows_of(int64_t n_tasks, int64_t n_tiles) {
    return 1 + n_tasks +
           n_tiles * (RF_FUSED_TILE * (int64_t)sizeof(rf_fused_lane) / (int64_t)sizeof(rf__fused_mapping));
}
static inline int64_t rf__fused_rows(const rf__fused_mapping *mapping) {
    return rf__fused_rows_of(mapping->n_tasks, mapping->n_tiles);
}

static inline const rf_fused_task *rf__fused_tasks(const rf__fused_mapping *mapping) {
    return (const rf_fused_task *)(mapping + 1);
}

static inline rf__fused_staged rf__fused_staged_of(const rf__fused_mapping *mapping, int64_t rows) {
    const int64_t first = rf__fused_rows(mapping);
    return rows > first ? *(const rf__fused_staged *)(mapping + first) : (rf__fused_staged){0};
}

/* Returns true if a mapping has as many rows as its head says. */
static inline bool rf__fused_whole(const rf__fused_mapping *mapping, int64_t rows) {
    const int64_t first = rf__fused_rows(mapping);
    if (rows <= first) return rows == first;
    const rf__fused_staged staged = rf__fused_staged_of(mapping, rows);
    return staged.depth > 0 && staged.lists > 0 && rows == first + 1 + (int64_t)staged.depth * staged.lists;
}

/* The work of a batch cut into tasks, whose mapping of *rows rows of 32 bytes is still to be written: the
 * caller provides its memory. `input` must stay valid until it is freed. */
typedef struct rf__fused_cut rf__fused_cut;
RF__SHARED rf_status rf__fused_cut_new(const rf__fused_mappable *input, const rf__fused_batch *batch,
                                       int32_t sms, int32_t blocks_per_sm, rf__fused_cut **cut,
                                       int64_t *rows);
RF__SHARED void rf__fused_cut_write(rf__fused_cut *cut, rf__fused_mapping *mapping);
RF__SHARED void rf__fused_cut_free(rf__fused_cut *cut);
/* All of it, to memory that is to be freed with free(). */
rf_status rf__fused_map(const rf__fused_mappable *input, const rf__fused_batch *batch, int32_t sms,
                        int32_t blocks_per_sm, rf__fused_mapping **mapping, int64_t *rows);

/* Of RF__FUSED_MAPPING_VERSION and all words of a mapping except the first. */
uint32_t rf__fused_checksum(const rf__fused_mapping *mapping, int64_t rows);
/* Checks that a mapping of the right length (rf__fused_whole) and of these features writes each vector of
 * each bag once: by its checksum if it is unchanged, otherwise completely. RF_ERR_VALUE. */
rf_status rf__fused_mapping_check(const rf__fused_mappable *input, const rf__fused_mapping *mapping,
                                  int64_t rows);

#endif
