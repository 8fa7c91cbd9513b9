/* Kernels of embedding columns for AVX-512. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define RF__TABLE rf__column_avx512
#include "families/embedding_columns/cpu/column_kernels.h"
#else
typedef int rf__no_avx512; /* a C file must not be empty */
#endif
