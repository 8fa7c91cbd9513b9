/* Replaces libtorch_cpu.so when recfuse is linked, so that building needs no torch: the names of torch_abi.h
 * without code. It is neither installed nor loaded. */
#include "torch/torch_abi.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define STUB(result, name, parameters) \
    result name parameters { __builtin_trap(); }
#define STUB_DTYPE(name) STUB(int32_t, aoti_torch_dtype_##name, (void))
RF__TORCH_LIST(STUB)
RF__TORCH_DTYPE_LIST(STUB_DTYPE)
