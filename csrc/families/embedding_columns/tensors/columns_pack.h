/* A batch on the host in one buffer: the inputs of a group become one, dense ones [values, batch], jagged
 * ones concatenated. */
#ifndef RECFUSE_COLUMNS_PACK_H
#define RECFUSE_COLUMNS_PACK_H

#include "families/embedding_columns/tensors/columns_inputs.h"

/* The lists of an operator's tensors. */
typedef enum rf__columns_list {
    RF__COLUMNS_DENSE,
    RF__COLUMNS_VALUES,
    RF__COLUMNS_OFFSETS,
    RF__COLUMNS_WEIGHTS,
    RF__COLUMNS_LISTS
} rf__columns_list;

/* A tensor of the buffer. */
typedef struct rf__columns_part {
    rf__columns_list list;
    rf_column_type type;
    int64_t rows, columns; /* columns -1: it has one dimension */
    int64_t at; /* byte */
} rf__columns_part;

/* One input of those that are packed. */
typedef struct rf__columns_group {
    rf_column_type type;
    bool is_jagged, has_weights;
    bool is_wide; /* offsets become int64 */
    int64_t inputs;
    int64_t values; /* dense: of a sample; jagged: of all samples */
    int64_t bags; /* jagged: of each input */
    int64_t at[RF__COLUMNS_LISTS]; /* bytes */
} rf__columns_group;

typedef struct rf__columns_packing {
    const rf__columns_inputs *inputs; /* on the host */
    const int32_t *group_of; /* [inputs->count]: dense groups come first */
    rf__columns_group *groups; /* [n_groups] */
    int32_t n_groups;
    rf__columns_part *parts; /* [4 * n_groups]; n_parts of them are there */
    int32_t n_parts;
    int64_t bytes; /* of the buffer */
} rf__columns_packing;

/* Computes the layout of the buffer. The caller sets inputs, group_of and n_groups, and frees groups and
 * parts, also on failure. RF_ERR_VALUE: inputs on a GPU, or of one group that differ. */
RF__SHARED rf_status rf__columns_pack_plan(rf__columns_packing *packing);
/* Copies the batch to memory [bytes]. Values after the last offset are left out. Offsets that do not begin
 * with 0, or end after the values, become negative, which operators report; the offsets of a group's only
 * input are copied unchanged. */
RF__SHARED void rf__columns_pack(const rf__columns_packing *packing, char *memory);

#endif
