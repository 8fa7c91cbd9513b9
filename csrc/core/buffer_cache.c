/* Cached blocks are in slots, which an atomic exchange empties or fills. There is no lock that a fork could
 * leave locked. */
#define _DEFAULT_SOURCE /* madvise */
#include "core/buffer_cache.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    SLOTS = 4,
    HUGE_PAGE = 2 << 20,
    SPARE_FRACTION =
        8 /* blocks are larger than requested by this fraction, because gradients of steps differ slightly */
};

/* Atomic: each exchange transfers the ownership of a block. */
static _Atomic(rf__cached_block *) slots[SLOTS];
/* Atomic: the slot whose block is replaced if no slot is empty. */
static atomic_uint next_slot;

static void block_free(rf__cached_block *block) {
    if (block == NULL) return;
    free(block->data);
    free(block);
}

/* Returns true if the system may take the pages of the block until they are written again. */
static bool make_reclaimable(const rf__cached_block *block) {
#ifdef MADV_FREE
    return madvise(block->data, block->bytes, MADV_FREE) == 0;
#else
    (void)block;
    return false;
#endif
}

static void block_store(rf__cached_block *block) {
    for (int i = 0; i < SLOTS; i++) {
        rf__cached_block *empty = NULL;
        if (atomic_compare_exchange_strong(&slots[i], &empty, block)) return;
    }
    block_free(atomic_exchange(&slots[atomic_fetch_add(&next_slot, 1) % SLOTS], block));
}

void rf__cached_block_release(rf__cached_block *block) {
    if (make_reclaimable(block)) {
        block_store(block);
    } else {
        block_free(block);
    }
}

static bool block_serves(const rf__cached_block *block, size_t bytes) {
    return block->bytes >= bytes && block->bytes / 2 <= bytes;
}

static rf__cached_block *block_new(size_t bytes) {
    rf__cached_block *block = malloc(sizeof *block);
    if (block == NULL) return NULL;
    block->bytes = (bytes + bytes / SPARE_FRACTION + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    block->data = aligned_alloc(HUGE_PAGE, block->bytes);
    if (block->data == NULL) {
        free(block);
        return NULL;
    }
    return block;
}

rf__cached_block *rf__cached_block_take(size_t bytes) {
    for (int i = 0; i < SLOTS; i++) {
        rf__cached_block *block = atomic_exchange(&slots[i], NULL);
        if (block == NULL) continue;
        if (block_serves(block, bytes)) return block;
        block_store(block); /* into any slot that is empty by now */
    }
    return block_new(bytes);
}
