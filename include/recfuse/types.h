/* Types that several operators take. */
#ifndef RECFUSE_API_TYPES_H
#define RECFUSE_API_TYPES_H

#include <stdbool.h>
#include <stdint.h>

#include "recfuse/codes.h"
#include "recfuse/status.h"

RF_BEGIN_DECLARATIONS

/* Spreads the work of a call over threads. `parallel_for` cuts [begin, end) into ranges, calls body(from, to,
 * context) on each, possibly at once, and returns 0 when all have returned. */
typedef struct rf_executor {
    int32_t threads; /* ranges worth making; 1 runs on the caller's thread */
    int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain,
                            void (*body)(int64_t from, int64_t to, void *context), void *context);
} rf_executor;

RF_END_DECLARATIONS

#endif
