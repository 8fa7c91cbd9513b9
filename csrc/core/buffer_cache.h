/* Memory of large results, which stays with the process for the next of its size. */
#ifndef RECFUSE_BASE_BUFFER_CACHE_H
#define RECFUSE_BASE_BUFFER_CACHE_H

#include <stddef.h>

typedef struct rf__cached_block {
    void *data; /* aligned to a huge page */
    size_t bytes;
} rf__cached_block;

/* Least bytes of a block that is worth caching: malloc caches smaller blocks itself, and allocates larger
 * ones from the system each time. */
enum { RF__CACHED_BLOCK_LEAST = 32 << 20 };

/* Returns a block of at least this many bytes with undefined contents; NULL: out of memory. Without the
 * cache, malloc would return the block to the system, and each step of a training would fault all its pages
 * again. Safe with threads and forks. */
rf__cached_block *rf__cached_block_take(size_t bytes);
/* Caches the block for the next call, where the system may reclaim it under pressure; or frees it. */
void rf__cached_block_release(rf__cached_block *block);

#endif
