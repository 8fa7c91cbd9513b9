/* Kernels of embedding columns for what every CPU of the architecture has. */
#define RF__TABLE rf__column_plain
#include "families/embedding_columns/cpu/column_kernels.h"
