/* The CPU that operators run on. */
#ifndef RECFUSE_API_CPU_H
#define RECFUSE_API_CPU_H

#include "recfuse/types.h"

RF_BEGIN_DECLARATIONS

/* Returns the instruction set of the CPU kernels: "avx512", "avx2", "neon" or "scalar". It is selected once,
 * at the first use: the best of this CPU, or that of RECFUSE_CPU_ISA if the CPU has it. Static text. */
RF_API const char *rf_cpu_isa(void);

/* Asks the system to back [data, data + bytes) with huge pages: fewer TLB misses for large tables. A hint:
 * returns RF_OK also if it has no effect. The contents do not change. `data` may have any alignment; only
 * whole pages inside are affected. May block while the system moves pages. RF_ERR_VALUE, RF_ERR_INTERNAL. */
RF_API rf_status rf_advise_huge_pages(void *data, int64_t bytes);

RF_END_DECLARATIONS

#endif
