/* Which instruction set the CPU kernels use. */
#ifndef RECFUSE_CPU_ISA_H
#define RECFUSE_CPU_ISA_H

#include "core/status.h"

typedef struct rf__isa {
    const char *name;
    const struct rf__pool_kernels *kernels; /* of bags; NULL where this build has none */
    const struct rf__column_kernels *columns; /* of embedding columns */
    bool (*present)(void);           /* does this CPU run them? */
} rf__isa;

/* The instruction set in use; chosen at the first call, never NULL. */
const rf__isa *rf__isa_in_use(void);

#endif
