/* Every function that fake_cuda.c does not define: counted, and without effect. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include "fake_cuda.h"

#define DEFINE(result, name, parameters) \
    __attribute__((weak)) result name parameters { return fake_cuda_call(#name); }
RF__CUDA_LIST(DEFINE)
