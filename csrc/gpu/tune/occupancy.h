/* How many blocks of a kernel an SM runs at once. */
#ifndef RECFUSE_CUDA_TUNE_OCCUPANCY_H
#define RECFUSE_CUDA_TUNE_OCCUPANCY_H

#include "gpu/driver/gpu.h"

/* By registers (a thread) alone; and by registers, threads and shared memory (a block, static and dynamic). `threads` of a
 * block: whole warps. */
int64_t rf__occupancy_by_registers(const rf__gpu *gpu, int32_t registers, int32_t threads);
RF__SHARED int64_t rf__occupancy(const rf__gpu *gpu, int32_t registers, int32_t threads,
                                 int64_t shared_bytes);

/* Bytes of shared memory a block, `shared_bytes` or more, with which no more than `blocks` fit on an SM; as many as a
 * block may have where that is not enough. */
int32_t rf__occupancy_limit(const rf__gpu *gpu, int32_t blocks, int32_t shared_bytes);

#endif
