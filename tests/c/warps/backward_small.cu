/* The small path of the backward on the host: lists.cu, and staged.cu as RF_STAGED, RF_EMIT and dtypes say. */
#include "warps.h"

#include "device/shared.cuh"

thread_local __align__(16) rf_u8 memory[256 << 10]; /* a block's dynamic shared memory */

#define RF_STREAMED 0
#include "fused_embedding_bag/backward/emit.cuh"
#include "fused_embedding_bag/backward/small/args.h"

/* Names of one are not seen by the other. */
namespace lists {
#include "fused_embedding_bag/backward/small/lists.cu"
}
#undef NO_ROW
namespace staged {
#include "fused_embedding_bag/backward/small/staged.cu"
}

static void lists_block(const void *args) {
    lists::rf_small_lists(*static_cast<const rf_small_lists_args *>(args));
}
static void rows_block(const void *args) { staged::rf_small_rows(*static_cast<const rf_small_args *>(args)); }

#define EXPORTED extern "C" __attribute__((visibility("default")))
/* Returns how many bytes behind its shared memory a block has written to. */
EXPORTED int small_lists(const void *args, unsigned blocks, rf_u64 seed) {
    int beyond = 0;
    memset(memory, 0xcd, sizeof memory);
    run_blocks(lists_block, args, blocks, lists::BLOCK, seed);
    for (size_t i = static_cast<const rf_small_lists_args *>(args)->shared_bytes; i < sizeof memory; i++)
        beyond += memory[i] != 0xcd;
    return beyond;
}
EXPORTED void small_rows(const void *args, unsigned blocks, rf_u64 seed) {
    memset(memory, 0xcd, sizeof memory);
    run_blocks(rows_block, args, blocks, staged::BLOCK, seed);
}
