/* Kernels of embedding columns for AVX2. */
#if defined(__AVX2__) && defined(__F16C__)
#define RF__TABLE rf__column_avx2
#include "families/embedding_columns/cpu/column_kernels.h"
#else
typedef int rf__no_avx2; /* a C file must not be empty */
#endif
