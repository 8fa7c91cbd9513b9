/* The torch operators: those below, and those of the families. Operator X is `rf__torch_X`. */
#ifndef RECFUSE_TORCH_OPERATORS_H
#define RECFUSE_TORCH_OPERATORS_H

#include "torch/call.h"

/* The operators that belong to no family: library.c has them. */
#define RF__TORCH_OWN_OPERATORS(X) \
    X(check)                       \
    X(cpu_isa)                     \
    X(library_version)             \
    X(library_path)

#define RF__TORCH_OPERATOR(name) extern const rf__operator rf__torch_##name;
RF__TORCH_OWN_OPERATORS(RF__TORCH_OPERATOR)
#include "families.h"

#endif
