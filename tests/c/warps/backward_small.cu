/* The small path of the backward pass on the host: lists.cu, and small_rows.cu for given RF_STAGED, RF_EPILOGUE
 * and dtypes. */
#include "warps.h"

#include "gpu/device/shared.cuh"

thread_local __align__(16) rf_u8 memory[256 << 10]; /* dynamic shared memory of a block */

#define RF_STREAMED 0
#include "families/fused_backward/epilogue.cuh"
#include "families/fused_backward/small/backward_small_args.h"

/* Namespaces separate equal names. */
namespace lists {
#include "families/fused_backward/small/lists.cu"
}
#undef NO_ROW
namespace staged {
#include "families/fused_backward/small/small_rows.cu"
}

static void lists_block(const void *args) {
    lists::rf_small_lists(*static_cast<const rf_small_lists_args *>(args));
}
static void rows_block(const void *args) { staged::rf_small_rows(*static_cast<const rf_small_args *>(args)); }

/* Lookups that the kernel before writes, no earlier than a thread waits for it. */
static thread_local struct {
    const rf_small_lists_args *args;
    const void *indices, *offsets;
    size_t n_offsets;
} before;
static void lookups_write() {
    memcpy(const_cast<RF_INDEX *>(before.args->indices), before.indices,
           (size_t)before.args->lookups * sizeof(RF_INDEX));
    memcpy(const_cast<RF_OFFSET *>(before.args->offsets), before.offsets,
           before.n_offsets * sizeof(RF_OFFSET));
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
/* Returns the number of bytes that a block has written past its shared memory. */
EXPORTED int small_lists(const void *args, unsigned blocks, rf_u64 seed, const void *indices,
                         const void *offsets, size_t n_offsets) {
    int beyond = 0;
    memset(memory, 0xcd, sizeof memory);
    before = {static_cast<const rf_small_lists_args *>(args), indices, offsets, n_offsets};
    rf_previous_kernel = lookups_write;
    run_blocks(lists_block, args, blocks, lists::BLOCK, seed);
    rf_previous_kernel = nullptr;
    for (size_t i = static_cast<const rf_small_lists_args *>(args)->shared_bytes; i < sizeof memory; i++)
        beyond += memory[i] != 0xcd;
    return beyond;
}
EXPORTED void small_rows(const void *args, unsigned blocks, rf_u64 seed) {
    memset(memory, 0xcd, sizeof memory);
    run_blocks(rows_block, args, blocks, staged::BLOCK, seed);
}
