/* The CPU that operators run on. */
#ifndef RECFUSE_API_CPU_H
#define RECFUSE_API_CPU_H

#include "recfuse/types.h"

RF_BEGIN_DECLARATIONS

/* Instruction set of the CPU kernels: "avx512", "avx2", "neon" or "scalar"; chosen once, at the first
 * use, as the best that this CPU has or what RECFUSE_CPU_ISA names if the CPU has it. Static text. */
RF_API const char *rf_cpu_isa(void);

/* Asks the system to back [data, data + bytes) with huge pages where it can: fewer TLB misses for
 * large tables. A hint: RF_OK also where it does nothing. The contents are kept. `data` may
 * have any alignment; whole pages inside are meant. May block while the system moves pages. RF_ERR_VALUE,
 * RF_ERR_INTERNAL. */
RF_API rf_status rf_advise_huge_pages(void *data, int64_t bytes);

RF_END_DECLARATIONS

#endif
