/* Memory that has just been allocated and is about to be written. */
#ifndef RECFUSE_CPU_HUGE_PAGES_H
#define RECFUSE_CPU_HUGE_PAGES_H

#include <stdint.h>

/* Asks for huge pages where `bytes` from `data` on are worth it: a large gradient is fresh memory at each step, and
 * 512 page faults for each 2 MiB cost several times what its zeros do. A hint; what is there already stays as it is. */
void rf__huge_pages_ask(void *data, int64_t bytes);

#endif
