/* Threads for a single call, for work that runs without torch's thread pool. */
#ifndef RECFUSE_THREADS_H
#define RECFUSE_THREADS_H

#include "recfuse.h"

enum { RF__MOST_THREADS = 256 };

/* An executor that starts its threads at each call and joins them: about 20 us each, no state between calls,
 * fine after a fork. `threads` is put between 1 and RF__MOST_THREADS. */
rf_executor rf__threads_executor(int64_t threads);

#endif
