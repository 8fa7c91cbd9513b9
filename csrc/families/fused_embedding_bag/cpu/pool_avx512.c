/* AVX-512 kernels: rows of more than 8 columns in vectors of 16 floats, narrower rows in 8 or 4. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__)
#include <immintrin.h>

#define RF__TABLE rf__pool_avx512
#define RF__WIDEST 16
#include "families/fused_embedding_bag/cpu/pool_kernels.h"
#else
typedef int rf__no_avx512; /* a C file must not be empty */
#endif
