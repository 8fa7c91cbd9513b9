/* Columns whose samples have one row each, which is copied: adjacent columns are written together, in long
 * runs. */
#ifndef RECFUSE_CPU_COLUMNS_ROWS_H
#define RECFUSE_CPU_COLUMNS_ROWS_H

#include "families/embedding_columns/cpu/columns.h"

/* Returns true if the column is such a column. */
bool rf__column_copies(const rf__columns_call *call, const rf_columns_column *column);

enum { RF__COLUMN_NEIGHBOURS = 32 }; /* written together, at most */

/* Samples [first, last) of `count` adjacent columns from `number` on, all of which copy. */
void rf__columns_copy(rf__columns_call *call, int64_t number, int64_t count, int64_t first, int64_t last);

#endif
