/* The instruction set of the CPU kernels. */
#ifndef RECFUSE_CPU_ISA_H
#define RECFUSE_CPU_ISA_H

#include "core/status.h"

typedef struct rf__isa {
    const char *name;
    const struct rf__pool_kernels *kernels; /* of bags; NULL if this build has no kernels for it */
    const struct rf__column_kernels *columns; /* of embedding columns */
    bool (*present)(void);           /* does this CPU run them? */
} rf__isa;

/* The instruction set in use; chosen at the first call, never NULL. */
const rf__isa *rf__isa_in_use(void);

#endif
