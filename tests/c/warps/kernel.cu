/* A kernel for the host: KERNEL of KERNEL_FILE, with the options of a launch (gpu.c). */
#include "warps.h"

#include "gpu/device/shared.cuh"

thread_local __align__(16) rf_u8 memory[256 << 10]; /* dynamic shared memory of a block */

#include KERNEL_FILE

template <class A> static void call_kernel(void (*kernel)(A), const void *args) {
    kernel(*static_cast<const A *>(args));
}
static void kernel_block(const void *args) { call_kernel(KERNEL, args); }

/* Runs all blocks of a launch. */
extern "C" __attribute__((visibility("default"))) void kernel_run(const void *args, const unsigned *grid,
                                                                  unsigned threads, rf_u64 seed) {
    memset(memory, 0xcd, sizeof memory);
    gridDim.y = grid[1] > 0 ? grid[1] : 1;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
        run_blocks(kernel_block, args, grid[0], threads, seed + blockIdx.y);
}
