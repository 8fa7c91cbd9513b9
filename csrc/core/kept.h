/* Memory of large results, which stays with the process for the next of its size. */
#ifndef RECFUSE_BASE_KEPT_H
#define RECFUSE_BASE_KEPT_H

#include <stddef.h>

typedef struct rf__kept {
    void *data; /* aligned to a huge page */
    size_t bytes;
} rf__kept;

/* Bytes that are worth it: malloc keeps smaller blocks itself, and has larger ones from the system each time. */
enum { RF__KEPT_LEAST = 32 << 20 };

/* A block of so many bytes or somewhat more, of whatever contents; NULL: there is no memory. Since malloc would give it back to
 * the system, each step of a training would wait for all its pages anew. Safe on several threads and over a fork. */
rf__kept *rf__kept_take(size_t bytes);
/* Keeps it for the next, where the system can take it away from there when it wants some; else frees it. */
void rf__kept_give(rf__kept *block);

#endif
