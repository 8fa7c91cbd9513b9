/* NEON kernels: vectors of 4 floats, with the hardware's conversion of float16. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define RF__NEON
#define RF__TABLE rf__pool_neon
#define RF__WIDEST 4
#include "families/fused_embedding_bag/cpu/pool_kernels.h"
#else
typedef int rf__no_neon; /* a C file must not be empty */
#endif
