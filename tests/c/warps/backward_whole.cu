/* whole.cu on the host, as RF_INDEX, RF_OFFSET, RF_EMIT and dtypes say. */
#include "warps.h"

#include "device/bags.cuh"
#include "device/shared.cuh"
#include "device/sums.cuh"

thread_local __align__(16) rf_u8 memory[256 << 10]; /* a block's dynamic shared memory */

#include "fused_embedding_bag/backward/small/whole.cu"

static void block(const void *args) { rf_small_whole(*static_cast<const rf_small_whole_args *>(args)); }

/* Returns how many bytes behind its shared memory a block has written to. */
extern "C" __attribute__((visibility("default"))) int small_whole(const void *given, unsigned blocks,
                                                                  rf_u64 seed) {
    const rf_small_whole_args &args = *static_cast<const rf_small_whole_args *>(given);
    int beyond = 0;
    memset(memory, 0xcd, sizeof memory);
    run_blocks(block, given, blocks, BLOCK, seed);
    for (size_t i = args.staged_bytes + args.lists.shared_bytes; i < sizeof memory; i++)
        beyond += memory[i] != 0xcd;
    return beyond;
}
