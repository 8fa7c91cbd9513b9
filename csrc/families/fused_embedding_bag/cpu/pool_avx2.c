/* AVX2 kernels: rows of more than 4 columns in vectors of 8 floats, narrower rows in 4. */
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

#define RF__TABLE rf__pool_avx2
#define RF__WIDEST 8
#include "families/fused_embedding_bag/cpu/pool_kernels.h"
#else
typedef int rf__no_avx2; /* a C file must not be empty */
#endif
