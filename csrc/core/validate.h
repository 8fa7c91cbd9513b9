/* Checks of arguments that several operators make. `operator_name` opens every message. */
#ifndef RECFUSE_VALIDATE_H
#define RECFUSE_VALIDATE_H

#include <inttypes.h>

#include "core/row_format.h"
#include "core/status.h"

#define RF__I64 "%" PRId64
/* If the condition is true, fails with "recfuse.<operator_name>: " and the text; `operator_name` must be in
 * scope. */
#define RF__REFUSE_IF(condition, code, text, ...) \
    RF_FAIL_IF(condition, code, "recfuse.%s: " text, operator_name, __VA_ARGS__)

/* The least multiple of `to` that is not below `value`. */
static inline int64_t rf__round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/* Returns true if elements >= 0 are whole rows. Most rows have a power of two columns, and a division would
 * take as long as all other checks of a table. */
static inline bool rf__is_multiple(int64_t elements, int64_t columns) {
    if ((columns & (columns - 1)) == 0)
        return (elements & (columns - 1)) == 0; /* only 0 is a multiple of 0 */
    return elements % columns == 0;
}

/* Copies `count` offsets, `stride` elements apart, to `to` [count], with `first` added to each. Sums wrap:
 * offsets are unchecked, and operators refuse those that are not ascending. */
static inline void rf__offsets_copy(const void *offsets, rf_int_type type, int64_t stride, int64_t count,
                                    int64_t first, int64_t *to) {
    const int32_t *narrow = offsets;
    const int64_t *wide = offsets;
    for (int64_t i = 0; i < count; i++) {
        const int64_t offset = type == RF_INT64 ? wide[i * stride] : narrow[i * stride];
        to[i] = (int64_t)((uint64_t)first + (uint64_t)offset);
    }
}

/* Initializers of the fields that every params struct of lookups has, from `params`. */
#define RF__LOOKUPS_OF(params)                                                                        \
    .indices = (params)->indices, .lookups = (params)->lookups, .offsets = (params)->offsets,         \
    .bags = (params)->bags, .index_type = (params)->index_type, .offset_type = (params)->offset_type, \
    .sample_weights = (params)->sample_weights

/* The lookups of a call: RF__LOOKUPS_OF its params. */
typedef struct rf__lookup_arrays {
    const void *indices; /* [lookups]; may be NULL if empty */
    const void *offsets; /* [bags] or [bags + 1] */
    const float *sample_weights; /* [lookups], may be NULL */
    int64_t lookups, bags;
    rf_int_type index_type, offset_type;
} rf__lookup_arrays;

/* Checks sizes, types and pointers of a call's lookups, and its prefetch_distance. */
rf_status rf__check_lookups(const char *operator_name, const rf__lookup_arrays *arrays,
                            int32_t prefetch_distance);
rf_status rf__check_dtype(const char *operator_name, const char *argument, rf_dtype dtype);
/* The table of `features[at]` lies within its buffer. */
rf_status rf__check_table(const char *operator_name, const rf_feature *feature, int64_t at,
                          const rf_buffer *buffers, int64_t n_buffers);
/* `feature` is -1 for an operator of one table. */
rf_status rf__check_pooling(const char *operator_name, int64_t feature, int64_t pooling, int64_t padding_idx,
                            int64_t rows, bool weighted);

#endif
