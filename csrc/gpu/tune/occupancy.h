/* The number of blocks of a kernel that an SM runs at once. */
#ifndef RECFUSE_CUDA_TUNE_OCCUPANCY_H
#define RECFUSE_CUDA_TUNE_OCCUPANCY_H

#include "gpu/driver/gpu.h"

/* By registers (per thread) only; and by registers, threads and shared memory (per block, static and
 * dynamic). `threads` of a block: whole warps. */
int64_t rf__occupancy_by_registers(const rf__gpu *gpu, int32_t registers, int32_t threads);
RF__SHARED int64_t rf__occupancy(const rf__gpu *gpu, int32_t registers, int32_t threads,
                                 int64_t shared_bytes);

/* Returns the bytes of shared memory per block, at least `shared_bytes`, with which at most `blocks` fit on
 * an SM; the most that a block may have if that is not enough. */
int32_t rf__occupancy_limit(const rf__gpu *gpu, int32_t blocks, int32_t shared_bytes);

#endif
