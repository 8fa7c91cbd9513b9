/* Kernels of embedding columns for the baseline of the architecture. */
#define RF__TABLE rf__column_plain
#include "families/embedding_columns/cpu/column_kernels.h"
