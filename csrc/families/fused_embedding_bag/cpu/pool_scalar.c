/* Kernels in portable C, for CPUs without another set: the compiler lowers the vectors of 4 floats to the
 * target's baseline. */
#define RF__TABLE rf__pool_scalar
#define RF__WIDEST 4
#include "families/fused_embedding_bag/cpu/pool_kernels.h"
