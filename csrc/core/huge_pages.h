/* Memory that has just been allocated and is about to be written. */
#ifndef RECFUSE_CPU_HUGE_PAGES_H
#define RECFUSE_CPU_HUGE_PAGES_H

#include <stdint.h>

/* Requests huge pages if `bytes` from `data` on are worth it: a large gradient is new memory in each step,
 * and 512 page faults per 2 MiB cost several times as much as writing its zeros. A hint; pages that exist
 * already do not change. */
void rf__huge_pages_ask(void *data, int64_t bytes);

#endif
