/* What the lookups of one bag's call are like, for who chooses between ways to its gradient. */
#ifndef RECFUSE_LOOKUPS_H
#define RECFUSE_LOOKUPS_H

#include "recfuse.h"

typedef struct rf__lookups {
    const void *indices; /* [count] */
    const void *offsets; /* [bags], or [bags + 1] where the last bag's end stands there too */
    rf_int_type type; /* of both */
    int64_t count, bags, rows; /* rows: of the table */
    bool has_end;
} rf__lookups;

/* Whether offsets begin at 0, do not decrease and end with the lookups, and each index is a row of the table. */
bool rf__lookups_good(const rf__lookups *lookups);

/* Whether few rows are looked up twice: less than about three in ten, as repeats among the first 512 lookups tell, if the others
 * are like them. Indices must be good. */
bool rf__lookups_distinct(const rf__lookups *lookups);

#endif
