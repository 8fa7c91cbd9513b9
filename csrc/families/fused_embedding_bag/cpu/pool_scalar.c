/* Kernels in portable C, for CPUs without a set of their own: the compiler lowers the vectors of 4 floats
 * to what the target's baseline has. */
#define RF__TABLE rf__pool_scalar
#define RF__WIDEST 4
#include "families/fused_embedding_bag/cpu/pool_kernels.h"
